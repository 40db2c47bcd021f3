"""The connections of one host's leader to the leaders of the other hosts of a group.

In each step of an operation every leader sends one message to each of the others, and receives one of each:
all at the same time, so that nobody waits for somebody who waits for him. A message says what its sender is
doing, so calls that differ are found here.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowchan.collective.values import dumps, loads
from flowchan.errors import GroupError, MemberDied, MemberLeft

HEADER = struct.Struct("<BIQQ")  # kind, operation, what the call is, bytes that follow
DATA, FAILED, LEFT = range(3)
STALLED = 10.0
"""Seconds of waiting after which the log says for whom."""
PIECE = 1 << 20  # bytes for one call of the system

log = logging.getLogger("flowchan.collective")


class Differs(Exception):
    """The leaders' calls are not the same."""


@dataclass(slots=True)
class Edge:
    """What has crossed between two hosts' leaders: bytes sent and received, in how many steps of operations,
    and the seconds that these took from their beginning on this side. An operation has one step or two."""

    sent: int = 0
    received: int = 0
    steps: int = 0
    seconds: float = 0.0


class _Peer:
    """What is under way from and to one leader in one step."""

    def __init__(self, out: Sequence[Any], header: bytes) -> None:
        self.out = [memoryview(header), *(memoryview(part).cast("B") for part in out if len(part))]
        self.header = bytearray(HEADER.size)
        self.got = 0
        self.into: memoryview | None = None
        self.kind = DATA
        self.differs = False

    @property
    def has_come(self) -> bool:
        return self.into is not None and self.got == HEADER.size + len(self.into)

    @property
    def is_done(self) -> bool:
        return not self.out and self.has_come


class Links:
    """``sockets`` and ``ranks`` by host: the connection to its leader, and the leader's rank in the group."""

    def __init__(self, sockets: Mapping[int, socket.socket], ranks: Mapping[int, int]) -> None:
        self._sockets = dict(sockets)
        self._ranks = ranks
        self._closed = False
        self._edges = {host: Edge() for host in self._sockets}
        for sock in self._sockets.values():
            sock.setblocking(False)

    @property
    def edges(self) -> dict[int, Edge]:
        """By the ranks of the leaders."""
        return {self._ranks[host]: replace(edge) for host, edge in self._edges.items()}

    def swap(
        self,
        call: tuple[str, int, int],
        out: Callable[[int], Sequence[Any]],
        into: Callable[[int], memoryview | None] = lambda _: None,
        timeout: float | None = None,
    ) -> dict[int, memoryview]:
        """One step. ``call``: the operation by name and number, and what it is. ``out(host)`` goes there, one
        piece after the other; what comes from there is written ``into(host)``, or into new memory. Raises
        what another leader has failed by, :class:`Differs`, ``TimeoutError``, :class:`MemberDied`."""
        _, doing, key = call
        peers = {}
        for host in self._sockets:
            parts = list(out(host))
            length = sum(len(memoryview(part).cast("B")) for part in parts if len(part))
            peers[host] = _Peer(parts, HEADER.pack(DATA, doing, key, length))
        self._move(peers, call, into, timeout)
        for host, peer in peers.items():
            if peer.kind != DATA:
                self._raise_what_it_says(host, peer, call)
        if any(peer.differs for peer in peers.values()):
            raise Differs
        return {host: peer.into for host, peer in peers.items() if peer.into is not None}

    def fail(self, error: BaseException, call: tuple[str, int, int], goes_on: bool) -> None:
        """Tells the others in this step why it can't be done. ``goes_on``: takes what they have sent in it,
        so that the next operation can follow."""
        word = dumps(error)
        _, doing, key = call
        peers = {host: _Peer([word], HEADER.pack(FAILED, doing, key, len(word))) for host in self._sockets}
        if goes_on:
            self._move(peers, call, lambda _: None, None)
            return
        for host, peer in peers.items():
            with contextlib.suppress(OSError):  # it is gone, too, or takes nothing: then it hears the end
                self._sockets[host].sendmsg(peer.out)
        self.close()

    def leave(self) -> None:
        """Says that this host's members take part no more, and closes."""
        for sock in self._sockets.values():
            with contextlib.suppress(OSError):
                sock.send(HEADER.pack(LEFT, 0, 0, 0))
        self.close()

    def close(self) -> None:
        self._closed = True
        for sock in self._sockets.values():
            sock.close()

    # --- one step ---

    def _move(
        self,
        peers: dict[int, _Peer],
        call: tuple[str, int, int],
        into: Callable[[int], memoryview | None],
        timeout: float | None,
    ) -> None:
        """Whatever it raises, the connections are closed: nobody would know where in a message they are."""
        if self._closed:
            raise GroupError(f"{call[0]} can't be done: the connections to the other hosts are closed")
        try:
            self._move_all(peers, call, into, timeout)
        except BaseException:
            self.close()
            raise

    def _move_all(
        self,
        peers: dict[int, _Peer],
        call: tuple[str, int, int],
        into: Callable[[int], memoryview | None],
        timeout: float | None,
    ) -> None:
        begun = time.monotonic()
        said = False
        for host, peer in peers.items():
            self._send(host, peer, call)
        waiting = {host for host, peer in peers.items() if not peer.is_done}
        while waiting:
            ready = self._ready(peers, waiting, begun, timeout)
            for host, event in ready:
                peer = peers[host]
                if event & ~select.POLLOUT:
                    self._receive(host, peer, call, into)
                if event & select.POLLOUT and peer.out:
                    self._send(host, peer, call)
                if peer.is_done:
                    waiting.discard(host)
                    self._edges[host].steps += 1
                    self._edges[host].seconds += time.monotonic() - begun
            passed = time.monotonic() - begun
            if timeout is not None and passed > timeout:
                raise TimeoutError(f"{call[0]} was not done in time: {self._named(waiting)} has not come")
            if passed > STALLED and not ready and not said:
                said = True
                log.warning("%s has waited for %.0f s: for %s", call[0], passed, self._named(waiting))

    def _ready(
        self, peers: dict[int, _Peer], waiting: set[int], begun: float, timeout: float | None
    ) -> list[tuple[int, int]]:
        """Hosts whose connection can go on, and how; waits for them a while."""
        poll, host_of = select.poll(), {}
        for host in waiting:
            sock, peer = self._sockets[host], peers[host]
            poll.register(sock, (0 if peer.has_come else select.POLLIN) | (select.POLLOUT if peer.out else 0))
            host_of[sock.fileno()] = host
        passed = time.monotonic() - begun
        longest = STALLED if timeout is None else min(STALLED, max(0.0, timeout - passed))
        return [(host_of[fd], event) for fd, event in poll.poll(longest * 1000 + 1)]

    def _send(self, host: int, peer: _Peer, call: tuple[str, int, int]) -> None:
        sock = self._sockets[host]
        while peer.out:
            try:
                sent = sock.sendmsg([part[:PIECE] for part in peer.out[:2]])
            except BlockingIOError:
                return
            except OSError as error:
                self._receive(host, peer, call, lambda _: None)  # its last word may be here
                if peer.kind != FAILED or not peer.has_come:
                    raise self._gone(host, call, error.strerror or "") from error
                peer.out.clear()
                return
            self._edges[host].sent += sent
            while sent:
                taken = min(sent, len(peer.out[0]))
                peer.out[0], sent = peer.out[0][taken:], sent - taken
                if not peer.out[0]:
                    del peer.out[0]

    def _receive(
        self,
        host: int,
        peer: _Peer,
        call: tuple[str, int, int],
        into: Callable[[int], memoryview | None],
    ) -> None:
        sock = self._sockets[host]
        try:
            while peer.into is None:
                self._take(sock.recv_into(memoryview(peer.header)[peer.got :]), peer, host, call)
                if peer.got == HEADER.size:
                    self._begin(host, peer, call, into)
            while peer.got < HEADER.size + len(peer.into):
                start = peer.got - HEADER.size
                self._take(sock.recv_into(peer.into[start : start + PIECE]), peer, host, call)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._gone(host, call, error.strerror or "") from error

    def _take(self, count: int, peer: _Peer, host: int, call: tuple[str, int, int]) -> None:
        if not count:
            raise self._gone(host, call, "it ended the connection")
        peer.got += count
        self._edges[host].received += count

    def _begin(
        self,
        host: int,
        peer: _Peer,
        call: tuple[str, int, int],
        into: Callable[[int], memoryview | None],
    ) -> None:
        """Its header has come."""
        peer.kind, doing, key, length = HEADER.unpack(peer.header)
        if peer.kind == LEFT:
            self._raise_what_it_says(host, peer, call)
        peer.differs = (doing, key) != call[1:]
        given = into(host) if peer.kind == DATA and not peer.differs else None
        if given is not None and len(given) != length:
            given, peer.differs = None, True
        peer.into = memoryview(bytearray(length)) if given is None else given

    # --- words ---

    def _raise_what_it_says(self, host: int, peer: _Peer, call: tuple[str, int, int]) -> None:
        if peer.kind == LEFT:
            rank = self._ranks[host]
            raise MemberLeft(f"{call[0]} can't be done: rank {rank} and its host have left", (rank,), call[0])
        assert peer.into is not None
        error: BaseException = loads(bytes(peer.into))
        raise error

    def _gone(self, host: int, call: tuple[str, int, int], why: str) -> MemberDied:
        rank = self._ranks[host]
        return MemberDied(
            f"{call[0]} can't be done: rank {rank}, which connects its host to the others, died, gave up, "
            f"or is out of reach ({why})",
            (rank,),
            call[0],
        )

    def _named(self, hosts: set[int]) -> str:
        return " and ".join(f"rank {self._ranks[host]} with its host" for host in sorted(hosts))

"""The connections of one host's leader to the leaders of the other hosts of a group.

In each step of an operation every leader sends one message to each of the others, and receives one of each:
all at the same time, so that nobody waits for somebody who waits for him. A message says what its sender is
doing, so calls that differ are found here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
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
LAST = 1.0
"""Seconds for a last word to come that has begun to."""
PIECE = 1 << 20  # bytes for one call of the system

log = logging.getLogger("flowchan.collective")


Call = tuple[str, int, int]
"""An operation: its name, its number, and what it is called with, as a number."""


class Differs(Exception):
    """The leaders' calls are not the same."""


@dataclass(slots=True)
class Edge:
    """What has crossed between two hosts' leaders: bytes sent and received, in how many steps of operations,
    and the seconds that these took from their beginning on this side. An operation has one step or more."""

    sent: int = 0
    received: int = 0
    steps: int = 0
    seconds: float = 0.0


class _Peer:
    """What is under way from and to one leader in one step."""

    def __init__(self, out: Sequence[Any], header: bytes) -> None:
        self.out = [memoryview(header), *(memoryview(part).cast("B") for part in out if len(part))]
        self.header = bytearray(HEADER.size)
        self.sent = self.got = 0
        self.into: memoryview | None = None
        self.kind = DATA
        self.differs = False

    @property
    def has_come(self) -> bool:
        return self.into is not None and self.got == HEADER.size + len(self.into)

    @property
    def is_done(self) -> bool:
        return not self.out and self.has_come

    @property
    def is_torn(self) -> bool:
        """Whether our message has been sent in part."""
        return bool(self.sent and self.out)


class Links:
    """``sockets`` and ``ranks`` by host: the connection to its leader, and the leader's rank in the group."""

    def __init__(self, sockets: Mapping[int, socket.socket], ranks: Mapping[int, int]) -> None:
        self.sockets = dict(sockets)
        self.ranks = ranks
        self.edges_by_host = {host: Edge() for host in self.sockets}
        self.leaves = os.fdopen(os.eventfd(0, os.EFD_CLOEXEC), "r+b", 0)
        """Is readable once this member is about to leave."""
        self._torn: set[int] = set()  # hosts to which a part of a message was sent
        self._leaving = self._closed = False
        self._in_use = threading.RLock()
        for sock in self.sockets.values():
            sock.setblocking(False)

    @property
    def edges(self) -> dict[int, Edge]:
        """By the ranks of the leaders."""
        return {self.ranks[host]: replace(edge) for host, edge in self.edges_by_host.items()}

    def swap(
        self,
        call: Call,
        out: Callable[[int], Sequence[Any]],
        into: Callable[[int], memoryview | None] = lambda _: None,
        timeout: float | None = None,
    ) -> dict[int, memoryview]:
        """One step. ``out(host)`` goes there, one piece after the other; what comes from there is written
        ``into(host)``, or into new memory. Raises what another leader has failed by, :class:`Differs`,
        ``TimeoutError``, :class:`MemberDied`."""
        _, doing, key = call
        peers = {}
        for host in self.sockets:
            parts = list(out(host))
            length = sum(len(memoryview(part).cast("B")) for part in parts if len(part))
            peers[host] = _Peer(parts, HEADER.pack(DATA, doing, key, length))
        step = _Step(self, call, peers, into, timeout)
        self._go(step)
        step.raise_what_they_say()
        if any(peer.differs for peer in peers.values()):
            raise Differs
        return {host: peer.into for host, peer in peers.items() if peer.into is not None}

    def fail(self, error: BaseException, call: Call, goes_on: bool) -> None:
        """Tells the others in this step why it can't be done. ``goes_on``: takes what they have sent in it,
        so that the next operation can follow."""
        if self._leaving:
            return  # that is what they are to hear
        word = dumps(error)
        _, doing, key = call
        peers = {host: _Peer([word], HEADER.pack(FAILED, doing, key, len(word))) for host in self.sockets}
        if goes_on:
            self._go(_Step(self, call, peers, lambda _: None, None))
            return
        for host, peer in peers.items():
            with contextlib.suppress(OSError):  # it is gone, too, or takes nothing: then it hears the end
                self.sockets[host].sendmsg(peer.out)
        self.close()

    def _go(self, step: _Step) -> None:
        """Whatever it raises, nobody knows where in a message the connections are: they are closed, or are
        about to be."""
        with self._in_use:
            if self._closed:
                raise GroupError(
                    f"{step.call[0]} can't be done: the connections to the other hosts are closed"
                )
            try:
                step.run()
            except Leaves:
                self._torn = {host for host, peer in step.peers.items() if peer.is_torn}
                raise GroupError(f"{step.call[0]} was not done: this member has left") from None
            except BaseException:
                self.close()
                raise

    def ended(self) -> int | None:
        """Between two steps: a host whose leader will take no part in the next."""
        for host, sock in self.sockets.items():
            try:
                word = sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                continue
            except OSError:
                word = b""
            if word != bytes([DATA]):
                return host
        return None

    def last_word(self, host: int, call: str) -> BaseException:
        """What the leader of that host, which :meth:`ended` has given, ended by. These connections can't be
        used any more."""
        peers = {host: _Peer([], HEADER.pack(DATA, 0, 0, 0))}
        step = _Step(self, (call, 0, 0), peers, lambda _: None, LAST)
        try:
            self._go(step)
            step.raise_what_they_say()
        except (GroupError, TimeoutError, MemoryError) as error:
            if peers[host].has_come or not isinstance(error, TimeoutError):
                return error
        return self.gone(host, call, "its last word has not come")

    def gone(self, host: int, call: str, why: str) -> MemberDied:
        """What to raise when the leader of that host is lost."""
        rank = self.ranks[host]
        return MemberDied(
            f"{call} can't be done: rank {rank}, which connects its host to the others, died, gave up, "
            f"or is out of reach ({why})",
            (rank,),
            call,
        )

    def interrupt(self) -> None:
        """Ends the step that another thread is in, before :meth:`leave`."""
        self._leaving = True
        with contextlib.suppress(ValueError, OSError):  # that step has failed, and closed this
            os.eventfd_write(self.leaves.fileno(), 1)

    def cut(self) -> None:
        """Ends the step that another thread is in, and all that follow: they raise :class:`MemberDied`."""
        for sock in self.sockets.values():
            with contextlib.suppress(OSError):  # it is closed
                sock.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Says that this host's members take part no more, and closes."""
        with self._in_use:
            for host, sock in self.sockets.items():
                if host not in self._torn:
                    with contextlib.suppress(OSError):
                        sock.send(HEADER.pack(LEFT, 0, 0, 0))
            self.close()

    def close(self) -> None:
        with self._in_use:
            if not self._closed:
                self._closed = True
                self.leaves.close()
                for sock in self.sockets.values():
                    sock.close()


class Leaves(Exception):
    """This member is about to leave."""


class _Step:
    """One step: to all other leaders, and from them."""

    def __init__(
        self,
        links: Links,
        call: Call,
        peers: dict[int, _Peer],
        into: Callable[[int], memoryview | None],
        timeout: float | None,
    ) -> None:
        self.call, self.peers = call, peers
        self._links, self._into, self._timeout = links, into, timeout
        self._waiting: set[int] = set()
        self._begun = time.monotonic()

    def run(self) -> None:
        """Raises ``TimeoutError``, :class:`MemberDied`, :class:`Leaves`."""
        said = False
        for host in self.peers:
            self._send(host)
        self._waiting = {host for host, peer in self.peers.items() if not peer.is_done}
        while self._waiting:
            ready = self._ready()
            for host, event in ready:
                if event & ~select.POLLOUT:
                    self._receive(host)
                if event & select.POLLOUT and self.peers[host].out:
                    self._send(host)
                if self.peers[host].is_done:
                    self._done(host)
            passed = time.monotonic() - self._begun
            if self._timeout is not None and passed > self._timeout:
                raise TimeoutError(f"{self.call[0]} was not done in time: {self._absent()} has not come")
            if passed > STALLED and not ready and not said:
                said = True
                log.warning("%s has waited for %.0f s: for %s", self.call[0], passed, self._absent())

    def _done(self, host: int) -> None:
        self._waiting.discard(host)
        edge = self._links.edges_by_host[host]
        edge.steps += 1
        edge.seconds += time.monotonic() - self._begun

    def _ready(self) -> list[tuple[int, int]]:
        """Hosts whose connection can go on, and how; waits for them a while."""
        poll, host_of = select.poll(), {}
        poll.register(self._links.leaves, select.POLLIN)
        for host in self._waiting:
            sock, peer = self._links.sockets[host], self.peers[host]
            poll.register(sock, (0 if peer.has_come else select.POLLIN) | (select.POLLOUT if peer.out else 0))
            host_of[sock.fileno()] = host
        passed = time.monotonic() - self._begun
        longest = STALLED if self._timeout is None else min(STALLED, max(0.0, self._timeout - passed))
        found = dict(poll.poll(longest * 1000 + 1))
        if found.pop(self._links.leaves.fileno(), None):
            raise Leaves
        return [(host_of[fd], event) for fd, event in found.items()]

    def _send(self, host: int) -> None:
        sock, peer = self._links.sockets[host], self.peers[host]
        while peer.out:
            try:
                sent = sock.sendmsg([part[:PIECE] for part in peer.out[:2]])
            except BlockingIOError:
                return
            except OSError as error:
                self._receive(host, keeps=False)  # its last word may be here
                if peer.kind != FAILED or not peer.has_come:
                    raise self._gone(host, error.strerror or "") from error
                peer.out.clear()
                return
            peer.sent += sent
            self._links.edges_by_host[host].sent += sent
            while sent:
                taken = min(sent, len(peer.out[0]))
                peer.out[0], sent = peer.out[0][taken:], sent - taken
                if not peer.out[0]:
                    del peer.out[0]

    def _receive(self, host: int, keeps: bool = True) -> None:
        """``keeps``: what comes is wanted where it belongs."""
        sock, peer = self._links.sockets[host], self.peers[host]
        try:
            while peer.into is None:
                self._take(host, sock.recv_into(memoryview(peer.header)[peer.got :]))
                if peer.got == HEADER.size:
                    self._begin(host, keeps)
            while peer.got < HEADER.size + len(peer.into):
                start = peer.got - HEADER.size
                self._take(host, sock.recv_into(peer.into[start : start + PIECE]))
        except BlockingIOError:
            return
        except OSError as error:
            raise self._gone(host, error.strerror or "") from error

    def _take(self, host: int, count: int) -> None:
        if not count:
            raise self._gone(host, "it ended the connection")
        self.peers[host].got += count
        self._links.edges_by_host[host].received += count

    def _begin(self, host: int, keeps: bool) -> None:
        """Its header has come."""
        peer = self.peers[host]
        peer.kind, doing, key, length = HEADER.unpack(peer.header)
        if peer.kind == LEFT:
            raise self._left(host)
        peer.differs = (doing, key) != self.call[1:]
        given = self._into(host) if keeps and peer.kind == DATA and not peer.differs else None
        if given is not None and len(given) != length:
            given, peer.differs = None, True
        peer.into = memoryview(bytearray(length)) if given is None else given

    # --- words ---

    def raise_what_they_say(self) -> None:
        for peer in self.peers.values():
            if peer.kind != DATA:
                assert peer.into is not None
                error: BaseException = loads(bytes(peer.into))
                raise error

    def _left(self, host: int) -> MemberLeft:
        rank, call = self._links.ranks[host], self.call[0]
        return MemberLeft(f"{call} can't be done: rank {rank} and its host have left", (rank,), call)

    def _gone(self, host: int, why: str) -> MemberDied:
        return self._links.gone(host, self.call[0], why)

    def _absent(self) -> str:
        return " and ".join(f"rank {self._links.ranks[host]} with its host" for host in sorted(self._waiting))

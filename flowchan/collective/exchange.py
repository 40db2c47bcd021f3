"""Run one step of an operation, in which the leaders of a group's hosts exchange messages.

In a step, each leader exchanges one message with every other leader. All messages are sent at the same time,
so that leaders cannot deadlock. Each message identifies its sender's call, so that every leader detects
mismatched calls. Data from one leader to all leaders, or from all to one, is sent along a tree. Leaders that
are not neighbours in the tree exchange empty messages.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowchan.collective.trees import Tree
from flowchan.collective.value_bytes import loads
from flowchan.errors import GroupError, MemberDied, MemberLeft
from flowchan.transport.interrupts import is_interrupt, unless_interrupted

HEADER = struct.Struct("<BIQQ")  # kind, operation number, key of the call, length of the data
SEGMENT = struct.Struct("<IQ")  # header of a segment in a gathered message: host, length of its data
DATA, FAILED, LEFT = range(3)
STALLED = 10.0
"""After this many seconds, log a warning that names the missing members."""
PIECE = 1 << 20  # maximum number of bytes per system call

log = logging.getLogger("flowchan.collective")

Call = tuple[str, int, int]
"""An operation's name and number, and the key of its arguments."""


class Differs(Exception):
    """Raised when the leaders made different calls."""


@dataclass(slots=True)
class ConnectionStats:
    """Traffic on the connection between two hosts' leaders.

    Attributes:
        sent: Bytes sent.
        received: Bytes received.
        steps: Number of completed steps. An operation consists of one or more steps.
        seconds: Total duration of these steps, measured on this side.
        delay: Time until one byte arrives, in seconds. Measured when a group on more than two hosts forms;
            otherwise None.
        bytes_per_second: Throughput, measured together with ``delay``; otherwise None.

    Example:
        >>> from flowchan.collective import group
        >>> with group() as g:
        ...     for rank, connection in g.stats().items():
        ...         print(rank, connection.sent, connection.received)
    """

    sent: int = 0
    received: int = 0
    steps: int = 0
    seconds: float = 0.0
    delay: float | None = None
    bytes_per_second: float | None = None


class Connections:
    """Connections from the leader of ``host`` to the other leaders.

    ``sockets`` maps each host to the connection with its leader, and ``ranks`` maps each host to its leader's
    rank.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], ranks: Mapping[int, int], host: int) -> None:
        self.sockets = dict(sockets)
        self.ranks = ranks
        self.host = host
        self.edges_by_host = {host: ConnectionStats() for host in self.sockets}
        self.leaves = os.fdopen(os.eventfd(0, os.EFD_CLOEXEC), "r+b", 0)
        """Event descriptor that becomes readable when another thread closes this member."""
        for sock in self.sockets.values():
            sock.setblocking(False)

    def death_error(self, host: int, call: str, why: str) -> MemberDied:
        """Return the error to raise when the leader of ``host`` is lost."""
        rank = self.ranks[host]
        return MemberDied(
            f"{call} failed: rank {rank}, which connects its host to the others, died, gave up, or is "
            f"unreachable ({why})",
            (rank,),
            call,
        )


class LeaderPeer:
    """State of the exchange with one other leader during a step.

    ``out`` lists the buffers of the message to that leader. ``out`` is None while the message depends on data
    that has not arrived yet.
    """

    def __init__(self, call: Call, out: Sequence[Any] | None, kind: int = DATA) -> None:
        self.out: list[memoryview] = []
        self.waits = out is None
        if out is not None:
            self.set_message(call, out, kind)
        self.header = bytearray(HEADER.size)
        self.sent = self.got = 0
        self.into: memoryview | None = None
        self.kind = DATA
        self.differs = False

    @property
    def has_come(self) -> bool:
        return self.into is not None and self.got == HEADER.size + len(self.into)

    @property
    def is_right(self) -> bool:
        """Return whether the leader's message carries data for the same call."""
        return self.kind == DATA and not self.differs

    @property
    def is_sent(self) -> bool:
        return not self.out and not self.waits

    @property
    def is_done(self) -> bool:
        return self.is_sent and self.has_come

    @property
    def is_partially_sent(self) -> bool:
        """Return whether the message to the leader has been sent only in part."""
        return bool(self.sent and not self.is_sent)

    def set_message(self, call: Call, parts: Sequence[Any], kind: int = DATA) -> None:
        """Queue a complete message, header and data, to the leader."""
        pieces = [memoryview(part).cast("B") for part in parts if len(part)]
        self.begin(call, sum(map(len, pieces)), kind)
        self.out += pieces
        self.waits = False

    def next_out(self) -> list[memoryview]:
        """Return the buffers for the next system call. They contain at most one piece of the current buffer.

        If the rest of the current buffer fits into one piece, add a piece of the next buffer.
        """
        first = self.out[0]
        return [first[:PIECE]] if len(first) > PIECE else [first, *(part[:PIECE] for part in self.out[1:2])]

    def begin(self, call: Call, length: int, kind: int = DATA) -> None:
        """Queue the header of a message whose data will follow."""
        _, doing, key = call
        self.out.append(memoryview(HEADER.pack(kind, doing, key, length)))


def interrupts(error: BaseException) -> bool:
    """Return whether a signal, such as Ctrl-C, caused the error, and not the operation itself."""
    return not isinstance(error, GroupError | TimeoutError | MemoryError) or is_interrupt(error)


class Leaves(Exception):
    """Raised in a step when another thread of this process closes the member."""


class ExchangeStep:
    """Step in which this leader sends one message to every other leader, and receives one from each."""

    def __init__(
        self,
        links: Connections,
        call: Call,
        peers: dict[int, LeaderPeer],
        into: Callable[[int], memoryview | None],
        timeout: float | None,
    ) -> None:
        self.call, self.peers = call, peers
        self._links, self._into, self._timeout = links, into, timeout
        self._waiting: set[int] = set()
        self._begun = time.monotonic()

    def run(self) -> None:
        """Run the step.

        Raises:
            TimeoutError: The step took longer than its time limit.
            MemberDied: Another leader was lost.
            Leaves: This member is being closed.
        """
        reported = False
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
            for host in [host for host in self._waiting if self.peers[host].is_done]:
                self._done(host)
            passed = time.monotonic() - self._begun
            if self._timeout is not None and passed > self._timeout:
                raise TimeoutError(f"{self.call[0]} timed out: no message arrived from {self._absent()}")
            if passed > STALLED and not ready and not reported:
                reported = True
                log.warning("%s has been waiting %.0f s for %s", self.call[0], passed, self._absent())

    def _done(self, host: int) -> None:
        self._waiting.discard(host)
        edge = self._links.edges_by_host[host]
        edge.steps += 1
        edge.seconds += time.monotonic() - self._begun

    def _ready(self) -> list[tuple[int, int]]:
        """Wait until some connections are ready, and return their hosts and poll events."""
        poll, host_of = select.poll(), {}
        poll.register(self._links.leaves, select.POLLIN)
        for host in self._waiting:
            sock, peer = self._links.sockets[host], self.peers[host]
            wanted = (0 if peer.has_come else select.POLLIN) | (select.POLLOUT if peer.out else 0)
            if wanted:  # 0: the message to this host still lacks data from other hosts
                poll.register(sock, wanted)
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
                sent = sock.sendmsg(peer.next_out())
            except unless_interrupted(OSError) as error:
                if isinstance(error, BlockingIOError):
                    return
                self._receive_last_message(host, error)
                peer.out.clear()
                peer.waits = False
                return
            peer.sent += sent
            self._links.edges_by_host[host].sent += sent
            while sent:
                taken = min(sent, len(peer.out[0]))
                peer.out[0], sent = peer.out[0][taken:], sent - taken
                if not peer.out[0]:
                    del peer.out[0]

    def _receive_last_message(self, host: int, error: OSError) -> None:
        """Receive the last message of a leader that has stopped accepting data.

        The message may say why the leader has stopped.
        """
        peer = self.peers[host]
        while not (peer.has_come and peer.kind == FAILED):
            if peer.has_come:
                peer.got, peer.into = 0, None
            self._receive(host, keeps=False)
            if not peer.has_come:
                raise self._death_error(host, error.strerror or "") from error

    def _receive(self, host: int, keeps: bool = True) -> None:
        """Receive from a leader. Discard the data if ``keeps`` is false."""
        sock, peer = self._links.sockets[host], self.peers[host]
        try:
            while peer.into is None:
                self._take(host, sock.recv_into(memoryview(peer.header)[peer.got :]))
                if peer.got == HEADER.size:
                    self._begin(host, keeps)
            while peer.got < HEADER.size + len(peer.into):
                piece = peer.into[peer.got - HEADER.size :][:PIECE]
                count = sock.recv_into(piece)
                self._take(host, count)
                self._pass_on(host, piece[:count])
        except unless_interrupted(OSError) as error:
            if not isinstance(error, BlockingIOError):
                raise self._death_error(host, error.strerror or "") from error

    def _take(self, host: int, count: int) -> None:
        if not count:
            raise self._death_error(host, "the peer closed the connection")
        self.peers[host].got += count
        self._links.edges_by_host[host].received += count

    def _begin(self, host: int, keeps: bool) -> None:
        """Handle a header that has arrived completely."""
        peer = self.peers[host]
        peer.kind, doing, key, length = HEADER.unpack(peer.header)
        if peer.kind == LEFT:
            raise self._left_error(host)
        peer.differs = (doing, key) != self.call[1:]
        given = self._into(host) if keeps and peer.kind == DATA and not peer.differs else None
        if given is not None and len(given) != length:
            given, peer.differs = None, True
        peer.into = memoryview(bytearray(length)) if given is None else given
        self._pass_on(host, peer.into[:0])

    def _pass_on(self, host: int, piece: memoryview) -> None:
        """Handle data from ``host``. An empty ``piece`` means that only the length is known so far."""

    # --- errors ---

    def raise_reported_errors(self) -> None:
        for peer in self.peers.values():
            if peer.kind != DATA:
                assert peer.into is not None
                error: BaseException = loads(bytes(peer.into))
                raise error

    def _left_error(self, host: int) -> MemberLeft:
        rank, call = self._links.ranks[host], self.call[0]
        return MemberLeft(
            f"{call} failed: rank {rank} and the other members on its host have left the group; all members "
            "must call the same operations",
            (rank,),
            call,
        )

    def _death_error(self, host: int, why: str) -> MemberDied:
        return self._links.death_error(host, self.call[0], why)

    def _absent(self) -> str:
        """Describe the hosts that delay the step, except those that only wait for another late host."""
        late = {host for host in self._waiting if self.peers[host].out or not self.peers[host].has_come}
        names = [self._links.ranks[host] for host in sorted(late) if late.isdisjoint(self._needs_hosts(host))]
        return " and ".join(f"the host of rank {rank}" for rank in names)

    def _needs_hosts(self, host: int) -> Sequence[int]:
        """Return the hosts whose messages ``host`` needs before it can send a message."""
        return ()


class Gathering(ExchangeStep):
    """Step that sends the data of all leaders to the root of a tree.

    Each leader waits for the data of its children, and adds its host's data.
    """

    def __init__(self, links: Connections, call: Call, own: Any, tree: Tree, timeout: float | None) -> None:
        self._tree = tree
        self._parent = tree.parent.get(links.host)
        self._children = tree.children[links.host]
        self._missing = set(self._children)
        self._bundle = [SEGMENT.pack(links.host, len(own)), own]
        to_parent = None if self._missing else self._bundle
        peers = {host: LeaderPeer(call, to_parent if host == self._parent else []) for host in links.sockets}
        super().__init__(links, call, peers, lambda _: None, timeout)

    def _pass_on(self, host: int, piece: memoryview) -> None:
        if host not in self._missing or not self.peers[host].has_come:
            return
        self._missing.discard(host)
        if self._missing or self._parent is None:
            return
        below = [self.peers[child] for child in self._children]
        parts = [*self._bundle, *(peer.into for peer in below)]
        # If a leader further down the tree has failed, send no data: that leader reports its error to all
        # leaders directly.
        self.peers[self._parent].set_message(self.call, parts if all(peer.is_right for peer in below) else [])
        self._send(self._parent)

    def _needs_hosts(self, host: int) -> Sequence[int]:
        return self._tree.children[host]


class Spreading(ExchangeStep):
    """Step that sends data from a tree's root to all leaders. Each leader forwards the data as it arrives."""

    def __init__(
        self, links: Connections, call: Call, memory: Any, tree: Tree, timeout: float | None
    ) -> None:
        self._tree = tree
        self._parent = tree.parent.get(links.host)
        self._children = tree.children[links.host]
        to_child = [memory] if self._parent is None else None
        peers = {host: LeaderPeer(call, to_child if host in self._children else []) for host in links.sockets}
        super().__init__(links, call, peers, lambda host: memory if host == self._parent else None, timeout)

    def _pass_on(self, host: int, piece: memoryview) -> None:
        if host != self._parent:
            return
        parent = self.peers[host]
        for child in self._children:
            peer = self.peers[child]
            if not parent.is_right:
                if peer.waits:  # the leader that failed reports the error to all leaders directly
                    peer.set_message(self.call, [])
            elif piece:
                peer.out.append(piece)
            else:
                peer.begin(self.call, len(parent.into or b""))
            peer.waits = parent.is_right and not parent.has_come
            self._send(child)

    def _needs_hosts(self, host: int) -> Sequence[int]:
        return [self._tree.parent[host]] if host in self._tree.parent else []


def segments(bundles: Iterable[memoryview]) -> Iterator[tuple[int, memoryview]]:
    """Yield each host and its data, from the messages that arrived at the root of a tree."""
    for bundle in bundles:
        while bundle:
            host, length = SEGMENT.unpack_from(bundle)
            end = SEGMENT.size + length
            yield host, bundle[SEGMENT.size : end]
            bundle = bundle[end:]

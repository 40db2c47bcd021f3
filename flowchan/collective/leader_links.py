"""Connections of the leader of one host to the leaders of the other hosts of a group."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowchan import _core
from flowchan.collective import array_access, trees
from flowchan.collective.deadline import RemainingTime, countdown
from flowchan.collective.exchange import (
    DATA,
    FAILED,
    HEADER,
    LEFT,
    Call,
    Connections,
    ConnectionStats,
    Differs,
    ExchangeStep,
    Gathering,
    LeaderPeer,
    Leaves,
    Spreading,
    segments,
)
from flowchan.collective.operations import (
    ALLTOALL,
    BARRIER,
    BROADCAST,
    COMBINING,
    NAMES,
    REDUCE_SCATTER,
    SCATTER,
)
from flowchan.collective.trees import REFERENCE, Table, Tree
from flowchan.collective.value_bytes import dumps
from flowchan.errors import GroupError, MemberDied

LAST = 1.0
"""Seconds to wait for the rest of a last message."""
WHOLE, WHOLE_OF_TWO = 64 * 1024, 1 << 20
"""Largest arrays in bytes that leaders exchange as a whole; for larger ones each leader combines one slice.
Two hosts send the same amount in both cases, and the exchange takes one step instead of two."""
BLOCK = 8 << 20
"""Bytes that are sliced at a time, so that received data is combined while it is still in the caches."""
_BETWEEN_HOSTS = {
    NAMES[BARRIER]: "a word of each",
    NAMES[BROADCAST]: "what the root has",
    NAMES[SCATTER]: "to each what is for it",
    NAMES[ALLTOALL]: "to each what is for it",
}


def whole(hosts: int) -> int:
    """Return the size in bytes up to which this number of hosts combines whole arrays."""
    return WHOLE_OF_TWO if hosts == 2 else WHOLE


def shown(operation: str, size: int | None, hosts: int) -> str:
    """Describe the data that goes over the connections without a tree.

    ``size`` is that of an array in bytes.
    """
    if operation in (*COMBINING, NAMES[REDUCE_SCATTER]) and size is not None and size > whole(hosts):
        return "a slice for each"
    return _BETWEEN_HOSTS.get(operation, "all that each has")


class Links(Connections):
    """The connections of this leader, with the operations that use them."""

    def __init__(self, sockets: Mapping[int, socket.socket], ranks: Mapping[int, int], host: int) -> None:
        super().__init__(sockets, ranks, host)
        self._table: Table = trees.alike(len(self.sockets) + 1)
        self._trees: dict[tuple[int, bool], Tree] = {}
        self._partially_sent: set[int] = set()  # hosts to which only a part of a message was sent
        self._leaving = self._closed = False
        self._in_use = threading.RLock()

    @property
    def edges(self) -> dict[int, ConnectionStats]:
        """Return the traffic of each connection by the rank of the other leader."""
        return {self.ranks[host]: replace(edge) for host, edge in self.edges_by_host.items()}

    def swap(
        self,
        call: Call,
        out: Callable[[int], Sequence[Any]],
        into: Callable[[int], memoryview | None] = lambda _: None,
        timeout: float | None = None,
    ) -> dict[int, memoryview]:
        """Exchange messages with each host in one step.

        Args:
            call: The call of this leader, which is compared with those of the others.
            out: Returns the parts of the message to a host.
            into: Returns the memory for the data of a host, or None for new memory (default).
            timeout: Seconds; None means no limit.

        Returns:
            The data from each host.

        Raises:
            Differs: The calls of the leaders differ.
            TimeoutError: The step took longer than ``timeout`` seconds.
            MemberDied: Another leader is lost.
            Exception: The error that another leader reported.
        """
        peers = {host: LeaderPeer(call, out(host)) for host in self.sockets}
        return self._run_step(ExchangeStep(self, call, peers, into, timeout))

    def combine(self, call: Call, total: Any, op: str, remaining: RemainingTime) -> None:
        """Combine ``total``, the result of this host, with those of the other hosts, in place.

        Small arrays are exchanged as a whole; of large ones each leader combines one slice for all.
        """
        flat, size = total.reshape(-1), int(total.nbytes)
        if size <= whole(len(self.sockets) + 1):
            self._add_others(call, lambda _: flat, flat, op, remaining)
            return
        length = BLOCK * len(flat) // size
        for at in range(0, len(flat), length):
            self._combine_slices(call, flat[at : at + length], op, remaining)

    def _combine_slices(self, call: Call, flat: Any, op: str, remaining: RemainingTime) -> None:
        hosts, count = len(self.sockets) + 1, len(flat)
        slices = [flat[count * i // hosts : count * (i + 1) // hosts] for i in range(hosts)]
        own = slices[self.host]
        self._add_others(call, slices.__getitem__, own, op, remaining)
        self.swap(
            call,
            lambda _: [array_access.memory(own)],
            lambda host: array_access.memory(slices[host]),
            timeout=remaining(),
        )

    def _add_others(
        self, call: Call, out: Callable[[int], Any], own: Any, op: str, remaining: RemainingTime
    ) -> None:
        """Send ``out(host)`` to each host, and combine ``own`` with the hosts' data in their order."""
        found = {host: array_access.empty_like(own) for host in self.sockets}
        self.swap(
            call,
            lambda host: [array_access.memory(out(host))],
            lambda host: array_access.memory(found[host]),
            timeout=remaining(),
        )
        _core._combine(own, [found.get(host, own) for host in range(len(found) + 1)], op)

    def gather(self, call: Call, own: Any, tree: Tree, timeout: float | None) -> dict[int, memoryview]:
        """Run one step: return the data of every other leader at the root of the tree, by host.

        It raises the same errors as :meth:`swap`.
        """
        found = self._run_step(Gathering(self, call, own, tree, timeout))
        if tree.root != self.host:
            return {}
        return dict(segments(found[child] for child in tree.children[self.host]))

    def spread(self, call: Call, memory: Any, tree: Tree, timeout: float | None) -> memoryview:
        """Run one step: send ``memory`` of the tree's root to the other leaders.

        They receive into their ``memory``, or into new memory if it is None. It raises the same errors as
        :meth:`swap`.
        """
        found = self._run_step(Spreading(self, call, memory, tree, timeout))
        return memory if tree.root == self.host else found[tree.parent[self.host]]

    def tree(self, root: int, small: bool = False) -> Tree:
        """Return the tree with that root, for small or large messages; it is equal on all leaders."""
        if (root, small) not in self._trees:
            self._trees[root, small] = trees.grown(len(self.sockets) + 1, root, self._table, small)
        return self._trees[root, small]

    def measure(self, timeout: float | None) -> None:
        """Measure the connections, as a basis for the trees. All leaders call it at the same time.

        It raises the same errors as :meth:`swap`.
        """
        call, remaining = ("measuring the connections", 0, 0), countdown(timeout)
        hosts, measured = len(self.sockets) + 1, {}
        for host in trees.meetings(hosts, self.host):
            quick, large = (
                trees.least([self._time_with(host, call, bytes(size), remaining()) for _ in range(count)][1:])
                for size, count in ((1, 10), (REFERENCE, 5))
            )
            measured[host] = trees.times_between(quick, large)
        own = trees.packed(measured, hosts)
        rows = self.swap(call, lambda _: [own], timeout=remaining())
        self._table = trees.table_of({self.host: own} | {host: bytes(row) for host, row in rows.items()})
        for host in self.sockets:
            times = self._table[min(host, self.host), max(host, self.host)]
            self.edges_by_host[host] = ConnectionStats(
                delay=times.delay, bytes_per_second=times.bytes_per_second
            )

    def _time_with(self, host: int, call: Call, data: bytes, timeout: float | None) -> float:
        begun = time.perf_counter()
        self._run_step(ExchangeStep(self, call, {host: LeaderPeer(call, [data])}, lambda _: None, timeout))
        return time.perf_counter() - begun

    def _run_step(self, step: ExchangeStep) -> dict[int, memoryview]:
        self._go(step)
        step.raise_reported_errors()
        if any(peer.differs for peer in step.peers.values()):
            raise Differs
        return {host: peer.into for host, peer in step.peers.items() if peer.into is not None}

    def fail(self, error: BaseException, call: Call, goes_on: bool) -> None:
        """Report an error to the other leaders in place of this step's message.

        If ``goes_on`` is true, the messages of the others are received, so that the next operation can
        follow.
        """
        if self._leaving:
            return  # the others receive that message instead
        word = dumps(error)
        peers = {host: LeaderPeer(call, [word], FAILED) for host in self.sockets}
        if goes_on:
            self._go(ExchangeStep(self, call, peers, lambda _: None, None))
            return
        for host, peer in peers.items():
            with contextlib.suppress(OSError):  # a leader that is gone or blocked sees the connection end
                self.sockets[host].sendmsg(peer.out)
        self.close()

    def _go(self, step: ExchangeStep) -> None:
        """Run a step. If it raises, the connections are closed or about to be.

        After an error, the position within the messages is unknown.
        """
        with self._in_use:
            if self._closed:
                raise GroupError(f"{step.call[0]} failed: the connections to the other hosts are closed")
            try:
                step.run()
            except Leaves:
                self._partially_sent = {host for host, peer in step.peers.items() if peer.is_partially_sent}
                raise GroupError(f"{step.call[0]} failed: this member has left the group") from None
            except MemberDied as error:
                self._report_death(step, error)
                raise
            except BaseException:
                self.close()
                raise

    def _report_death(self, step: ExchangeStep, error: MemberDied) -> None:
        """Report to the others which leader died, so that they do not blame this one."""
        word = LeaderPeer(step.call, [dumps(error)], FAILED)
        for host, peer in step.peers.items():
            if not peer.is_partially_sent:
                with contextlib.suppress(OSError):  # that leader is also gone
                    self.sockets[host].sendmsg(word.out)
        self.close()

    def ended(self) -> int | None:
        """Return a host whose leader will not take part in the next step, or None. Call it between steps."""
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

    def last_message(self, host: int, call: str) -> BaseException:
        """Return the error by which the leader of that host ended; :meth:`ended` returned the host.

        The connections cannot be used after that.
        """
        peers = {host: LeaderPeer((call, 0, 0), [])}
        step = ExchangeStep(self, (call, 0, 0), peers, lambda _: None, LAST)
        try:
            self._go(step)
            step.raise_reported_errors()
        except (GroupError, TimeoutError, MemoryError) as error:
            if peers[host].has_come or not isinstance(error, TimeoutError):
                return error
        return self.death_error(host, call, "its last message has not arrived")

    def interrupt(self) -> None:
        """Interrupt the step of another thread, before :meth:`leave`."""
        self._leaving = True
        with contextlib.suppress(ValueError, OSError):  # that step has failed and closed the event
            os.eventfd_write(self.leaves.fileno(), 1)

    def cut(self) -> None:
        """Interrupt the step of another thread; this and all later steps raise :class:`MemberDied`."""
        for sock in self.sockets.values():
            with contextlib.suppress(OSError):  # the socket is closed
                sock.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Tell the other leaders that this host's members leave, and close the connections."""
        with self._in_use:
            for host, sock in self.sockets.items():
                if host not in self._partially_sent:
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

"""Connect the leader of one host to the leaders of a group's other hosts."""

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
"""Seconds to wait for the rest of a leader's last message."""
WHOLE, WHOLE_OF_TWO = 64 * 1024, 1 << 20
"""Leaders exchange arrays of up to this many bytes whole.

Each leader combines one slice of a larger array. Between two hosts, the amount of data is the same, but
exchanging whole arrays takes one step instead of two.
"""
BLOCK = 8 << 20
"""Slice this many bytes at a time, to combine received data while it is still in the CPU's caches."""
_BETWEEN_HOSTS = {
    NAMES[BARRIER]: "one word from each host",
    NAMES[BROADCAST]: "the data of the root",
    NAMES[SCATTER]: "the data for each host",
    NAMES[ALLTOALL]: "the data for each host",
}


def whole(hosts: int) -> int:
    """Return the size in bytes up to which the leaders of this number of hosts exchange arrays whole."""
    return WHOLE_OF_TWO if hosts == 2 else WHOLE


def shown(operation: str, size: int | None, hosts: int) -> str:
    """Describe what each leader sends to the others in an operation without a tree.

    ``size`` is the array's size in bytes, or None for other values.
    """
    if operation in (*COMBINING, NAMES[REDUCE_SCATTER]) and size is not None and size > whole(hosts):
        return "one slice for each host"
    return _BETWEEN_HOSTS.get(operation, "all data from each host")


class Links(Connections):
    """Connections of one leader, and the operations on these connections."""

    def __init__(self, sockets: Mapping[int, socket.socket], ranks: Mapping[int, int], host: int) -> None:
        super().__init__(sockets, ranks, host)
        self._table: Table = trees.alike(len(self.sockets) + 1)
        self._trees: dict[tuple[int, bool], Tree] = {}
        self._partially_sent: set[int] = set()  # hosts to which a message was sent only in part
        self._leaving = self._closed = False
        self._in_use = threading.RLock()

    @property
    def edges(self) -> dict[int, ConnectionStats]:
        """Return the traffic of each connection, by the rank of the other leader."""
        return {self.ranks[host]: replace(edge) for host, edge in self.edges_by_host.items()}

    def swap(
        self,
        call: Call,
        out: Callable[[int], Sequence[Any]],
        into: Callable[[int], memoryview | None] = lambda _: None,
        timeout: float | None = None,
    ) -> dict[int, memoryview]:
        """Exchange messages with the leaders of all other hosts in one step.

        Args:
            call: This leader's call, to compare with the calls of the other leaders.
            out: Returns the parts of the message for a host.
            into: Returns memory for the data from a host, or None for new memory (default).
            timeout: Seconds to wait; None means no limit.

        Returns:
            The data from each host.

        Raises:
            Differs: The leaders made different calls.
            TimeoutError: The step took longer than ``timeout``.
            MemberDied: Another leader was lost.
            Exception: An error that another leader reported.
        """
        peers = {host: LeaderPeer(call, out(host)) for host in self.sockets}
        return self._run_step(ExchangeStep(self, call, peers, into, timeout))

    def combine(self, call: Call, total: Any, op: str, remaining: RemainingTime) -> None:
        """Combine ``total``, this host's result, with the results of the other hosts, in place.

        Leaders exchange small arrays as a whole. If an array is large, each leader combines one slice for all
        leaders.
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
        """Send ``out(host)`` to each host, and combine ``own`` with the received data in host order."""
        found = {host: array_access.empty_like(own) for host in self.sockets}
        self.swap(
            call,
            lambda host: [array_access.memory(out(host))],
            lambda host: array_access.memory(found[host]),
            timeout=remaining(),
        )
        _core._combine(own, [found.get(host, own) for host in range(len(found) + 1)], op)

    def gather(self, call: Call, own: Any, tree: Tree, timeout: float | None) -> dict[int, memoryview]:
        """Gather the data of all leaders at the root of the tree, in one step.

        Return the other leaders' data by host at the root, and an empty dictionary elsewhere. Raises the same
        errors as :meth:`swap`.
        """
        found = self._run_step(Gathering(self, call, own, tree, timeout))
        if tree.root != self.host:
            return {}
        return dict(segments(found[child] for child in tree.children[self.host]))

    def spread(self, call: Call, memory: Any, tree: Tree, timeout: float | None) -> memoryview:
        """Send ``memory`` from the tree's root to the other leaders, in one step.

        The other leaders receive into their ``memory``, or into new memory if it is None. Raises the same
        errors as :meth:`swap`.
        """
        found = self._run_step(Spreading(self, call, memory, tree, timeout))
        return memory if tree.root == self.host else found[tree.parent[self.host]]

    def tree(self, root: int, small: bool = False) -> Tree:
        """Return the tree with this root for small or large messages. All leaders get the same tree."""
        if (root, small) not in self._trees:
            self._trees[root, small] = trees.grown(len(self.sockets) + 1, root, self._table, small)
        return self._trees[root, small]

    def measure(self, timeout: float | None) -> None:
        """Measure the connections, in order to build trees. All leaders call this at the same time.

        Raises the same errors as :meth:`swap`.
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
        """Report an error to the other leaders instead of sending this step's message.

        If ``goes_on`` is true, also receive the others' messages, so that the group can run its next
        operation.
        """
        if self._leaving:
            return  # a separate message tells the others that this member is leaving
        word = dumps(error)
        peers = {host: LeaderPeer(call, [word], FAILED) for host in self.sockets}
        if goes_on:
            self._go(ExchangeStep(self, call, peers, lambda _: None, None))
            return
        for host, peer in peers.items():
            # If the error cannot be sent, the peer notices that the connection is closed.
            with contextlib.suppress(OSError):
                self.sockets[host].sendmsg(peer.out)
        self.close()

    def _go(self, step: ExchangeStep) -> None:
        """Run a step.

        After an error, this method or another thread closes the connections, because each message may have
        been transferred only in part.
        """
        with self._in_use:
            if self._closed:
                raise GroupError(
                    f"{step.call[0]} failed: the connections to the other hosts are closed; "
                    "create a new group"
                )
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
        """Tell the other leaders which leader died, so that they do not report this leader as dead."""
        word = LeaderPeer(step.call, [dumps(error)], FAILED)
        for host, peer in step.peers.items():
            if not peer.is_partially_sent:
                with contextlib.suppress(OSError):  # that leader may also be gone
                    self.sockets[host].sendmsg(word.out)
        self.close()

    def ended(self) -> int | None:
        """Return a host whose leader will not take part in the next step, or None if all will.

        Call this only between two steps.
        """
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
        """Return the error with which a leader ended; ``host`` comes from :meth:`ended`.

        The connections are unusable afterwards.
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
        """Interrupt the step that another thread is running; call this before :meth:`leave`."""
        self._leaving = True
        with contextlib.suppress(ValueError, OSError):  # a step that has failed has closed the event
            os.eventfd_write(self.leaves.fileno(), 1)

    def cut(self) -> None:
        """Interrupt the step that another thread is running, and make all later steps fail.

        All these steps raise :class:`MemberDied`.
        """
        for sock in self.sockets.values():
            with contextlib.suppress(OSError):  # the socket may be closed
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

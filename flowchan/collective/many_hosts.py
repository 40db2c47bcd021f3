"""Implement a group that spans several hosts.

The members on each host share memory and form a *node*. The first member of each node is its leader, and all
leaders are connected.

An operation runs within the nodes, then once between the leaders, and then within the nodes again. Each node
combines arrays in rank order. Each leader then combines the nodes' results in host order, so all members get
identical bits. Data from one member to all, or from all to one, is sent along a tree. A leader reports
failures on other hosts to its node, and its node's failures to the other leaders.
"""

from __future__ import annotations

import pickle
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from flowchan import _core
from flowchan.collective import array_access, leader_links
from flowchan.collective.call_arguments import called, sizes_differ
from flowchan.collective.deadline import RemainingTime, countdown
from flowchan.collective.exchange import Call, ConnectionStats, Differs, interrupts
from flowchan.collective.group import Group
from flowchan.collective.leader_links import Links
from flowchan.collective.messages_remote import RemotePeers
from flowchan.collective.one_host import SharedGroup
from flowchan.collective.operations import (
    ALONG_TREES,
    BARRIER,
    BROADCAST,
    GATHER,
    NAMES,
    REDUCE,
    REDUCE_SCATTER,
    SPLIT,
    TELL,
    key_of,
)
from flowchan.collective.point_to_point import Messages, Peer
from flowchan.collective.value_bytes import dumps, loads
from flowchan.errors import GroupError, Mismatch

DONE, FAILED = b"\0", b"\1"

T = TypeVar("T")


class LinkedGroup(Group):
    """Member of a group that spans several hosts.

    ``hosts`` lists the ranks on each host, leaders first; ``host`` is the index of this host. ``links``
    contains the leader's connections; on other members, it is None. ``link_up`` connects the members of a
    subgroup.
    """

    def __init__(
        self,
        node: SharedGroup,
        hosts: Sequence[Sequence[int]],
        host: int,
        links: Links | None,
        remote: RemotePeers,
        link_up: Callable[[LinkedGroup, SharedGroup | None, Any, str, float | None], Group | None],
        name: str = "",
    ) -> None:
        self._begin(name)
        self._node, self._hosts, self._host, self._links = node, hosts, host, links
        self._remote, self._link_up = remote, link_up
        self._meet_again: Callable[[LinkedGroup, str, float], Group] | None = None
        self._rank, self._size = hosts[host][node.rank], sum(map(len, hosts))
        node._ranks = hosts[host]
        ours, local = hosts[host], node._local

        def peer(rank: int) -> Peer:
            return local.peer(ours.index(rank)) if rank in ours else remote.peer(rank)

        self._messages = Messages(self._rank, self._size, peer)
        weakref.finalize(self, remote.drop).atexit = False  # drop an unused member at once, but not at exit

    @property
    def rank(self) -> int:
        """Rank of this member, counting from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of members."""
        return self._size

    @property
    def local_rank(self) -> int:
        """Return the index of this member among those on its host, counting from 0."""
        return self._node.rank

    @property
    def local_size(self) -> int:
        """Return the number of members on the host of this member."""
        return self._node.size

    def close(self) -> None:
        """Leave the group; see :meth:`Group.close`."""
        if self.leaders is not None:
            self.leaders.close()
        if self._links is not None:
            self._links.interrupt()
        self._node._leave()  # end the started operations that are still waiting
        if self._later is not None:
            self._later.close()
            self._later = None
        if self._links is not None:
            self._links.leave()
        self._node.close()
        self._remote.close()
        self._close_backends()

    def _explain(self, operation: str, x: Any) -> str:
        size, hosts = array_access.size_of(x), len(self._hosts)
        by = NAMES[REDUCE] if operation == NAMES[REDUCE_SCATTER] and size is not None else operation
        local_plan = operation + self._node._explain(by, x).removeprefix(by)
        how = leader_links.shown(operation, size, hosts)
        if hosts > 2 and (operation in ALONG_TREES or (operation == NAMES[REDUCE] and size is None)):
            how = "along a tree"
            if self._links is not None:
                small = operation == NAMES[BROADCAST] and size is not None and size <= leader_links.WHOLE
                tree = self._links.tree(0, small).shown([ranks[0] for ranks in self._hosts])
                how += f" chosen from measurements: {tree}"
        return f"{local_plan}; over connections between the {hosts} hosts' leaders, {how}"

    def _set_algorithm(self, doing: int, name: str | None) -> None:
        """Select the algorithm for each node."""
        self._node._set_algorithm(doing, name)

    def stats(self) -> dict[int, ConnectionStats]:
        """Return the traffic on the leader's connections; see :meth:`Group.stats`."""
        return {} if self._links is None else self._links.edges

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(f"{self!r} cannot be sent to another process, because its group spans several hosts")

    # --- operations from which the others are built ---

    def _take_slot(self) -> None:
        self._node._take_slot()

    def _queue(self, change: int) -> None:
        pass

    def _part(self, key: Any, name: str, timeout: float | None) -> Group | None:
        """Form the subgroup of the members with this member's key.

        Members of the subgroup on the same host share memory.
        """
        remaining = countdown(timeout)
        part = self._on_node(
            (NAMES[SPLIT], SPLIT, 0), lambda: self._node._part(key, name, remaining()), first=True
        )
        return self._link_up(self, part, key, name, remaining())

    def _shrunk(self, name: str, give_up: float) -> Group:
        if self._meet_again is None:
            raise GroupError(
                f"{self!r} cannot be shrunk: it was created without an address (at=); create a "
                "new group, or run a graph with an elastic gang"
            )
        if self._node._see(self._node.rank)[-1]:
            raise GroupError(f"{self!r} was closed; create a new group")
        try:
            self._let_go_of_all()
            return self._meet_again(self, name, give_up)
        finally:
            self.close()

    def _abandon(self) -> None:
        """Leave the group after a failure; see :meth:`Group._abandon`."""
        self._let_go_of_all()
        self.close()

    def _let_go_of_all(self) -> None:
        """Close the node, the connections and the messages.

        Members that still use the group then raise an error.
        """
        self._node._give_up()
        self._node._local.close(wait=False)
        if self._links is not None:
            self._links.interrupt()
            self._links.close()
        self._remote.close(wait=False)

    def _disbanding(self) -> Callable[[], None]:
        """Return a function with which one thread can end the group while another thread uses the group."""
        local_plan, links = self._node._disbanding(), self._links

        def disband() -> None:
            local_plan()
            if links is not None:
                links.cut()

        return disband

    def _local_alive(self) -> list[int]:
        """Return the ranks on this host that are alive and have not left."""
        seen = ((rank, self._node._see(place)) for place, rank in enumerate(self._hosts[self._host]))
        return [rank for rank, (*_, alive, _, over) in seen if alive and not over]

    def _host_of(self, rank: int) -> int:
        (host,) = (host for host, ranks in enumerate(self._hosts) if rank in ranks)
        return host

    def _wait_for_all(self, timeout: float | None) -> None:
        self._exchange(BARRIER, BARRIER, b"", -1, timeout, None, None)

    def _exchange(
        self, doing: int, key: int, data: Any, only: int, timeout: float | None, x: Any, more: Any
    ) -> list[bytes]:
        call, remaining = (NAMES[doing], doing, key), countdown(timeout)
        own = pickle.dumps(self._first(call, data, -1, remaining, (x, more)), 5)

        def swap(links: Links) -> bytes:
            return _packed(links.swap(call, lambda _: [own], timeout=remaining()) | {self._host: own})

        parts = self._by_rank(self._over_links(call, swap, (x, more), remaining))
        return parts if only < 0 else [parts[only]]

    def _collect(
        self, doing: int, key: int, data: Any, root: int, timeout: float | None, x: Any, more: Any
    ) -> list[bytes]:
        call, remaining, source = (NAMES[doing], doing, key), countdown(timeout), self._host_of(root)
        only = -1 if self._links is not None else self._node.rank
        own = pickle.dumps(self._first(call, data, only, remaining, (x, more)), 5)

        def gather(links: Links) -> bytes:
            return _packed(links.gather(call, own, links.tree(source), remaining()) | {source: own})

        found = self._over_links(call, gather, (x, more), remaining)
        return self._by_rank(found) if self.rank == root else []

    def _tell(
        self, doing: int, key: int, data: Any, root: int, timeout: float | None, x: Any, more: Any
    ) -> bytes:
        call, remaining, source = (NAMES[doing], doing, key), countdown(timeout), self._host_of(root)
        own = source == self._host
        only = self._hosts[source].index(root) if own else self._node.rank
        (received,) = self._first(call, data, only, remaining, (x, more))

        def spread(links: Links) -> bytes:
            found = links.spread(call, received if own else None, links.tree(source), remaining())
            return b"" if own else bytes(found)

        found = self._over_links(call, spread, (x, more), remaining)
        return bytes(received) if own else found

    def _allgather_into(
        self, doing: int, key: int, own: list[Any], outs: list[Any], timeout: float | None
    ) -> None:
        x, root, key = own[0], key // 4, key_of(key, own[0])
        if doing == GATHER:
            parts = self._collect(doing, key, array_access.memory(x), root, timeout, x, root)
        else:
            parts = self._exchange(doing, key, array_access.memory(x), -1, timeout, x, None)
        if parts:
            self._fill(NAMES[doing], outs, parts)

    def _alltoall(
        self, doing: int, key: int, ins: list[Any], outs: list[Any], timeout: float | None, more: Any
    ) -> None:
        call, remaining = (NAMES[doing], doing, key_of(key, ins[0])), countdown(timeout)
        ours = self._hosts[self._host]
        parts = [bytes(array_access.memory(x)) for x in ins]
        sizes = [*map(len, parts)], [len(array_access.memory(out)) for out in outs]
        own = pickle.dumps((parts, sizes), 5)
        only = -1 if self._links is not None else self._node.rank
        bundles = self._first(call, own, only, remaining, (ins, more))

        def swap(links: Links) -> bytes:
            local_parts = dict(zip(ours, map(pickle.loads, bundles), strict=True))
            sizes = {rank: both for rank, (_, both) in local_parts.items()}

            def parts_for(to: Sequence[int]) -> dict[int, list[bytes]]:
                return {rank: [parts[other] for other in to] for rank, (parts, _) in local_parts.items()}

            def out(host: int) -> list[bytes]:
                return [pickle.dumps((parts_for(self._hosts[host]), sizes), 5)]

            found, all_sizes = parts_for(ours), dict(sizes)
            for received in links.swap(call, out, timeout=remaining()).values():
                parts, other_sizes = pickle.loads(received)
                found |= parts
                all_sizes |= other_sizes
            # All leaders know all sizes, so either all of them raise, or none.
            if why := sizes_differ(call[0], all_sizes):
                raise Mismatch(f"members of {self._title()} made calls that do not match: {why}")
            return pickle.dumps(found, 5)

        found = pickle.loads(self._over_links(call, swap, (ins, more), remaining))
        self._fill(NAMES[doing], outs, [found[rank][self._node.rank] for rank in range(self.size)])

    def _reduce(self, doing: int, x: Any, out: Any, op: str, root: int, timeout: float | None) -> Any:
        if not array_access.is_here(x):
            return NotImplemented
        _core._combine(x, [], op)
        call, remaining = (NAMES[doing], doing, _key(x, op, root)), countdown(timeout)
        wide = array_access.widened(x)
        own = root in (-1, self.rank)
        total = out if own and wide is x else array_access.empty_like(wide)
        of_sum = "sum" if op == "mean" else op
        given = self._node._original_call = x, op if root < 0 else (root, op)
        try:
            self._on_node(
                call,
                lambda: self._node._reduce(doing, wide, total, of_sum, 0, remaining(), call[2]),
                first=True,
            )
        finally:
            self._node._original_call = None

        def swap(links: Links) -> bytes:
            links.combine(call, total, of_sum, remaining)
            if op == "mean":
                array_access.divide(total, self.size)
            return b""

        self._over_links(call, swap, given, remaining)
        if root < 0 or root in self._hosts[self._host]:
            self._on_node(call, lambda: self._node._spread(total, 0, remaining()))
        if own and total is not out:
            array_access.narrow(out, total)
        return out

    def _reduce_scatter(self, x: Any, out: Any, op: str, timeout: float | None) -> Any:
        whole = array_access.empty_like(x)
        if self._reduce(REDUCE_SCATTER, x, whole, op, -1, timeout) is NotImplemented:
            return NotImplemented
        part = array_access.parts_of("reduce_scatter", whole, self.size)[self.rank]
        return array_access.fill(out, part.reshape(out.shape))

    def _spread(self, x: Any, root: int, timeout: float | None) -> Any:
        if not array_access.is_here(x):
            return NotImplemented
        call, remaining = (NAMES[BROADCAST], BROADCAST, _key(x, "", root)), countdown(timeout)
        source = self._host_of(root)
        own, memory = source == self._host, array_access.memory(x)
        if own:
            local = self._hosts[source].index(root)
            self._on_node(call, lambda: self._node._spread(x, local, remaining()), first=True)
        # Before any data arrives, check that all members on this host make the same call.
        elif self._node.size > 1:
            self._first(call, b"", 0, remaining, (x, root))

        def spread(links: Links) -> bytes:
            links.spread(
                call, memory, links.tree(source, small=len(memory) <= leader_links.WHOLE), remaining()
            )
            return b""

        self._over_links(call, spread, (x, root), remaining)
        if not own:
            self._on_node(call, lambda: self._node._spread(x, 0, remaining()))
        return x

    # --- steps of the operations above ---

    def _first(
        self, call: Call, data: Any, only: int, remaining: RemainingTime, given: tuple[Any, Any]
    ) -> list[bytes]:
        """Run an operation's first step: collect the data of the members on this host."""
        _, doing, key = call
        return self._on_node(
            call, lambda: self._node._exchange(doing, key, data, only, remaining(), *given), first=True
        )

    def _by_rank(self, packed: bytes) -> list[bytes]:
        """Unpack the data of each host, and return each member's data in rank order."""
        found, parts = pickle.loads(packed), [b""] * self.size
        for host, ranks in enumerate(self._hosts):
            for rank, part in zip(ranks, pickle.loads(found[host]), strict=True):
                parts[rank] = part
        return parts

    def _fill(self, call: str, outs: Sequence[Any], parts: Sequence[bytes]) -> None:
        for rank, (out, part) in enumerate(zip(outs, parts, strict=True)):
            if out is None:
                continue
            memory = array_access.memory(out)
            array_access.check_size(call, rank, len(part), len(memory))
            memory[:] = part

    def _on_node(self, call: Call, work: Callable[[], T], first: bool = False) -> T:
        """Run a step in the node. If it fails, the leader reports the error to the other hosts.

        If the ``first`` step finds that members made different calls, the group stays usable. If a later step
        fails, other hosts may already have completed the operation. The group then fails, because it could no
        longer match messages to operations.
        """
        if self._failure is not None:
            raise self._failed_before(call[0]) from self._failure
        try:
            return work()
        except BaseException as error:
            if interrupts(error):
                if self._node._broken and self._links is not None:
                    self._links.close()
                raise
            goes_on = first and isinstance(error, Mismatch)
            if not goes_on:
                self._failure = error
            if self._links is not None:
                self._links.fail(error, call, goes_on)
            raise

    def _over_links(
        self, call: Call, step: Callable[[Links], bytes], given: tuple[Any, Any], remaining: RemainingTime
    ) -> bytes:
        """Run the leader's ``step``, and send its result or exception to all members on this host.

        ``given`` lists the arguments of the call, for messages.
        """
        word = b""
        if self._links is not None:
            try:
                word = DONE + self._step(self._links, call, step, given)
            except BaseException as error:
                if interrupts(error):
                    self._node._give_up()
                    raise
                word = FAILED + dumps(error)
        if self._node.size > 1:
            _, doing, key = call
            (word,) = self._on_node(
                call, lambda: self._node._exchange(doing, key, word, 0, remaining(), *given)
            )
        if word[:1] == FAILED:
            raised: BaseException = loads(word[1:])
            if not isinstance(raised, Mismatch):
                self._failure = raised
            raise raised
        return word[1:]

    # --- methods that torch backends call during an operation ---

    def _reached_at(self) -> str:
        return self._remote.connector.host_of(self._remote.addresses[self.rank])

    def _has_lost_any(self) -> bool:
        return self._node._has_lost_any() or (self._links is not None and self._links.ended() is not None)

    def _cut_off(self, call: str) -> None:
        """Make the members on this host give up if another host has closed its connection.

        Only the leader notices this. The leader therefore gives up for all members on its host.
        """
        host = None if self._links is None else self._links.ended()
        if self._links is not None and host is not None:
            self._failure = self._links.last_message(host, call)
            self._give_up_all()
            raise self._failure

    def _give_up_all(self) -> None:
        self._node._give_up()
        if self._links is not None:
            self._links.close()

    def _step(
        self, links: Links, call: Call, step: Callable[[Links], bytes], given: tuple[Any, Any]
    ) -> bytes:
        try:
            return step(links)
        except Differs:
            text = called(call[0], *given)
            received = text.encode()
            found = links.swap((NAMES[TELL], TELL, 0), lambda _: [received])
            texts = {host: bytes(part).decode() for host, part in found.items()} | {self._host: text}
            calls = "; ".join(f"{_those(self._hosts[host])} called {texts[host]}" for host in sorted(texts))
            raise Mismatch(f"members of {self._title()} made calls that do not match: {calls}") from None


def _packed(found: Mapping[int, Any]) -> bytes:
    return pickle.dumps({host: bytes(part) for host, part in found.items()}, 5)


def _key(x: Any, op: str, root: int) -> int:
    """Return a key that is equal for matching calls."""
    return zlib.crc32(repr((array_access.kind(x), op, root)).encode())


def _those(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

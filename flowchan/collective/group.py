"""A member's view of its group: the operations, for arrays, tensors, scalars and any Python object.

They stand on a few operations on bytes and on arrays that lie in one piece, which a group over shared memory
(``one_host.py``) and one over several hosts (``linked.py``) have each in its own way.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from flowchan.collective import array_access
from flowchan.collective.algorithms import not_here
from flowchan.collective.call_arguments import (
    array_argument,
    function_argument,
    op_argument,
    parts_argument,
    received,
)
from flowchan.collective.data_moves import Moving
from flowchan.collective.deadline import countdown
from flowchan.collective.exchange import ConnectionStats
from flowchan.collective.handles import Starting
from flowchan.collective.operations import (
    ALLGATHER,
    ALLREDUCE,
    ALLREDUCE_WITH,
    ALLTOALL,
    BROADCAST,
    GATHER,
    NAMES,
    REDUCE,
    SCATTER,
    SPLIT,
    VALUES,
)
from flowchan.collective.point_to_point import Messages
from flowchan.collective.run_at_root import REPEATABLE, number_of_function, run_once
from flowchan.collective.value_bytes import dumps, loads
from flowchan.errors import MemberDied
from flowchan.items.arguments import is_whole
from flowchan.items.combining import OPERATIONS, combined, of_one_shape

Op = str | Callable[[Any, Any], Any]

_NUMBERS = {op: number for number, op in enumerate(OPERATIONS)}
"""What calls on values are compared by; the functions that all run have numbers after these."""


class Group(Moving, Starting):
    """A member of a group; ``rank`` and ``size`` say which of how many. Made by :func:`group` or
    :func:`members`.

    All members call the same operations in the same order. Each returns when it is done, and raises
    :class:`MemberDied` (on one host on all surviving members or on none), :class:`Mismatch` when the members
    did not call the same, ``TimeoutError`` only if a ``timeout`` was given. After a death or a time-out the
    group can't be used any more. Used as a context manager, the member leaves at its end.
    """

    name: str
    leaders: Group | None = None
    """Of a group that ``split`` made, on its rank 0: the group of the first members of all that it made then,
    in the order of their ranks. It is left with this one."""

    def _begin(self, name: str) -> None:
        self.name = name
        self._failure: BaseException | None = None
        self._later = None
        self._begin_ways()

    _loads = staticmethod(loads)

    _make_all: ClassVar[Callable[[int, str], Sequence[Group]]]
    """Makes all members of a new group of threads or processes, as a graph does for a gang."""

    _seat: ClassVar[Callable[..., Any]]
    """Makes a place in a new group over hosts, likewise."""

    if TYPE_CHECKING:  # what a group on one host and one over several have, each in its own way
        _messages: Messages

        def close(self) -> None: ...
        def _shrunk(self, name: str, give_up: float) -> Group: ...
        def _part(self, key: Any, name: str, timeout: float | None) -> Group | None: ...
        def _reached_at(self) -> str: ...
        def _has_lost_any(self) -> bool: ...
        def _cut_off(self, call: str) -> None: ...
        def _give_up_all(self) -> None: ...
        def _take_seat(self) -> None: ...
        def _abandon(self) -> None: ...
        def _disbanding(self) -> Callable[[], None]: ...
        def _reduce(self, doing: int, x: Any, out: Any, op: str, root: int, timeout: float | None) -> Any: ...
        def _wait_for_all(self, timeout: float | None) -> None: ...

    # --- arrays, tensors and values; those of these that the core has as well are quicker there ---

    def allreduce(
        self, x: Any, op: Op = "sum", out: Any = None, timeout: float | None = None, wait: bool = True
    ) -> Any:
        """Combine what all members give, element by element, in the order of their ranks: all get the same
        bits. An array or tensor is overwritten with the result and returned; with ``out`` it stays, and that
        one is returned. Any other value is combined by Python's operators. ``op``: ``sum``, ``mean``,
        ``prod``, ``min``, ``max``, ``and``, ``or``, ``xor``, for values also a function of two, run as that
        of ``allreduce_with``. ``wait=False`` gives a handle."""
        return self._allreduce(x, op, out, timeout, wait)

    def broadcast(self, x: Any = None, root: int = 0, timeout: float | None = None, wait: bool = True) -> Any:
        """Give all members what ``root`` has: an array or tensor of the same shape and type is overwritten
        and returned; any other value is returned."""
        return self._broadcast(x, root, timeout, wait)

    def barrier(self, timeout: float | None = None, wait: bool = True) -> Any:
        """Return when all members have called it."""
        return self._barrier(timeout, wait)

    def allgather(self, x: Any, out: Any = None, timeout: float | None = None, wait: bool = True) -> Any:
        """What every member gives, as a list in the order of the ranks. Arrays and tensors may differ in
        shape. ``out``: an array of ``size`` times as many elements, or a list of arrays, to be filled instead
        and returned; raises ``ValueError`` where what a member gave does not fit. ``wait=False`` gives a
        handle."""
        return self._allgather(x, out, timeout, wait)

    def alltoall(
        self,
        xs: Sequence[Any],
        out: Sequence[Any] | None = None,
        timeout: float | None = None,
        wait: bool = True,
    ) -> Any:
        """What each member has for this one: a list in the order of the ranks. ``xs[i]`` goes to member i.
        ``out``: arrays to be filled instead, then all of ``xs`` are arrays, too. ``wait=False`` gives a
        handle."""
        return self._alltoall_any(xs, out, timeout, wait)

    def reduce_scatter(
        self, x: Any, op: str = "sum", out: Any = None, timeout: float | None = None, wait: bool = True
    ) -> Any:
        """Combine arrays as ``allreduce`` does, and give each member its part of the result: the first of
        ``size`` equal parts along the first dimension to rank 0, and so on. ``wait=False`` gives a handle."""
        return self._reduce_scatter_any(x, op, out, timeout, wait)

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: Op = "sum",
        *,
        out: Any = None,
        timeout: float | None = None,
        wait: bool = True,
    ) -> Any:
        """As ``allreduce``, but only ``root`` gets the result; the others get None, and what they gave is
        left as it is."""
        self._check_root(root)

        def do(left: float | None) -> Any:
            result = self._reduced(REDUCE, x, op, out, root, left)
            return result if self.rank == root else None

        return self._do(do, timeout, wait, x)

    def gather(self, x: Any, root: int = 0, *, timeout: float | None = None, wait: bool = True) -> Any:
        """As ``allgather``, but only ``root`` gets the list; the others get None."""
        self._check_root(root)
        return self._do(lambda left: self._gather(x, root, left), timeout, wait, x)

    def scatter(
        self, xs: Sequence[Any] | None, root: int = 0, *, timeout: float | None = None, wait: bool = True
    ) -> Any:
        """The part of ``xs`` at ``root`` that stands at this member's rank; the others give None."""
        self._check_root(root)
        parts = [b""] * self.size
        if self.rank == root:
            parts = [dumps(x) for x in parts_argument("scatter", "xs", xs, self.size)]
        return self._do(lambda left: loads(self._swap(SCATTER, parts, left, root)[root]), timeout, wait)

    # --- values from members that may run out of them ---

    def allreduce_with(
        self,
        value: Any,
        fn: Callable[[Any, Any], Any],
        *,
        timeout: float | None = None,
        wait: bool = True,
    ) -> Any:
        """Combine the values of all members that contribute, by a function of two values.

        The function is applied leaf by leaf through dictionaries, lists and tuples, in the order of the
        ranks. It may change its first argument. Rank 0 runs it for all members, and an exception is raised on
        all of them. Python's operators, ``min`` and ``max`` run on each member, in one step less.

        Returns:
            The result, and the number of members that contributed.
        """
        return self._allreduce_with((True, value), fn, timeout, wait)

    def join(
        self, fn: Callable[[Any, Any], Any], *, timeout: float | None = None
    ) -> Iterator[tuple[Any, int]]:
        """Take part in ``allreduce_with`` without a value, until all members have run out of values.

        Yields:
            What ``allreduce_with`` returns on the members that still contribute. ``timeout`` limits each.
        """
        while (found := self._allreduce_with((False, None), fn, timeout))[1]:
            yield found

    # --- between two members ---

    def send(self, x: Any, to: int, *, timeout: float | None = None) -> None:
        """Send any value to one member. Returns when it is on its way: up to 64 of them, and half of the
        machine's memory, wait for their receiver."""
        self._check_other("to", to)
        self._take_seat()
        self._messages.send(x, to, timeout)

    def receive(self, source: int, *, out: Any = None, timeout: float | None = None) -> Any:
        """Receive the next value that the member ``source`` has sent to this one.

        Args:
            source: The rank of another member.
            out: An array of the same type and number of elements, to be filled and returned.
            timeout: Seconds.

        Raises:
            MemberDied: All that it has sent is received, and it is gone.
        """
        self._check_receive(source, out)
        self._take_seat()
        return received(self._messages.receive(source, timeout), source, out, self.rank)

    def receive_any(self, *, timeout: float | None = None) -> tuple[Any, int]:
        """Receive the next value that any other member has sent to this one, and the rank of that.

        Raises:
            MemberDied: All that has come is received, and one of them died, or all are gone. A member on
                another host that was gone before this one first looked for it counts as one that has left.
        """
        self._take_seat()
        if self.size == 1:
            raise ValueError("receive_any takes what other members have sent, and here is no other one")
        return self._messages.receive_any(timeout)

    def sendreceive(self, x: Any, *, to: int, source: int, timeout: float | None = None) -> Any:
        """Send ``x`` to one member, and return what another one, or the same, sends to this one."""
        if to == self.rank == source:
            return x
        left = countdown(timeout)
        self.send(x, to, timeout=left())
        return self.receive(source, timeout=left())

    # --- groups within it ---

    def split(self, key: Any, *, name: str = "", timeout: float | None = None) -> Group | None:
        """New groups within this one: of all members that give an equal ``key``, in the order of their
        ranks. None for who gives None. All members call it. The first member of each gets ``leaders``, too:
        the group of these first members."""
        left = countdown(self._settle(timeout))
        part = self._part(key, name, left())
        leads = part is not None and part.rank == 0
        leaders = self._part(leads or None, f"leaders of {name}" if name else "leaders", left())
        if part is not None:
            part.leaders = leaders
        return part

    # --- the life of a member ---

    def shrink(self, *, name: str = "", timeout: float | None = None) -> Group:
        """The group of those that are left, in the order of their ranks, when members have died or left; this
        one is closed. All who are left call it; those that still work with this group hear of it by
        :class:`MemberDied`. Whoever dies meanwhile is not in it.

        RendezvousOver hosts they meet again at the address (``at=``) where they met first, and rank 0 says
        who is left.
        Raises :class:`GroupError` for who can't reach it, for all when it is gone, and where there is no
        address.

        Raises ``TimeoutError``, only if a ``timeout`` was given."""
        give_up = math.inf if timeout is None else time.monotonic() + timeout
        return self._shrunk(name or self.name, give_up)

    def _has_met(self, timeout: float | None) -> bool:
        """Whether all have come to this new group. If one of them has died, or it fails, it is closed."""
        try:
            self._wait_for_all(timeout)
            return True
        except BaseException as error:
            self.close()
            if isinstance(error, MemberDied):
                return False
            raise

    def __enter__(self) -> Group:
        self._take_seat()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._settle()
        self.close()

    def stats(self) -> dict[int, ConnectionStats]:
        """What the connections between hosts have carried, by the rank at their other end. Only the first
        member of each host has such."""
        return {}

    def __repr__(self) -> str:
        return f"<Group{f' {self.name!r}' if self.name else ''} rank {self.rank} of {self.size}>"

    # --- what is called with all arguments ---

    def _allreduce(self, x: Any, op: Op | None, out: Any, timeout: float | None, wait: bool | None) -> Any:
        op = "sum" if op is None else op
        return self._do(lambda left: self._reduced(ALLREDUCE, x, op, out, -1, left), timeout, wait, x)

    def _broadcast(self, x: Any, root: int | None, timeout: float | None, wait: bool | None) -> Any:
        return self._do(lambda left: self._spread_any(x, root or 0, left), timeout, wait, x)

    def _barrier(self, timeout: float | None, wait: bool | None) -> Any:
        return self._do(self._wait_for_all, timeout, wait)

    def _allgather(self, x: Any, out: Any, timeout: float | None, wait: bool | None) -> Any:
        return self._do(lambda left: self._gathered_from_all(x, out, left), timeout, wait, x)

    def _gathered_from_all(self, x: Any, out: Any, timeout: float | None) -> Any:
        if out is not None:
            return self._gather_into(x, out, timeout)
        if not array_access.is_dense(x):
            return self._values(x, timeout)
        return self._gather_arrays(ALLGATHER, x, range(self.size), timeout)

    def _gather(self, x: Any, root: int, timeout: float | None) -> list[Any] | None:
        mine = self.rank == root
        if array_access.is_dense(x):
            found = self._gather_arrays(GATHER, x, range(self.size) if mine else (), timeout, root)
        else:
            key = VALUES + 4 * root
            found = self._collect(GATHER, key, dumps(x), root, timeout, x, root)
        return (found if array_access.is_array(x) else [loads(part) for part in found]) if mine else None

    def _alltoall_any(
        self, xs: Sequence[Any], out: Sequence[Any] | None, timeout: float | None, wait: bool | None
    ) -> Any:
        parts_argument("alltoall", "xs", xs, self.size)
        if out is None:
            mine = [dumps(x) for x in xs]
            return self._do(lambda left: list(map(loads, self._swap(ALLTOALL, mine, left))), timeout, wait)
        for argument, parts in (("xs", xs), ("out", parts_argument("alltoall", "out", out, self.size))):
            for part in parts:
                array_argument("alltoall with out", f"each of {argument}", part)

        def do(left: float | None) -> list[Any]:
            self._swap_arrays(ALLTOALL, xs, out, left)
            return list(out)

        return self._do(do, timeout, wait, *xs)

    def _reduce_scatter_any(
        self, x: Any, op: str | None, out: Any, timeout: float | None, wait: bool | None
    ) -> Any:
        array_argument("reduce_scatter", "x", x)
        if out is not None:
            array_argument("reduce_scatter", "out", out)
        target = array_access.part_like(x, self.size) if out is None else out
        return self._do(lambda left: self._part_reduced(x, target, op or "sum", left), timeout, wait, x)

    # --- parts of the above ---

    def _reduced(self, doing: int, x: Any, op: Op, out: Any, root: int, timeout: float | None) -> Any:
        op_argument(NAMES[doing], op)
        if out is not None:
            array_argument(NAMES[doing], "out", out)
        if isinstance(op, str) and array_access.is_dense(x):
            target = x if out is None else out
            if root not in (-1, self.rank):
                target = array_access.contiguous(x)
            flat = array_access.contiguous(target)
            source = flat if target is x else array_access.contiguous(x)
            if root in (-1, self.rank):
                array_access.check_out(x, target)
                array_access.check_apart(source, flat)
            by = self._by(doing, source)
            if by._reduce(doing, source, flat, op, root, timeout) is NotImplemented:
                raise TypeError(not_here(NAMES[doing], x))
            return array_access.give_back(flat, target)
        function = OPERATIONS[op] if isinstance(op, str) else op

        def result(found: list[bytes]) -> Any:
            of_two = of_one_shape(function) if isinstance(op, str) else function
            return functools.reduce(of_two, map(loads, found))

        number = number_of_function(function)
        if root < 0 and number == len(REPEATABLE):
            total = run_once(self, doing, dumps(x), result, timeout, x, op)
        else:
            by = _NUMBERS[op] if isinstance(op, str) else len(_NUMBERS) + number
            key = VALUES + 4 * ((len(_NUMBERS) + len(REPEATABLE) + 1) * (root + 1) + by)
            if root < 0:
                found = self._exchange(doing, key, dumps(x), -1, timeout, x, op)
            else:
                found = self._collect(doing, key, dumps(x), root, timeout, x, (root, op))
            if root not in (-1, self.rank):
                return None
            total = result(found)
        if op == "mean":
            total = total / self.size
        target = out if out is not None else x
        return array_access.fill(target, total) if array_access.is_array(target) else total

    def _spread_any(self, x: Any, root: int, timeout: float | None) -> Any:
        self._check_root(root)
        if array_access.is_dense(x):
            if self.rank != root:
                array_access.check_writable(x)
            flat = array_access.contiguous(x)
            if self._by(BROADCAST, flat)._spread(flat, root, timeout) is NotImplemented:
                raise TypeError(not_here("broadcast", x))
            return array_access.give_back(flat, x)
        mine = dumps(x) if self.rank == root else b""
        found = self._tell(BROADCAST, VALUES + 4 * root, mine, root, timeout, x, root)
        return x if self.rank == root else loads(found)

    def _allreduce_with(
        self, mine: tuple[bool, Any], fn: Any, timeout: float | None, wait: bool = True
    ) -> Any:
        function_argument("allreduce_with", fn)

        def result(found: list[bytes]) -> tuple[Any, int]:
            values = [value for contributes, value in map(loads, found) if contributes]
            return combined(values, fn), len(values)

        given, number = dumps(mine), number_of_function(fn)

        def do(left: float | None) -> Any:
            if number == len(REPEATABLE):
                return run_once(self, ALLREDUCE_WITH, given, result, left, mine[1], fn)
            key = VALUES + 4 * number
            return result(self._exchange(ALLREDUCE_WITH, key, given, -1, left, mine[1], fn))

        return self._do(do, timeout, wait)

    def _values(self, x: Any, timeout: float | None) -> list[Any]:
        return [loads(part) for part in self._exchange(ALLGATHER, VALUES, dumps(x), -1, timeout, x, None)]

    def _gathered(self, value: Any, timeout: float | None) -> list[Any]:
        return [loads(part) for part in self._exchange(SPLIT, VALUES, dumps(value), -1, timeout, None, None)]

    def _check_root(self, root: int) -> None:
        if not is_whole(root) or not 0 <= root < self.size:
            raise ValueError(f"root must be a rank of the group, from 0 to {self.size - 1}, not {root!r}")

    def _check_other(self, argument: str, rank: int) -> None:
        if not is_whole(rank) or not 0 <= rank < self.size or rank == self.rank:
            raise ValueError(
                f"{argument} must be the rank of another member, below {self.size}, not {rank!r}"
            )

    def _check_receive(self, source: int, out: Any) -> None:
        self._check_other("source", source)
        if out is not None:
            array_argument("receive", "out", out)
            array_access.check_writable(out)

    def _failed_before(self, call: str) -> BaseException:
        """What a call of a group that can't be used any more raises."""
        assert self._failure is not None
        again = type(self._failure)(f"{self!r} has failed before: {self._failure}")
        if isinstance(self._failure, MemberDied) and isinstance(again, MemberDied):
            again.ranks, again.operation = self._failure.ranks, call
        return again

    def _title(self) -> str:
        return f"group {self.name!r}" if self.name else f"a group of {self.size}"

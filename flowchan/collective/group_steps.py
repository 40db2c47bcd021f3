"""Define the steps of group operations, which the public methods and the native core use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flowchan.collective import array_access
from flowchan.collective.algorithms import wrong_device_message
from flowchan.collective.call_arguments import (
    array_argument,
    function_argument,
    op_argument,
    parts_argument,
)
from flowchan.collective.data_moves import Moving
from flowchan.collective.handles import Starting
from flowchan.collective.operations import (
    ALLGATHER,
    ALLREDUCE,
    ALLREDUCE_WITH,
    ALLTOALL,
    BROADCAST,
    GATHER,
    NAMES,
    SPLIT,
    VALUES,
)
from flowchan.collective.run_at_root import REPEATABLE, number_of_function, run_once
from flowchan.collective.value_bytes import dumps, loads
from flowchan.errors import MemberDied
from flowchan.items.arguments import is_whole
from flowchan.items.combining import OPERATIONS, combined, of_one_shape

Op = str | Callable[[Any, Any], Any]

_NUMBERS = {op: number for number, op in enumerate(OPERATIONS)}
"""Number of each named operation on values. Members compare these numbers to check that their calls agree.

Higher numbers identify functions that all members run.
"""


class GroupSteps(Moving, Starting):
    """Base class of groups on one or several hosts, with the argument checks and steps of each operation."""

    name: str
    _failure: BaseException | None

    if TYPE_CHECKING:  # methods and attributes that SharedGroup and LinkedGroup define

        def _give_up_all(self) -> None: ...
        def _reduce(self, doing: int, x: Any, out: Any, op: str, root: int, timeout: float | None) -> Any: ...
        def _wait_for_all(self, timeout: float | None) -> None: ...

    # --- Python implementations that the native methods call, with all arguments given ---

    def _allreduce(self, x: Any, op: Op | None, out: Any, timeout: float | None, wait: bool | None) -> Any:
        op = "sum" if op is None else op
        return self._do(
            lambda remaining: self._reduced(ALLREDUCE, x, op, out, -1, remaining), timeout, wait, x
        )

    def _broadcast(self, x: Any, root: int | None, timeout: float | None, wait: bool | None) -> Any:
        return self._do(lambda remaining: self._spread_any(x, root or 0, remaining), timeout, wait, x)

    def _barrier(self, timeout: float | None, wait: bool | None) -> Any:
        return self._do(self._wait_for_all, timeout, wait)

    def _allgather(self, x: Any, out: Any, timeout: float | None, wait: bool | None) -> Any:
        return self._do(lambda remaining: self._gathered_from_all(x, out, remaining), timeout, wait, x)

    def _gathered_from_all(self, x: Any, out: Any, timeout: float | None) -> Any:
        if out is not None:
            return self._gather_into(x, out, timeout)
        if not array_access.is_dense(x):
            return self._values(x, timeout)
        return self._gather_arrays(ALLGATHER, x, range(self.size), timeout)

    def _gather(self, x: Any, root: int, timeout: float | None) -> list[Any] | None:
        own = self.rank == root
        if array_access.is_dense(x):
            found = self._gather_arrays(GATHER, x, range(self.size) if own else (), timeout, root)
        else:
            key = VALUES + 4 * root
            found = self._collect(GATHER, key, dumps(x), root, timeout, x, root)
        return (found if array_access.is_array(x) else [loads(part) for part in found]) if own else None

    def _alltoall_any(
        self, xs: Sequence[Any], out: Sequence[Any] | None, timeout: float | None, wait: bool | None
    ) -> Any:
        parts_argument("alltoall", "xs", xs, self.size)
        if out is None:
            own = [dumps(x) for x in xs]
            return self._do(
                lambda remaining: list(map(loads, self._swap(ALLTOALL, own, remaining))), timeout, wait
            )
        for argument, parts in (("xs", xs), ("out", parts_argument("alltoall", "out", out, self.size))):
            for part in parts:
                array_argument("alltoall with out", f"each of {argument}", part)

        def do(remaining: float | None) -> list[Any]:
            self._swap_arrays(ALLTOALL, xs, out, remaining)
            return list(out)

        return self._do(do, timeout, wait, *xs)

    def _reduce_scatter_any(
        self, x: Any, op: str | None, out: Any, timeout: float | None, wait: bool | None
    ) -> Any:
        array_argument("reduce_scatter", "x", x)
        if out is not None:
            array_argument("reduce_scatter", "out", out)
        target = array_access.part_like("reduce_scatter", x, self.size) if out is None else out
        return self._do(
            lambda remaining: self._part_reduced(x, target, op or "sum", remaining), timeout, wait, x
        )

    # --- steps of the operations ---

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
                array_access.check_out(NAMES[doing], x, target)
                array_access.check_overlap(NAMES[doing], source, flat)
            by = self._by(doing, source)
            if by._reduce(doing, source, flat, op, root, timeout) is NotImplemented:
                raise TypeError(wrong_device_message(NAMES[doing], x))
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
        self._check_root("broadcast", root)
        if array_access.is_dense(x):
            if self.rank != root:
                array_access.check_writable("broadcast", "x", x)
            flat = array_access.contiguous(x)
            if self._by(BROADCAST, flat)._spread(flat, root, timeout) is NotImplemented:
                raise TypeError(wrong_device_message("broadcast", x))
            return array_access.give_back(flat, x)
        own = dumps(x) if self.rank == root else b""
        found = self._tell(BROADCAST, VALUES + 4 * root, own, root, timeout, x, root)
        return x if self.rank == root else loads(found)

    def _allreduce_with(
        self, own: tuple[bool, Any], fn: Any, timeout: float | None, wait: bool = True
    ) -> Any:
        function_argument("allreduce_with", fn)

        def result(found: list[bytes]) -> tuple[Any, int]:
            values = [value for contributes, value in map(loads, found) if contributes]
            return combined(values, fn), len(values)

        given, number = dumps(own), number_of_function(fn)

        def do(remaining: float | None) -> Any:
            if number == len(REPEATABLE):
                return run_once(self, ALLREDUCE_WITH, given, result, remaining, own[1], fn)
            key = VALUES + 4 * number
            return result(self._exchange(ALLREDUCE_WITH, key, given, -1, remaining, own[1], fn))

        return self._do(do, timeout, wait)

    def _values(self, x: Any, timeout: float | None) -> list[Any]:
        return [loads(part) for part in self._exchange(ALLGATHER, VALUES, dumps(x), -1, timeout, x, None)]

    def _gathered(self, value: Any, timeout: float | None) -> list[Any]:
        return [loads(part) for part in self._exchange(SPLIT, VALUES, dumps(value), -1, timeout, None, None)]

    def _check_root(self, call: str, root: int) -> None:
        if not is_whole(root) or not 0 <= root < self.size:
            raise ValueError(
                f"{call}: root must be a rank of the group, from 0 to {self.size - 1}, got {root!r}"
            )

    def _check_other(self, call: str, argument: str, rank: int) -> None:
        if not is_whole(rank) or not 0 <= rank < self.size or rank == self.rank:
            raise ValueError(
                f"{call}: {argument} must be the rank of another member, from 0 to {self.size - 1}, "
                f"got {rank!r}"
            )

    def _check_receive(self, source: int, out: Any) -> None:
        self._check_other("receive", "source", source)
        if out is not None:
            array_argument("receive", "out", out)
            array_access.check_writable("receive", "out", out)

    def _failed_before(self, call: str) -> BaseException:
        """Return the error for a call on a group that has already failed."""
        assert self._failure is not None
        again = type(self._failure)(f"{self!r} failed earlier: {self._failure}; create a new group")
        if isinstance(self._failure, MemberDied) and isinstance(again, MemberDied):
            again.ranks, again.operation = self._failure.ranks, call
        return again

    def _title(self) -> str:
        return f"group {self.name!r}" if self.name else f"a group of {self.size}"

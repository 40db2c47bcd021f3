"""A member's view of its group: the operations, for arrays, tensors, scalars and any Python object.

The core does what takes time (``_core/group*.cpp``): rounds over shared memory, and arrays that lie in one
piece. Here is the rest: values of Python, arrays that do not lie in one piece, groups within groups, and the
words of errors.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn

from flowchan import _core
from flowchan.collective import arrays
from flowchan.collective.combining import combined
from flowchan.collective.handles import Handle, Later
from flowchan.collective.lanes import Lanes
from flowchan.collective.values import dumps, loads
from flowchan.errors import GroupError, MemberDied, MemberLeft, Mismatch
from flowchan.items.whole import is_whole
from flowchan.transport.descriptors import Borrowed, Inherited, Sent, hand_over, take_over

NAMES = (
    "nothing", "barrier", "broadcast", "reduce", "allreduce", "reduce_scatter", "allgather", "gather",
    "scatter", "alltoall", "split", "comparing the calls", "combine",
)  # fmt: skip
"""The operations by their numbers, as the core knows them."""
ALLREDUCE, REDUCE, ALLGATHER, GATHER, SCATTER, ALLTOALL, SPLIT, TELL, COMBINE = 4, 3, 6, 7, 8, 9, 10, 11, 12

COMBINING = (NAMES[ALLREDUCE], NAMES[REDUCE])

VALUES, ARRAYS, KNOWN = 1, 2, 3
"""What an operation's members give: values of Python, arrays of any size, arrays whose sizes all know."""

GONE, MISMATCH, NO_MEMORY, TIMED_OUT, _INTERRUPTED, CLOSED, TAKEN = range(1, 8)
"""How an operation ended, as the core says it."""

HERE, LEFT, _GAVE_UP = range(3)

Op = str | Callable[[Any, Any], Any]

FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add,
    "mean": operator.add,
    "prod": operator.mul,
    "min": min,
    "max": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}

log = logging.getLogger("flowchan.collective")


class Group(_core.Group):
    """A member of a group; ``rank`` and ``size`` say which of how many. Made by :func:`group` or
    :func:`members`.

    All members call the same operations in the same order. Each returns when it is done, and raises
    :class:`MemberDied` on all surviving members or on none, :class:`Mismatch` when the members did not call
    the same, ``TimeoutError`` only if a ``timeout`` was given. After a death or a time-out the group can't be
    used any more. Used as a context manager, the member leaves at its end.
    """

    def __init__(self, fd: int, rank: int, name: str = "") -> None:
        super().__init__(fd, rank)
        self.name = name
        self._failure: BaseException | None = None
        self._later: Later | None = None
        self._lanes = Lanes(self)

    # --- arrays, tensors and values ---

    def reduce(
        self, x: Any, root: int = 0, op: Op = "sum", *, out: Any = None, timeout: float | None = None
    ) -> Any:
        """As ``allreduce``, but only ``root`` gets the result; the others get None, and what they gave is
        left as it is."""
        self._check_root(root)
        self._settle()
        result = self._reduced(REDUCE, x, op, out, root, timeout)
        return result if self.rank == root else None

    def allgather(self, x: Any, *, out: Any = None, timeout: float | None = None) -> Any:
        """What every member gives, as a list in the order of the ranks. Arrays and tensors may differ in
        shape. ``out``: an array of ``size`` times as many elements, or a list of arrays, to be filled instead
        and returned."""
        self._settle()
        if out is not None:
            return self._gather_into(ALLGATHER, x, out, range(self.size), timeout)
        if not arrays.is_array(x):
            return [loads(part) for part in self._exchange(ALLGATHER, VALUES, dumps(x), -1, timeout, x, None)]
        return self._gather_arrays(ALLGATHER, x, range(self.size), timeout)

    def gather(self, x: Any, root: int = 0, *, timeout: float | None = None) -> list[Any] | None:
        """As ``allgather``, but only ``root`` gets the list; the others get None."""
        self._check_root(root)
        self._settle()
        mine = self.rank == root
        if arrays.is_array(x):
            found = self._gather_arrays(GATHER, x, range(self.size) if mine else (), timeout, root)
        else:
            key = VALUES + 4 * root
            found = self._exchange(GATHER, key, dumps(x), -1 if mine else self.rank, timeout, x, root)
        return (found if arrays.is_array(x) else [loads(part) for part in found]) if mine else None

    def scatter(self, xs: Sequence[Any] | None, root: int = 0, *, timeout: float | None = None) -> Any:
        """The part of ``xs`` at ``root`` that stands at this member's rank; the others give None."""
        self._check_root(root)
        self._settle()
        parts = [b""] * self.size
        if self.rank == root:
            if xs is None or len(xs) != self.size:
                given = "None" if xs is None else f"{len(xs)} parts"
                raise ValueError(f"scatter takes a part for each of the {self.size} members, not {given}")
            parts = [dumps(x) for x in xs]
        return loads(self._swap(SCATTER, parts, timeout, root)[root])

    def alltoall(
        self, xs: Sequence[Any], *, out: Sequence[Any] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """What each member has for this one: a list in the order of the ranks. ``xs[i]`` goes to member i.
        ``out``: arrays to be filled instead, then all of ``xs`` are arrays, too."""
        self._settle()
        if len(xs) != self.size:
            raise ValueError(f"alltoall takes a part for each of the {self.size} members, not {len(xs)}")
        if out is None:
            return [loads(part) for part in self._swap(ALLTOALL, [dumps(x) for x in xs], timeout)]
        self._swap_arrays(ALLTOALL, xs, out, timeout)
        return list(out)

    def reduce_scatter(
        self, x: Any, op: str = "sum", *, out: Any = None, timeout: float | None = None
    ) -> Any:
        """Combine arrays as ``allreduce`` does, and give each member its part of the result: the first of
        ``size`` equal parts along the first dimension to rank 0, and so on."""
        self._settle()
        if not arrays.is_array(x):
            raise TypeError(f"reduce_scatter takes an array or a tensor, not {type(x).__name__}")
        return self._part_reduced(x, arrays.part_like(x, self.size) if out is None else out, op, timeout)

    def split(self, key: Any, *, name: str = "", timeout: float | None = None) -> Group | None:
        """New groups within this one: of all members that give an equal ``key``, in the order of their
        ranks. None for who gives None. All members call it."""
        self._settle()
        keys = self._gathered(key, timeout)
        mates = [rank for rank, other in enumerate(keys) if other == key and key is not None]
        mine, place, error = None, None, ""
        try:
            if mates and self.rank == mates[0]:
                mine = Group(_core.Group._make(len(mates)), 0, name)
                place = Borrowed(os.getpid(), mine._fd, -1, os.fstat(mine._fd).st_ino)
        except OSError as failed:
            error = f"rank {self.rank} can't make the memory: {failed}"
        places = self._gathered(place, timeout)
        try:
            if mates and mine is None and places[mates[0]] is not None:
                opened, _ = take_over(places[mates[0]])
                mine = Group(opened, mates.index(self.rank), name)
        except OSError as failed:
            error = f"rank {self.rank} can't open the memory of rank {mates[0]}: {failed}"
        errors = [text for text in self._gathered(error, timeout) if text]
        if errors:
            raise GroupError("; ".join(errors))
        if mine is not None:
            mine._take_seat()
        return mine

    # --- values from members that may run out of them ---

    def combine(
        self, value: Any, function: Callable[[Any, Any], Any], *, timeout: float | None = None
    ) -> tuple[Any, int]:
        """Combine ``value`` with those of all who contribute, by a function of two: leaf by leaf through
        dictionaries, lists and tuples, in the order of the ranks. Returns the result and how many have
        contributed. The function may change its first argument."""
        return self._combine((True, value), function, timeout)

    def rest(
        self, function: Callable[[Any, Any], Any], *, timeout: float | None = None
    ) -> Iterator[tuple[Any, int]]:
        """For a member that has run out: takes part in ``combine`` without contributing until all have run
        out, and gives what ``combine`` gives the others."""
        while (found := self._combine((False, None), function, timeout))[1]:
            yield found

    # --- between two members ---

    def send(self, x: Any, to: int, *, timeout: float | None = None) -> None:
        """Send any value to one member. Returns when it is on its way: up to 64 of them, and half of the
        machine's memory, wait for their receiver."""
        self._check_other("to", to)
        self._take_seat()
        self._lanes.send(x, to, timeout)

    def receive(self, source: int, *, out: Any = None, timeout: float | None = None) -> Any:
        """The next value that the member ``source`` has sent to this one. ``out``: an array of the same type
        and number of elements to be filled and returned. Raises :class:`MemberDied` when all that it sent is
        received, and it is gone."""
        self._check_other("source", source)
        self._take_seat()
        x = self._lanes.receive(source, timeout)
        if out is None:
            return x
        if not arrays.is_array(x) or arrays.like(x)[1] != arrays.like(out)[1] or x.nbytes != out.nbytes:
            raise Mismatch(
                f"rank {source} sent {arrays.described(x)}; rank {self.rank} has room for "
                f"{arrays.described(out)}"
            )
        return arrays.fill(out, x.reshape(out.shape))

    def sendreceive(self, x: Any, *, to: int, source: int, timeout: float | None = None) -> Any:
        """Send ``x`` to one member, and return what another one, or the same, sends to this one."""
        if to == self.rank == source:
            return x
        self.send(x, to, timeout=timeout)
        return self.receive(source, timeout=timeout)

    # --- the life of a member ---

    def close(self) -> None:
        """Leave the group: any number of times, in any order. What the others still call raises
        :class:`MemberLeft`."""
        self._leave()
        if self._later is not None:
            self._later.close()
            self._later = None
        self._lanes.close()

    def __enter__(self) -> Group:
        self._take_seat()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._settle()
        self.close()

    def explain(self, operation: str, x: Any = None) -> str:
        """How an operation would be done, in a sentence."""
        known = [name for number, name in enumerate(NAMES) if number not in (0, TELL)]
        if operation not in known:
            raise ValueError(f"operation must be one of {', '.join(known)}, not {operation!r}")
        size = arrays.size_of(x)
        if size is None:
            how = "values are pickled, and everybody reads those of the others"
        elif operation in COMBINING and size > (256 if self.size == 2 else 32) * 1024:
            how = "slices: everybody combines a part of each chunk and reads the other parts"
        elif operation in COMBINING:
            how = "exchange: everybody reads the inputs of the others"
        else:
            how = "chunks of up to 512 KB, read where they were written"
        return f"{operation}: {how}; shared memory, {self.size} members on this host"

    def __repr__(self) -> str:
        return f"<Group{f' {self.name!r}' if self.name else ''} rank {self.rank} of {self.size}>"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._joined or self._broken:
            raise TypeError(
                f"{self!r} is in use by process {os.getpid()}; send a member before its first use"
            )
        return _arrive, (hand_over(self._fd, -1, self), self.rank, self.name)

    # --- what the core calls ---

    def _allreduce(self, x: Any, op: Op | None, out: Any, timeout: float | None, wait: bool | None) -> Any:
        op = "sum" if op is None else op
        if wait is False:
            return self._start(lambda: self._reduced(ALLREDUCE, x, op, out, -1, timeout))
        self._settle()
        return self._reduced(ALLREDUCE, x, op, out, -1, timeout)

    def _broadcast(self, x: Any, root: int | None, timeout: float | None, wait: bool | None) -> Any:
        root = root or 0
        if wait is False:
            return self._start(lambda: self._spread_any(x, root, timeout))
        self._settle()
        return self._spread_any(x, root, timeout)

    def _barrier(self, timeout: float | None, wait: bool | None) -> Any:
        if wait is False:
            return self._start(lambda: self._wait_for_all(timeout))
        self._settle()
        return self._wait_for_all(timeout)

    def _failed(self, end: int, doing: int, x: Any, more: Any) -> NoReturn:
        """Raises what an operation ended by."""
        call = NAMES[doing]
        if end == MISMATCH:
            said = [
                loads(b) for b in self._exchange(TELL, 0, dumps(_called(call, x, more)), -1, None, None, None)
            ]
            calls = "; ".join(f"rank {rank} called {text}" for rank, text in enumerate(said))
            raise Mismatch(f"the members of {self._title()} did not call the same: {calls}")
        if end == NO_MEMORY:
            raise MemoryError(f"there is no shared memory for {call} of {self._title()}")
        if end == TAKEN:
            raise GroupError(f"{self!r} is used by another process already; each member is one process's")
        if end == CLOSED:
            raise GroupError(f"{self!r} was closed")
        if self._failure is None:
            self._failure = self._late(call) if end == TIMED_OUT else self._death(call)
            raise self._failure
        again = type(self._failure)(f"{self!r} has failed before: {self._failure}")
        if isinstance(self._failure, MemberDied) and isinstance(again, MemberDied):
            again.ranks, again.operation = self._failure.ranks, call
        raise again from self._failure

    def _stalled(self, doing: int, seconds: float) -> None:
        """Says once for whom an operation waits."""
        log.warning(
            "%s of %s has waited for %.0f s: %s", NAMES[doing], self._title(), seconds, self._absent()
        )

    # --- parts of the above ---

    def _reduced(self, doing: int, x: Any, op: Op, out: Any, root: int, timeout: float | None) -> Any:
        if isinstance(op, str) and op not in FUNCTIONS:
            raise ValueError(f"op must be one of {', '.join(map(repr, FUNCTIONS))} or a function, not {op!r}")
        if arrays.is_array(x) and isinstance(op, str):
            target = x if out is None else out
            if root not in (-1, self.rank):
                target = arrays.contiguous(x)
            flat = arrays.writable_twin(target)
            source = flat if target is x else arrays.contiguous(x)
            if self._reduce(doing, source, flat, op, root, timeout) is NotImplemented:
                raise TypeError(_elsewhere(NAMES[doing], x))
            return arrays.give_back(flat, target)
        key = VALUES + 4 * (root + 1)
        mine = root in (-1, self.rank)
        found = self._exchange(doing, key, dumps(x), -1 if mine else self.rank, timeout, x, op)
        if not mine:
            return None
        function = FUNCTIONS[op] if isinstance(op, str) else op
        total = functools.reduce(function, (loads(part) for part in found))
        if op == "mean":
            total = total / self.size
        target = out if out is not None else x
        return arrays.fill(target, total) if arrays.is_array(target) else total

    def _spread_any(self, x: Any, root: int, timeout: float | None) -> Any:
        self._check_root(root)
        if arrays.is_array(x):
            flat = arrays.writable_twin(x)
            if self._spread(flat, root, timeout) is NotImplemented:
                raise TypeError(_elsewhere("broadcast", x))
            return arrays.give_back(flat, x)
        mine = dumps(x) if self.rank == root else b""
        (found,) = self._exchange(2, VALUES + 4 * root, mine, root, timeout, x, root)
        return x if self.rank == root else loads(found)

    def _combine(self, mine: tuple[bool, Any], function: Any, timeout: float | None) -> tuple[Any, int]:
        self._settle()
        found = self._exchange(COMBINE, VALUES, dumps(mine), -1, timeout, mine[1], None)
        return combined(map(loads, found), function)

    def _gathered(self, value: Any, timeout: float | None) -> list[Any]:
        return [loads(part) for part in self._exchange(SPLIT, VALUES, dumps(value), -1, timeout, None, None)]

    def _gather_arrays(
        self, doing: int, x: Any, wanted: Sequence[int], timeout: float | None, root: int = 0
    ) -> list[Any]:
        likes = self._exchange(doing, ARRAYS + 4 * root, dumps(arrays.like(x)), -1, timeout, x, root)
        made = [
            arrays.make(loads(one), x) if rank in wanted else arrays.NOTHING for rank, one in enumerate(likes)
        ]
        source = arrays.contiguous(x)
        self._allgather_into(doing, KNOWN, [source], made if wanted else [None] * self.size, timeout)
        return made

    def _gather_into(self, doing: int, x: Any, out: Any, wanted: Sequence[int], timeout: float | None) -> Any:
        parts = list(out) if isinstance(out, list | tuple) else arrays.parts_of(out, self.size)
        if len(parts) != self.size:
            raise ValueError(f"out must have a part for each of the {self.size} members, not {len(parts)}")
        flats = [arrays.writable_twin(part) for part in parts]
        self._allgather_into(doing, KNOWN, [arrays.contiguous(x)], flats, timeout)
        for flat, part in zip(flats, parts, strict=True):
            arrays.give_back(flat, part)
        return out

    def _part_reduced(self, x: Any, target: Any, op: str, timeout: float | None) -> Any:
        flat = arrays.writable_twin(target)
        if self._reduce_scatter(arrays.contiguous(x), flat, op, timeout) is NotImplemented:
            raise TypeError(_elsewhere("reduce_scatter", x))
        return arrays.give_back(flat, target)

    def _swap_arrays(self, doing: int, xs: Sequence[Any], out: Sequence[Any], timeout: float | None) -> None:
        flats = [arrays.writable_twin(x) for x in out]
        self._alltoall(doing, KNOWN, [arrays.contiguous(x) for x in xs], flats, timeout)
        for flat, x in zip(flats, out, strict=True):
            arrays.give_back(flat, x)

    def _swap(self, doing: int, parts: list[bytes], timeout: float | None, root: int = 0) -> list[bytes]:
        """Bytes for each member against those that each has for this one."""
        lengths = dumps([len(part) for part in parts])
        said = self._exchange(doing, VALUES + 4 * root, lengths, -1, timeout, parts, root)
        rooms = [bytearray(loads(one)[self.rank]) for one in said]
        self._alltoall(doing, KNOWN, list(parts), list(rooms), timeout)
        return [bytes(room) for room in rooms]

    def _check_root(self, root: int) -> None:
        if not is_whole(root) or not 0 <= root < self.size:
            raise ValueError(f"root must be a rank of the group, from 0 to {self.size - 1}, not {root!r}")

    def _check_other(self, argument: str, rank: int) -> None:
        if (
            isinstance(rank, bool)
            or not isinstance(rank, int)
            or not 0 <= rank < self.size
            or rank == self.rank
        ):
            raise ValueError(
                f"{argument} must be the rank of another member, below {self.size}, not {rank!r}"
            )

    def _take_seat(self) -> None:
        if self._join():
            raise GroupError(f"{self!r} is used by another process already; each member is one process's")

    def _start(self, call: Callable[[], Any]) -> Handle:
        if self._later is None:
            self._later = Later(self)
        return self._later.start(call)

    def _settle(self) -> None:
        """Returns when what was started before is done: operations keep their order."""
        if self._later is not None:
            self._later.settle()

    def _title(self) -> str:
        return f"group {self.name!r}" if self.name else f"a group of {self.size}"

    def _absent(self) -> str:
        """The members that have not come to the operation that this one waits in, and what they did last."""
        return "; ".join(
            f"rank {rank} {_state(*self._see(rank)[:6])}"
            for rank in range(self.size)
            if rank != self.rank and not self._see(rank)[6]
        )

    def _late(self, call: str) -> TimeoutError:
        return TimeoutError(f"{call} of {self._title()} was not done in time: {self._absent()}")

    def _death(self, call: str) -> MemberDied:
        seen = {rank: self._see(rank) for rank in range(self.size) if rank != self.rank}
        if self._gave_up_alone(seen):
            return MemberDied(f"{self!r} has given up in the middle of an operation", (self.rank,), call)
        gone = {rank: s for rank, s in seen.items() if not s[6] and (s[1] != HERE or not s[5])}
        kind = MemberLeft if gone and all(s[1] == LEFT for s in gone.values()) else MemberDied
        who = "; ".join(f"rank {rank} {_state(*s[:6])}" for rank, s in gone.items())
        return kind(f"{call} of {self._title()} can't be done: {who}", tuple(gone), call)

    @staticmethod
    def _gave_up_alone(seen: dict[int, Any]) -> bool:
        return all(s[6] or (s[1] == HERE and s[5]) for s in seen.values())


def _state(pid: int, gone: int, operation: int, doing: int, inside: bool, alive: bool) -> str:
    last = f"{NAMES[doing]}, its operation {operation}" if doing < len(NAMES) and operation else "nothing"
    if not pid:
        return "has not joined"
    if gone == LEFT:
        return f"(process {pid}) has left; the last it did was {last}"
    if gone != HERE:
        return f"(process {pid}) gave up in {last}"
    if not alive:
        return f"(process {pid}) died; the last it {'was in' if inside else 'did'} was {last}"
    return f"(process {pid}) {'is in' if inside else 'is elsewhere; the last it did was'} {last}"


def _called(call: str, x: Any, more: Any) -> str:
    if isinstance(x, list):
        what = f"[{', '.join(map(arrays.described, x))}]"
    else:
        what = "" if x is None else arrays.described(x)
    return f"{call}({what}{'' if more is None else f', {more!r}'})"


def _elsewhere(call: str, x: Any) -> str:
    return (
        f"{call} takes arrays and tensors in this machine's memory, not {arrays.described(x)}; for CUDA "
        "tensors use torch.distributed with NCCL"
    )


def _arrive(handle: Inherited | Sent | Borrowed, rank: int, name: str) -> Group:
    fd, _ = take_over(handle)
    member = Group(fd, rank, name)
    member._take_seat()
    return member

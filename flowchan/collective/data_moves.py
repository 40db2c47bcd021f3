"""Define group operations that move arrays between members, or combine and scatter arrays.

Each operation checks its arguments before it sends anything, and then chooses memory for the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowchan.collective import array_access
from flowchan.collective.algorithms import AlgorithmChoice, wrong_device_message
from flowchan.collective.call_arguments import array_argument, parts_argument
from flowchan.collective.deadline import countdown
from flowchan.collective.operations import (
    ALLGATHER,
    ARRAYS,
    GATHER,
    KNOWN,
    NAMES,
    REDUCE_SCATTER,
    SCATTER,
    TYPED,
    VALUES,
)
from flowchan.collective.value_bytes import dumps, loads


class Moving(AlgorithmChoice):
    """Base class of groups, with the operations that move data between members."""

    if TYPE_CHECKING:

        @property
        def rank(self) -> int: ...
        def _exchange(
            self, doing: int, key: int, data: Any, only: int, timeout: float | None, x: Any, more: Any
        ) -> list[bytes]: ...
        def _alltoall(
            self, doing: int, key: int, ins: list[Any], outs: list[Any], timeout: float | None, more: Any
        ) -> None: ...

    def _collect(
        self, doing: int, key: int, data: Any, root: int, timeout: float | None, x: Any, more: Any
    ) -> list[bytes]:
        """Gather the data of all members at ``root``."""
        only = -1 if self.rank == root else self.rank
        return self._exchange(doing, key, data, only, timeout, x, more)

    def _tell(
        self, doing: int, key: int, data: Any, root: int, timeout: float | None, x: Any, more: Any
    ) -> bytes:
        """Send the data of ``root`` to all members."""
        (received,) = self._exchange(doing, key, data, root, timeout, x, more)
        return received

    def _gather_arrays(
        self, doing: int, x: Any, wanted: Sequence[int], timeout: float | None, root: int = 0
    ) -> list[Any]:
        remaining = countdown(timeout)
        by, source = self._by(doing, x), array_access.contiguous(x)
        if by is self and not array_access.is_here(x):
            raise TypeError(wrong_device_message("gather" if doing == GATHER else "allgather", x))
        more = root if doing == GATHER else None
        likes = self._exchange(
            doing, ARRAYS + 4 * root, dumps(array_access.like(x)), -1, remaining(), x, more
        )
        device = array_access.place_of(x)
        made = [
            array_access.make(loads(one), device) if rank in wanted else None
            for rank, one in enumerate(likes)
        ]
        by._allgather_into(doing, KNOWN + 4 * root, [source], made, remaining())
        return made

    def _gather_into(self, x: Any, out: Any, timeout: float | None) -> Any:
        array_argument("allgather with out", "x", x)
        each = isinstance(out, list | tuple)
        given = list(out) if each else [out]
        for part in given:
            array_argument("allgather", "out, or each array in the list out,", part)
            array_access.check_place("allgather", x, part)
            array_access.check_type(NAMES[ALLGATHER], x, part)
            array_access.check_writable("allgather", "out", part)
        if each and len(given) != self.size:
            raise ValueError(
                f"allgather: out must have one part for each of the {self.size} members, got {len(given)}"
            )
        flats = [array_access.contiguous(part) for part in given]
        parts = flats if each else array_access.parts_of("allgather", flats[0], self.size)
        self._by(ALLGATHER, x)._allgather_into(ALLGATHER, TYPED, [array_access.contiguous(x)], parts, timeout)
        for flat, part in zip(flats, given, strict=True):
            array_access.give_back(flat, part)
        return out

    def _part_reduced(self, x: Any, target: Any, op: str, timeout: float | None) -> Any:
        if math.prod(x.shape) % self.size:
            raise ValueError(
                f"reduce_scatter: the number of elements of x must be divisible by {self.size}, the number "
                f"of members, got {array_access.described(x)}; pad x"
            )
        array_access.check_out("reduce_scatter", x, target, self.size)
        flat, source = array_access.contiguous(target), array_access.contiguous(x)
        array_access.check_overlap("reduce_scatter", source, flat)
        if self._by(REDUCE_SCATTER, x)._reduce_scatter(source, flat, op, timeout) is NotImplemented:
            raise TypeError(wrong_device_message("reduce_scatter", x))
        return array_access.give_back(flat, target)

    def _swap_arrays(
        self,
        doing: int,
        xs: Sequence[Any],
        out: Sequence[Any],
        timeout: float | None,
        root: int | None = None,
    ) -> None:
        """Exchange arrays of the same element type between all members."""
        parts_argument(NAMES[doing], "xs", xs, self.size)
        for x in parts_argument(NAMES[doing], "out", out, self.size):
            array_access.check_place(NAMES[doing], xs[0], x)
            array_access.check_writable(NAMES[doing], "out", x)
        for x in (*xs, *out):
            array_access.check_type(NAMES[doing], xs[0], x)
        flats = [array_access.contiguous(x) for x in out]
        by = self._by(doing, flats[0])
        key = TYPED if root is None else TYPED + 4 * (root + 1)
        by._alltoall(doing, key, [array_access.contiguous(x) for x in xs], flats, timeout, root)
        for flat, x in zip(flats, out, strict=True):
            array_access.give_back(flat, x)

    def _swap(self, doing: int, parts: list[bytes], timeout: float | None, root: int = 0) -> list[bytes]:
        """Send bytes to each member, and return the bytes that this member received from each."""
        lengths, remaining = dumps([len(part) for part in parts]), countdown(timeout)
        more = root if doing == SCATTER else None
        lengths_of_all = self._exchange(doing, VALUES + 4 * root, lengths, -1, remaining(), parts, more)
        buffers = [bytearray(loads(one)[self.rank]) for one in lengths_of_all]
        self._alltoall(doing, KNOWN, list(parts), list(buffers), remaining(), more)
        return [bytes(buffer) for buffer in buffers]

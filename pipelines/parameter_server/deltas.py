"""Compute and apply the differences between two versions of a block of bytes.

The block consists of units of two bytes, the size of a ``bfloat16``. Every 65,536 units form a bucket. A
delta contains the position and the value of each changed unit, four bytes in total. If more than half of the
units in a bucket have changed, the delta contains the whole bucket instead, because this takes less space.

Units are compared as integers. The delta therefore preserves all bits, even in NaNs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

_BUCKET = 1 << 16
"""Number of units in a bucket. The position of a unit within its bucket fits into 16 bits."""
_CHUNK = 64 * _BUCKET
"""Number of units to compare at a time, so that temporary arrays stay small."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Changed units of a block, as NumPy arrays.

    Attributes:
        buckets: Indices of the buckets that are sent as changed units.
        counts: Number of changed units in each of these buckets.
        positions: Positions of the changed units within their buckets.
        values: Values of the changed units.
        whole: Indices of the buckets that are sent whole.
        contents: All units of the whole buckets.
    """

    buckets: Any
    counts: Any
    positions: Any
    values: Any
    whole: Any
    contents: Any

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(int(getattr(self, field.name).nbytes) for field in fields(self))


def changed_units(old: memoryview, new: memoryview) -> Any:
    """Return a NumPy array with one bit per unit, which is 1 if the unit has changed.

    Args:
        old: The old block, whose size must be a multiple of 16 bytes.
        new: The new block, with the same size.
    """
    import numpy as np

    before, after = np.frombuffer(old, np.uint16), np.frombuffer(new, np.uint16)
    bits = np.empty(len(after) // 8, np.uint8)
    for begin, end in _chunks(len(after)):
        bits[begin // 8 : end // 8] = np.packbits(before[begin:end] != after[begin:end])
    return bits


def delta_of(bits: Any, new: memoryview) -> Delta:
    """Return a delta with each unit of ``new`` whose bit in ``bits`` is 1."""
    import numpy as np

    after = np.frombuffer(new, np.uint16)
    parts: list[tuple[Any, ...]] = []
    for begin, end in _chunks(len(after)):
        chunk = bits[begin // 8 : end // 8]
        if not chunk.any():
            continue
        found = np.flatnonzero(np.unpackbits(chunk))
        sizes = np.diff([*range(0, end - begin, _BUCKET), end - begin])  # the last bucket may be smaller
        count = np.bincount(found // _BUCKET, minlength=len(sizes))
        is_whole = 2 * count > sizes
        found = found[~is_whole[found // _BUCKET]]
        sparse, whole = np.flatnonzero((count > 0) & ~is_whole), np.flatnonzero(is_whole)
        units = after[begin:end]
        contents = [units[number * _BUCKET : (number + 1) * _BUCKET] for number in whole]
        first = begin // _BUCKET
        parts.append(
            (
                (first + sparse).astype(np.uint32),
                count[sparse].astype(np.uint32),
                (found % _BUCKET).astype(np.uint16),
                units[found],
                (first + whole).astype(np.uint32),
                np.concatenate([*contents, units[:0]]),
            )
        )
    types = (np.uint32, np.uint32, np.uint16, np.uint16, np.uint32, np.uint16)
    empty = tuple(np.empty(0, dtype) for dtype in types)
    return Delta(*(np.concatenate(arrays) for arrays in zip(empty, *parts, strict=True)))


def apply_delta(delta: Delta, block: bytearray) -> None:
    """Update a block in place from the old version of a delta to the new version."""
    import numpy as np

    units = np.frombuffer(block, np.uint16)
    units[np.repeat(delta.buckets.astype(np.int64) * _BUCKET, delta.counts) + delta.positions] = delta.values
    at = 0
    for number in delta.whole.tolist():
        target = units[number * _BUCKET : (number + 1) * _BUCKET]
        target[:] = delta.contents[at : at + len(target)]
        at += len(target)


def _chunks(units: int) -> Iterator[tuple[int, int]]:
    """Yield the first unit and the end of each chunk."""
    for begin in range(0, units, _CHUNK):
        yield begin, min(begin + _CHUNK, units)

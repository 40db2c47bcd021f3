"""Define the numbers and names of group operations, and the keys by which members compare calls."""

from __future__ import annotations

import zlib
from typing import Any

from flowchan.collective import array_access

NAMES = (
    "nothing", "barrier", "broadcast", "reduce", "allreduce", "reduce_scatter", "allgather", "gather",
    "scatter", "alltoall", "split", "comparing the calls", "allreduce_with",
)  # fmt: skip
"""Names of the operations; each name's index is its number in the core."""
BARRIER, BROADCAST, REDUCE, ALLREDUCE, REDUCE_SCATTER, ALLGATHER, GATHER, SCATTER, ALLTOALL = range(1, 10)
SPLIT, TELL, ALLREDUCE_WITH = 10, 11, 12

COMBINING = (NAMES[ALLREDUCE], NAMES[REDUCE])
ALONG_TREES = (NAMES[BROADCAST], NAMES[GATHER], NAMES[ALLREDUCE_WITH])
MOVING = (NAMES[BROADCAST], NAMES[ALLGATHER], NAMES[GATHER], NAMES[ALLTOALL])

TYPED, VALUES, ARRAYS, KNOWN = range(4)
"""Kinds of input: arrays of one type whose sizes all members know, Python values, arrays of any size and
type, and arrays whose sizes were exchanged. The key of a call is the kind plus four times a number that
encodes the other arguments."""


def key_of(key: int, x: Any) -> int:
    """Return a call's key; for ``TYPED`` arrays, it also depends on the element type.

    In shared memory, the core adds the element type to the key.
    """
    return key if key % 4 != TYPED else zlib.crc32(repr((key, array_access.kind(x)[0])).encode())

"""The operations of groups, and how members know whether they call the same."""

from __future__ import annotations

import zlib
from typing import Any

from flowchan.collective import array_access

NAMES = (
    "nothing", "barrier", "broadcast", "reduce", "allreduce", "reduce_scatter", "allgather", "gather",
    "scatter", "alltoall", "split", "comparing the calls", "allreduce_with",
)  # fmt: skip
"""By their numbers, as the core knows them."""
BARRIER, BROADCAST, REDUCE, ALLREDUCE, REDUCE_SCATTER, ALLGATHER, GATHER, SCATTER, ALLTOALL = range(1, 10)
SPLIT, TELL, ALLREDUCE_WITH = 10, 11, 12

COMBINING = (NAMES[ALLREDUCE], NAMES[REDUCE])
ALONG_TREES = (NAMES[BROADCAST], NAMES[GATHER], NAMES[ALLREDUCE_WITH])
MOVING = (NAMES[BROADCAST], NAMES[ALLGATHER], NAMES[GATHER], NAMES[ALLTOALL])

TYPED, VALUES, ARRAYS, KNOWN = range(4)
"""What an operation's members give: arrays of one type whose sizes all know, values of Python, arrays of any
size and type, what they have told each other the sizes of. A key that stands for a call is one of these, and
four times as much as what else belongs to it."""


def key_of(key: int, x: Any) -> int:
    """``key``; of arrays of one type, with that type in it. (Where memory is shared, the core does that.)"""
    return key if key % 4 != TYPED else zlib.crc32(repr((key, array_access.kind(x)[0])).encode())

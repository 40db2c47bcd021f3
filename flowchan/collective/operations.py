"""The operations of groups."""

NAMES = (
    "nothing", "barrier", "broadcast", "reduce", "allreduce", "reduce_scatter", "allgather", "gather",
    "scatter", "alltoall", "split", "comparing the calls", "combine",
)  # fmt: skip
"""By their numbers, as the core knows them."""
BARRIER, BROADCAST, REDUCE, ALLREDUCE, REDUCE_SCATTER, ALLGATHER, GATHER, SCATTER, ALLTOALL = range(1, 10)
SPLIT, TELL, COMBINE = 10, 11, 12

COMBINING = (NAMES[ALLREDUCE], NAMES[REDUCE])
ALONG_TREES = (NAMES[BROADCAST], NAMES[GATHER], NAMES[COMBINE])
MOVING = (NAMES[BROADCAST], NAMES[ALLGATHER], NAMES[GATHER], NAMES[ALLTOALL])

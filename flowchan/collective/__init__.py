"""Collectives: operations that all members of a group call together, each with a part of its own."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict

from flowchan import _core
from flowchan.collective.environment import place
from flowchan.collective.group import Group
from flowchan.collective.handles import Handle
from flowchan.collective.meeting import meet
from flowchan.errors import GroupError, MemberDied, MemberLeft, Mismatch
from flowchan.items.whole import is_whole

__all__ = ["Group", "GroupError", "Handle", "MemberDied", "MemberLeft", "Mismatch", "group", "members"]

_counts: defaultdict[tuple[str, int], itertools.count[int]] = defaultdict(itertools.count)


def group(
    *,
    rank: int | None = None,
    size: int | None = None,
    at: str | None = None,
    name: str = "",
    timeout: float = 300.0,
) -> Group:
    """This process's member of a group of all processes that one launcher has started on this host: torchrun,
    Open MPI's or MPICH's mpirun, or Slurm's srun. Without a launcher it is the only member.

    Or of ``size`` processes that agree on the text ``at``; this one is number ``rank``. All members make
    their groups in the same order. Raises ``TimeoutError`` when not all have come within ``timeout`` seconds.
    """
    if at is None and rank is None and size is None:
        mine, many, job = place()
    elif at is None or rank is None or size is None:
        raise ValueError("group takes rank=, size= and at= together, or none of them")
    elif not 0 <= rank < _whole(size):
        raise ValueError(f"rank must be from 0 to {size - 1}, not {rank!r}")
    else:
        mine, many, job = rank, size, f"at {at}"
    number = next(_counts[job, mine])
    return meet(f"{job}\n{number}", mine, many, timeout, name)


def members(size: int, *, name: str = "") -> list[Group]:
    """All members of a new group, to be given to the threads or processes that use them: each to one, before
    its first use. A member counts as joined when it arrives in another process, enters ``with``, or calls
    its first operation."""
    made = _core.Group._make(_whole(size))
    try:
        return [Group(os.dup(made), rank, name) for rank in range(size)]
    finally:
        os.close(made)


def _whole(size: int) -> int:
    if not is_whole(size) or not 1 <= size <= 1024:
        raise ValueError(f"size must be a whole number of members from 1 to 1024, not {size!r}")
    return size

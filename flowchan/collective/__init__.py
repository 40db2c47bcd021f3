"""Collectives: operations that all members of a group call together, each with a part of its own."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict

from flowchan.collective.call_arguments import seconds_argument
from flowchan.collective.environment import Launched, place
from flowchan.collective.exchange import ConnectionStats
from flowchan.collective.group import Group
from flowchan.collective.handles import Handle
from flowchan.collective.one_host import make_all
from flowchan.collective.rendezvous.address import meet_at
from flowchan.collective.rendezvous.host import meet
from flowchan.collective.rendezvous.membership import Membership
from flowchan.errors import GroupError
from flowchan.items.arguments import refuses_misspelt, secret_bytes, text, whole

__all__ = [
    "ConnectionStats",
    "Group",
    "Handle",
    "group",
    "members",
]

Group._seat = Membership

MOST = 1024
"""Members of a group."""

_counts: defaultdict[tuple[str, int], itertools.count[int]] = defaultdict(itertools.count)


@refuses_misspelt("group")
def group(
    *,
    rank: int | None = None,
    size: int | None = None,
    at: str | None = None,
    secret: bytes | None = None,
    name: str = "",
    timeout: float = 300.0,
) -> Group:
    """This process's member of a group of all processes that one launcher has started: torchrun, Open MPI's
    or MPICH's mpirun, or Slurm's srun. Without a launcher it is the only member.

    Or of ``size`` processes that agree on ``at``; this one is number ``rank``. With ``secret``, at least 16
    bytes that all of them know, they may be on several hosts, and ``at`` is where rank 0 listens, as
    ``"10.0.0.1:4711"``. Without it they are on one host, and ``at`` is any text. All members make their
    groups in the same order. Raises ``TimeoutError`` when not all have come within ``timeout`` seconds, or
    rank 0 can't be reached in that time; ``OSError`` at rank 0 when it can't listen there.
    """
    seconds_argument("group", "timeout", timeout)
    if at is None and rank is None and size is None and secret is None:
        return _launched(place(), name, timeout)
    if at is None or rank is None or size is None:
        raise ValueError("group takes rank=, size= and at= together, or none of them")
    whole("group", "size", size, 1, MOST)
    whole("group", "rank", rank, 0, size - 1)
    text("group", "at", at)
    if secret is not None:
        return meet_at(at, secret_bytes("group", secret), rank, size, timeout, name)
    return meet(f"at {at}\n{_number(at, rank)}", rank, size, timeout, name)


def _launched(mine: Launched, name: str, timeout: float) -> Group:
    number = _number(mine.job, mine.rank)
    if mine.here == mine.size:
        return meet(f"{mine.job}\n{number}", mine.rank, mine.size, timeout, name)
    at, secret = os.environ.get("FLOWCHAN_AT"), os.environ.get("FLOWCHAN_SECRET")
    if at and secret:
        return meet_at(
            at, secret_bytes("FLOWCHAN_SECRET", secret.encode()), mine.rank, mine.size, timeout, name
        )
    if mine.launcher == "torchrun":
        from flowchan.collective.rendezvous.store import meet_by_torchrun

        return meet_by_torchrun(number, timeout, name)
    raise GroupError(
        f"{mine.launcher} has started {mine.size} members, {mine.here} of them on this host. To become one "
        "group they need an address of rank 0's host with a free port in FLOWCHAN_AT, as 10.0.0.1:4711, and "
        "the same secret of 16 letters or more in FLOWCHAN_SECRET"
    )


def _number(job: str, rank: int) -> int:
    """Of the groups of one job that this process has made."""
    return next(_counts[job, rank])


@refuses_misspelt("members")
def members(size: int, *, name: str = "") -> list[Group]:
    """All members of a new group, to be given to the threads or processes that use them: each to one, before
    its first use. A member counts as joined when it arrives in another process, enters ``with``, or calls
    its first operation."""
    return make_all(whole("members", "size", size, 1, MOST), name)

"""Provide collective operations, which all members of a group call together."""

from __future__ import annotations

import hmac
import itertools
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from flowchan.collective.call_arguments import seconds_argument
from flowchan.collective.environment import Launched, place, slurm_step
from flowchan.collective.exchange import ConnectionStats
from flowchan.collective.group import Group
from flowchan.collective.group_transport import GroupTransport, register_transport
from flowchan.collective.handles import Handle
from flowchan.collective.one_host import make_all
from flowchan.collective.rendezvous.address import meet_at
from flowchan.collective.rendezvous.folder import meet_in
from flowchan.collective.rendezvous.host import meet
from flowchan.collective.rendezvous.membership import Membership
from flowchan.errors import GroupError
from flowchan.items.arguments import refuses_misspelt, secret_bytes, text, whole
from flowchan.native import need_native

__all__ = [
    "ConnectionStats",
    "Group",
    "GroupTransport",
    "Handle",
    "group",
    "members",
    "register_transport",
]

Group._membership = Membership

MOST = 1024
"""Maximum number of members of a group."""

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
    publish: Callable[[str], object] | None = None,
) -> Group:
    """Join a group, and return this process's member of it.

    If ``rank``, ``size`` and ``at`` are omitted, all processes that one launcher started form the group. The
    launcher is torchrun, mpirun (Open MPI or MPICH), or Slurm's srun. A process without a launcher is the
    only member.

    If a program creates several groups, all members must create them in the same order.

    Args:
        rank: Rank of this member, counting from 0. If all members pass only ``size`` and ``at``, ranks follow
            the order of arrival: the first member to listen is rank 0.
        size: Number of members, at most 1024.
        at: With ``secret``, the address where rank 0 listens, such as ``"10.0.0.1:4711"``. Otherwise, any
            string that is the same on all members, which must then be on one host. If the port is 0, rank 0
            picks a free port and passes its address to ``publish``.
        secret: At least 16 bytes that all members share. Required for members on several hosts.
        name: Name of the group, for messages.
        timeout: Seconds to wait for the other members (default 300).
        publish: Function that rank 0 calls with its address once it listens. The function must pass the
            address to the other members.

    Returns:
        This member. Use it as a context manager, or close it.

    Raises:
        TypeError: An argument has the wrong type, or its name is unknown.
        ValueError: An argument is out of range, or only one of ``size`` and ``at`` is given. This
            error is also raised if ``at`` contains port 0 and this member cannot publish or learn the port.
        TimeoutError: Some members did not arrive in time, or rank 0 is unreachable.
        OSError: Rank 0 cannot listen on ``at``.
        GroupError: The launcher's variables are wrong, two members have the same rank, or ``FLOWCHAN_AT`` or
            ``FLOWCHAN_SECRET`` is missing for members on several hosts. Under Slurm, ``FLOWCHAN_FOLDER``
            (default ``~/.flowchan``), a folder that all hosts share, replaces these two variables.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from flowchan.collective import group
        >>> def work(rank):
        ...     with group(rank=rank, size=2, at="example") as g:  # in several processes as well
        ...         return g.allreduce(g.rank + 1)
        >>> with ThreadPoolExecutor(2) as threads:
        ...     list(threads.map(work, range(2)))
        [3, 3]
    """
    seconds_argument("group", "timeout", timeout)
    if publish is not None and (at is None or secret is None):
        raise ValueError("group: publish needs at= and secret=, because it publishes an address")
    need_native("group: a group is not available")
    if at is None and rank is None and size is None and secret is None:
        return _launched(place(), name, timeout)
    if at is None or size is None:
        raise ValueError("group: size and at must be passed together, with or without rank, or not at all")
    whole("group", "size", size, 1, MOST)
    if rank is not None:
        whole("group", "rank", rank, 0, size - 1)
    text("group", "at", at)
    if secret is not None:
        return meet_at(at, secret_bytes("group", secret), rank, size, timeout, name, publish=publish)
    job = f"at {at}\n{'by arrival' if rank is None else _number(at, rank)}"
    return meet(job, rank, size, timeout, name)


def _launched(launched: Launched, name: str, timeout: float) -> Group:
    number = _number(launched.job, launched.rank)
    if launched.local_size == launched.size:
        return meet(f"{launched.job}\n{number}", launched.rank, launched.size, timeout, name)
    at, secret = os.environ.get("FLOWCHAN_AT"), os.environ.get("FLOWCHAN_SECRET")
    if at and secret:
        key = secret_bytes("FLOWCHAN_SECRET", secret.encode())
        # Jobs may share a secret, but members of two jobs must not join the same group. Therefore, derive a
        # separate secret for each job.
        if launched.launcher == "Slurm":
            key = hmac.digest(key, launched.job.encode(), "sha256")
        return meet_at(at, key, launched.rank, launched.size, timeout, name)
    if launched.launcher == "torchrun":
        from flowchan.collective.rendezvous.store import meet_by_torchrun

        return meet_by_torchrun(number, timeout, name)
    if launched.launcher == "Slurm" and (step := slurm_step()) is not None:
        folder = Path(os.environ.get("FLOWCHAN_FOLDER") or Path.home() / ".flowchan")
        return meet_in(
            folder, f"{step.name}.{number}", step.address, launched.rank, launched.size, timeout, name
        )
    raise GroupError(
        f"group: the {launched.size} members that {launched.launcher} started are on several hosts "
        f"({launched.local_size} on this one). Set FLOWCHAN_AT to a free port of rank 0's host, such as "
        "10.0.0.1:4711, and FLOWCHAN_SECRET to a shared secret of at least 16 characters"
    )


def _number(job: str, rank: int) -> int:
    """Count the groups that this process has created so far in this job."""
    return next(_counts[job, rank])


@refuses_misspelt("members")
def members(size: int, *, name: str = "") -> list[Group]:
    """Create all members of a new group for threads or processes.

    Pass each member to the thread or process that will use it. A member joins the group when it arrives in
    another process, enters its ``with`` block, or begins its first operation.

    Args:
        size: Number of members, at most 1024.
        name: Name of the group, for messages.

    Returns:
        The members in rank order.

    Raises:
        TypeError: ``size`` is not an int.
        ValueError: ``size`` is less than 1 or more than 1024.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from flowchan.collective import members
        >>> with ThreadPoolExecutor(2) as threads:
        ...     list(threads.map(lambda g: g.allreduce(g.rank + 1), members(2)))
        [3, 3]
    """
    return make_all(whole("members", "size", size, 1, MOST), name)

"""Implement a barrier that names the ranks that do not arrive.

Rank 0 waits for a message from each other rank, in rank order. Then rank 0 answers all ranks, either with an
empty text or with the text of an error that all of them raise. The tag of these messages contains the
barrier's number, so they are never confused with messages of the program or of an earlier barrier.
"""

from __future__ import annotations

import contextlib
import time

import torch.distributed as dist

from flowchan.collective.group import Group
from flowchan.collective.torch.receives import Receives
from flowchan.errors import GroupError


class MonitoredBarrier:
    """One rank's side of ``torch.distributed.monitored_barrier``.

    Args:
        member: This rank's member of the group.
        receives: Receives of this member.
        number: Number of this barrier, equal on all ranks.
        limit: Time limit in seconds.
    """

    def __init__(self, member: Group, receives: Receives, number: int, limit: float) -> None:
        self._member, self._receives, self._limit = member, receives, limit
        self._tag = "monitored barrier", number
        self._give_up = time.monotonic() + limit

    def wait(self, wait_all_ranks: bool) -> None:
        """Wait for all ranks, or raise ``DistBackendError`` on all ranks that arrive."""
        if self._member.rank == 0:
            self._lead(wait_all_ranks)
        else:
            self._follow()

    def _lead(self, wait_all_ranks: bool) -> None:
        limit = f"{self._limit * 1000:.0f} ms"
        if self._limit <= 0:
            raise dist.DistBackendError(f"Rank 0 timed out in monitoredBarrier after {limit}.")
        absent: list[int] = []
        for rank in range(1, self._member.size):
            try:
                self._receives.next(rank, self._tag, self._remaining())
            except (GroupError, TimeoutError):
                absent.append(rank)
                if not wait_all_ranks:
                    break
        ranks = f"Rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        answer = f"{ranks} failed to pass monitoredBarrier in {limit}" if absent else ""
        for rank in range(1, self._member.size):
            with contextlib.suppress(GroupError):  # that rank may be gone
                self._member.send((self._tag, answer), rank)
        if answer:
            raise dist.DistBackendError(f"[Rank 0]: {answer}")

    def _follow(self) -> None:
        try:
            self._member.send((self._tag, ""), 0, timeout=self._limit)
            _, answer = self._receives.next(0, self._tag, self._remaining())
        except (GroupError, TimeoutError) as error:
            raise dist.DistBackendError(self._failure(str(error))) from error
        if answer:
            raise dist.DistBackendError(self._failure(answer))

    def _failure(self, reason: str) -> str:
        return (
            f"Rank {self._member.rank} successfully reached monitoredBarrier, but received errors while "
            f"waiting for send/recv from rank 0: {reason}"
        )

    def _remaining(self) -> float:
        return max(0.0, self._give_up - time.monotonic())

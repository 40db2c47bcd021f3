"""A barrier that names the ranks that do not arrive.

Rank 0 waits for a message from each other rank, in rank order, and then sends its verdict to all of them: an
empty text, or the error that all ranks raise. Messages have a tag of their own for each barrier, so they meet
neither the messages of the program nor those of a barrier that failed.
"""

from __future__ import annotations

import contextlib
import time

import torch.distributed as dist

from flowchan.collective.group import Group
from flowchan.collective.torch.receives import Receives
from flowchan.errors import GroupError


class Roll:
    """One call of the roll by rank 0, as ``torch.distributed.monitored_barrier``.

    Args:
        member: This rank's member of the group.
        receives: The receives of the member.
        number: Number of this barrier, equal on all ranks.
        limit: Time limit in seconds.
    """

    def __init__(self, member: Group, receives: Receives, number: int, limit: float) -> None:
        self._member, self._receives, self._limit = member, receives, limit
        self._tag = "monitored barrier", number
        self._give_up = time.monotonic() + limit

    def call(self, wait_all_ranks: bool) -> None:
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
        verdict = f"{ranks} failed to pass monitoredBarrier in {limit}" if absent else ""
        for rank in range(1, self._member.size):
            with contextlib.suppress(GroupError):  # that rank is gone
                self._member.send((self._tag, verdict), rank)
        if verdict:
            raise dist.DistBackendError(f"[Rank 0]: {verdict}")

    def _follow(self) -> None:
        try:
            self._member.send((self._tag, ""), 0, timeout=self._limit)
            _, verdict = self._receives.next(0, self._tag, self._remaining())
        except (GroupError, TimeoutError) as error:
            raise dist.DistBackendError(self._failure(str(error))) from error
        if verdict:
            raise dist.DistBackendError(self._failure(verdict))

    def _failure(self, reason: str) -> str:
        return (
            f"Rank {self._member.rank} successfully reached monitoredBarrier, but received errors while "
            f"waiting for send/recv from rank 0: {reason}"
        )

    def _remaining(self) -> float:
        return max(0.0, self._give_up - time.monotonic())

"""Find the worker that broke a channel of the run, if the supervisor did not break it (R3).

A worker that aborts one of its channels reports that first. But threads report at once and processes by mail,
so the end of a worker that met the break may arrive before that report. A break by the program, or in a
thread of the user, is not reported at all. So a break counts once all reports have arrived. The first
reporter is to blame, because all others met its consequences. A worker that meets a break breaks its other
channels. Without a report the break began in a channel that no worker broke in this way.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from flowchan.run.policy.events import Aborted, Ended, Failure, Met, WorkerId
from flowchan.run.policy.plan import Plan

POLL_INTERVAL_S = 0.5
"""Seconds between two checks of all channels for breaks that end no worker."""

REPORT_TIMEOUT_S = 1.0
"""Seconds after which a break counts although unread reports of workers remain."""


class Breaks:
    """The broken channels that workers report or that the supervisor finds, until it breaks all of them."""

    def __init__(
        self,
        plan: Plan,
        broken: Callable[[WorkerId | None], list[str]],
        cause_of: Callable[[str], BaseException],
    ) -> None:
        self._plan = plan
        self._broken = broken  # returns the names of broken channels: those of one worker, or all
        self._cause_of = cause_of
        self._aborts: list[Aborted] = []
        self._found: list[str] = []
        self._passed_on: set[str] = set()
        self._ends: list[Ended] = []
        self._next_check = 0.0
        self._over = False
        self._since = math.inf

    def is_due(self, all_reported: Callable[[], bool]) -> bool:
        """Tell whether a break must be decided now: all reports have arrived, or their time is over."""
        if not self.pending:
            self._since = math.inf
            return False
        self._since = min(self._since, time.monotonic())
        return self._over or all_reported() or time.monotonic() - self._since > REPORT_TIMEOUT_S

    def record(self, aborted: Aborted) -> None:
        """Note that a worker is about to break one of its channels.

        After the supervisor's own break that means nothing.
        """
        if not self._over:
            self._aborts.append(aborted)

    def record_met(self, met: Met) -> None:
        """Note that a worker has met a break, and breaks its other channels."""
        if not self._over:
            self._found += met.channels
            self._passed_on |= {*self._plan.worker(met.worker).channels()} - {*met.channels}

    @property
    def pending(self) -> bool:
        """Whether a break or the end of a worker is undecided."""
        return bool(self._aborts or self._found or self._ends)

    def has_reported(self, worker: WorkerId) -> bool:
        """Tell whether a worker has reported that it breaks a channel."""
        return any(aborted.worker == worker for aborted in self._aborts)

    def keeps(self, ended: Ended) -> bool:
        """Keep the end of a worker if one of its channels is broken. It counts once the cause is known."""
        broken = [] if self._over else self._broken(ended.worker)
        self._found += broken
        self._ends += [ended] if broken else []
        return bool(broken)

    def ended(self) -> set[WorkerId]:
        """List the workers whose ends are kept."""
        return {ended.worker for ended in self._ends}

    def check(self) -> None:
        """Check all channels from time to time, because the worker that broke one may run on for long."""
        now = time.monotonic()
        if now >= self._next_check and not self._over:
            self._next_check = now + POLL_INTERVAL_S
            self._found += self._broken(None)

    def end(self) -> None:
        """Note that the supervisor breaks every channel now."""
        self._over = True
        self._found.clear()

    def failure(self) -> Failure | None:
        """Return the failure that came first, or None if the supervisor was earlier."""
        first, found = min(self._aborts, key=lambda one: one.at, default=None), self._found
        self._aborts, self._found = [], []
        if first is not None:
            error = first.error or self._cause_of(first.channel)
            return Failure(first.worker, error, None, first.pid, first.channel, first.host)
        if found:
            name = next((name for name in found if name not in self._passed_on), found[0])
            writer = next(edge.writer for edge in self._plan.edges if edge.name == name)
            return Failure(WorkerId(writer, 0), self._cause_of(name), None, os.getpid(), name)
        return None

    def ends(self) -> list[Ended]:
        """Return and remove the ends that were kept."""
        kept, self._ends = self._ends, []
        return kept

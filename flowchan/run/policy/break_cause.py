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
        self._told: list[Aborted] = []
        self._found: list[str] = []
        self._passed_on: set[str] = set()
        self._ends: list[Ended] = []
        self._next_look = 0.0
        self._over = False
        self._since = math.inf

    def is_due(self, all_is_heard: Callable[[], bool]) -> bool:
        """Tell whether a break must be decided now: all reports have arrived, or their time is over."""
        if not self.pending:
            self._since = math.inf
            return False
        self._since = min(self._since, time.monotonic())
        return self._over or all_is_heard() or time.monotonic() - self._since > REPORT_TIMEOUT_S

    def hear(self, aborted: Aborted) -> None:
        """Note that a worker is about to break one of its channels.

        After the supervisor's own break that means nothing.
        """
        if not self._over:
            self._told.append(aborted)

    def hear_met(self, met: Met) -> None:
        """Note that a worker has met a break, and breaks its other channels."""
        if not self._over:
            self._found += met.channels
            self._passed_on |= {*self._plan.worker(met.worker).channels()} - {*met.channels}

    @property
    def pending(self) -> bool:
        """Whether a break or the end of a worker is undecided."""
        return bool(self._told or self._found or self._ends)

    def told_by(self, worker: WorkerId) -> bool:
        """Tell whether a worker has reported that it breaks a channel."""
        return any(aborted.worker == worker for aborted in self._told)

    def keeps(self, ended: Ended) -> bool:
        """Keep the end of a worker if one of its channels is broken. It counts once the cause is known."""
        broken = [] if self._over else self._broken(ended.worker)
        self._found += broken
        self._ends += [ended] if broken else []
        return bool(broken)

    def ended(self) -> set[WorkerId]:
        """List the workers whose ends are kept."""
        return {ended.worker for ended in self._ends}

    def look(self) -> None:
        """Check all channels from time to time, because the worker that broke one may run on for long."""
        now = time.monotonic()
        if now >= self._next_look and not self._over:
            self._next_look = now + POLL_INTERVAL_S
            self._found += self._broken(None)

    def end(self) -> None:
        """Note that the supervisor breaks every channel now."""
        self._over = True
        self._found.clear()

    def failure(self) -> Failure | None:
        """Return the failure that came first, or None if the supervisor was earlier."""
        told, found = min(self._told, key=lambda one: one.at, default=None), self._found
        self._told, self._found = [], []
        if told is not None:
            error = told.error or self._cause_of(told.channel)
            return Failure(told.worker, error, None, told.pid, told.channel, told.host)
        if found:
            name = next((name for name in found if name not in self._passed_on), found[0])
            writer = next(edge.writer for edge in self._plan.edges if edge.name == name)
            return Failure(WorkerId(writer, 0), self._cause_of(name), None, os.getpid(), name)
        return None

    def ends(self) -> list[Ended]:
        """Return and remove the ends that were kept."""
        kept, self._ends = self._ends, []
        return kept

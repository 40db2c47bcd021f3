"""Find the worker that broke a channel of the run, unless the supervisor broke it (R3).

A worker that is about to abort a channel reports this first. Threads report directly, but processes report
through a channel. If another worker finds the channel broken and ends, its report may therefore arrive before
the first worker's report. The program and the user's own threads may also break a channel, without any
report.

For this reason, the cause of a break is decided only after all reports have arrived. The first worker that
reported an abort is to blame, because the other workers only saw the consequences. A worker that finds one of
its channels broken breaks its other channels as well. If no worker has reported an abort, the cause lies in a
channel that no worker broke for this reason.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from flowchan.run.policy.events import Aborted, Ended, Failure, Met, WorkerId
from flowchan.run.policy.plan import Plan

POLL_INTERVAL_S = 0.5
"""Seconds between checks for broken channels that no worker has noticed."""

REPORT_TIMEOUT_S = 1.0
"""Time limit for outstanding reports in seconds. After this time, the cause is decided without them."""


class Breaks:
    """Collects the broken channels that workers have reported or the supervisor has found.

    Once the supervisor itself has broken all channels, later breaks are ignored.
    """

    def __init__(
        self,
        plan: Plan,
        broken: Callable[[WorkerId | None], list[str]],
        cause_of: Callable[[str], BaseException],
    ) -> None:
        self._plan = plan
        # Returns the names of a worker's broken channels, or of all broken channels for None.
        self._broken = broken
        self._cause_of = cause_of
        self._aborts: list[Aborted] = []
        self._found: list[str] = []
        self._passed_on: set[str] = set()
        self._ends: list[Ended] = []
        self._next_check = 0.0
        self._over = False
        self._since = math.inf

    def is_due(self, all_reported: Callable[[], bool]) -> bool:
        """Return whether to decide now: all reports have arrived, or the time limit has passed."""
        if not self.pending:
            self._since = math.inf
            return False
        self._since = min(self._since, time.monotonic())
        return self._over or all_reported() or time.monotonic() - self._since > REPORT_TIMEOUT_S

    def record(self, aborted: Aborted) -> None:
        """Record that a worker is about to break one of its channels.

        Ignore the report if the supervisor has already broken all channels.
        """
        if not self._over:
            self._aborts.append(aborted)

    def record_met(self, met: Met) -> None:
        """Record that a worker has found channels broken and is about to break its other channels."""
        if not self._over:
            self._found += met.channels
            self._passed_on |= {*self._plan.worker(met.worker).channels()} - {*met.channels}

    @property
    def pending(self) -> bool:
        """Return whether the cause of a broken channel or of a worker's end is still undecided."""
        return bool(self._aborts or self._found or self._ends)

    def has_reported(self, worker: WorkerId) -> bool:
        """Return whether a worker has reported that it aborts a channel."""
        return any(aborted.worker == worker for aborted in self._aborts)

    def keeps(self, ended: Ended) -> bool:
        """Hold back the ``Ended`` event of a worker with a broken channel until the cause is known."""
        broken = [] if self._over else self._broken(ended.worker)
        self._found += broken
        self._ends += [ended] if broken else []
        return bool(broken)

    def ended(self) -> set[WorkerId]:
        """Return the workers whose ``Ended`` events are held back."""
        return {ended.worker for ended in self._ends}

    def check(self) -> None:
        """Check all channels from time to time, because a worker that broke one may still be running."""
        now = time.monotonic()
        if now >= self._next_check and not self._over:
            self._next_check = now + POLL_INTERVAL_S
            self._found += self._broken(None)

    def end(self) -> None:
        """Record that the supervisor itself is about to break every channel."""
        self._over = True
        self._found.clear()

    def failure(self) -> Failure | None:
        """Return the first failure, or None if the supervisor itself broke the channels."""
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
        """Remove and return the ``Ended`` events that were held back."""
        kept, self._ends = self._ends, []
        return kept

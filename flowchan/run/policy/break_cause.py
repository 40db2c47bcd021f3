"""Find the worker that broke a channel of the run, unless the supervisor broke it (R3).

A worker that is about to abort a channel reports this first. But threads report directly, while processes
report through a channel. If another worker finds the channel broken and ends, the supervisor may learn of
this end before the first worker's report. The program and the user's own threads may also break a channel,
without any report.

The cause of a break is therefore decided only once all reports have arrived. The first worker to report is to
blame, because the others only saw the consequences. A worker that finds one of its channels broken also
breaks its other channels. If no worker reported an abort, the break began in a channel that no worker broke
for this reason.
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
"""Seconds after which a break is decided even if some reports have not been read."""


class Breaks:
    """Broken channels of a run that workers reported or the supervisor found.

    Once the supervisor itself has broken all channels, nothing is recorded any more.
    """

    def __init__(
        self,
        plan: Plan,
        broken: Callable[[WorkerId | None], list[str]],
        cause_of: Callable[[str], BaseException],
    ) -> None:
        self._plan = plan
        # returns the names of a worker's broken channels, or of all broken channels for None
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
        """Return whether to decide now, because all reports have arrived or the time limit has passed."""
        if not self.pending:
            self._since = math.inf
            return False
        self._since = min(self._since, time.monotonic())
        return self._over or all_reported() or time.monotonic() - self._since > REPORT_TIMEOUT_S

    def record(self, aborted: Aborted) -> None:
        """Record that a worker is about to break one of its channels.

        Ignore reports that arrive after the supervisor has broken all channels.
        """
        if not self._over:
            self._aborts.append(aborted)

    def record_met(self, met: Met) -> None:
        """Record that a worker has found a channel broken and is breaking its others."""
        if not self._over:
            self._found += met.channels
            self._passed_on |= {*self._plan.worker(met.worker).channels()} - {*met.channels}

    @property
    def pending(self) -> bool:
        """Return whether a broken channel or a worker's end is still undecided."""
        return bool(self._aborts or self._found or self._ends)

    def has_reported(self, worker: WorkerId) -> bool:
        """Return whether a worker has reported that it breaks a channel."""
        return any(aborted.worker == worker for aborted in self._aborts)

    def keeps(self, ended: Ended) -> bool:
        """Hold back a worker's ``Ended`` event until the cause is known, if one of its channels is broken."""
        broken = [] if self._over else self._broken(ended.worker)
        self._found += broken
        self._ends += [ended] if broken else []
        return bool(broken)

    def ended(self) -> set[WorkerId]:
        """Return the workers whose ``Ended`` events are held back."""
        return {ended.worker for ended in self._ends}

    def check(self) -> None:
        """Check all channels at intervals, because the worker that broke one may still be running."""
        now = time.monotonic()
        if now >= self._next_check and not self._over:
            self._next_check = now + POLL_INTERVAL_S
            self._found += self._broken(None)

    def end(self) -> None:
        """Record that the supervisor is now breaking every channel."""
        self._over = True
        self._found.clear()

    def failure(self) -> Failure | None:
        """Return the first failure; None if the supervisor itself broke the channels."""
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

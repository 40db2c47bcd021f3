"""Who broke a channel of the run, if it was not the supervisor (R3).

A worker that aborts one of its channels says so before it does. But words come two ways, from threads at once
and from processes by mail, so the end of a worker that met the break may be heard first; and a break by the
program, or in a thread of the user's own, is told by nobody. So a break that is found counts once everything
has been heard, and the first who told of one is to blame: all others met its consequences. Who meets a break
passes it on to its other channels; where nobody told, the break began in a channel to which nobody passed it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from flowchan.run.policy.events import Aborted, Ended, Failure, Met, WorkerId
from flowchan.run.policy.plan import Plan

POLL_INTERVAL_S = 0.5
"""Seconds between two looks at all channels, for breaks that end no worker."""

REPORT_TIMEOUT_S = 1.0
"""Seconds after which a break counts although workers tell so much that not all of it has been heard."""


class Breaks:
    """What the supervisor has heard and seen of broken channels, until it breaks them all itself."""

    def __init__(
        self,
        plan: Plan,
        broken: Callable[[WorkerId | None], list[str]],
        cause_of: Callable[[str], BaseException],
    ) -> None:
        self._plan = plan
        self._broken = broken  # channels, by name: those of one worker, or all
        self._cause_of = cause_of
        self._told: list[Aborted] = []
        self._found: list[str] = []
        self._passed_on: set[str] = set()
        self._ends: list[Ended] = []
        self._next_look = 0.0
        self._over = False
        self._since = math.inf

    def is_due(self, all_is_heard: Callable[[], bool]) -> bool:
        """Whether something is to be decided, and all that can still be heard of it has been heard."""
        if not self.pending:
            self._since = math.inf
            return False
        self._since = min(self._since, time.monotonic())
        return self._over or all_is_heard() or time.monotonic() - self._since > REPORT_TIMEOUT_S

    def hear(self, aborted: Aborted) -> None:
        """A worker is about to break one of its channels. One that only passes on our own break says nothing
        new."""
        if not self._over:
            self._told.append(aborted)

    def hear_met(self, met: Met) -> None:
        """A worker has met a break, and passes it on."""
        if not self._over:
            self._found += met.channels
            self._passed_on |= {*self._plan.worker(met.worker).channels()} - {*met.channels}

    @property
    def pending(self) -> bool:
        """Whether there is something to be decided."""
        return bool(self._told or self._found or self._ends)

    def told_by(self, worker: WorkerId) -> bool:
        return any(aborted.worker == worker for aborted in self._told)

    def keeps(self, ended: Ended) -> bool:
        """Whether a channel of this worker was broken; its end then counts once it is clear by whom."""
        broken = [] if self._over else self._broken(ended.worker)
        self._found += broken
        self._ends += [ended] if broken else []
        return bool(broken)

    def ended(self) -> set[WorkerId]:
        """Those whose ends are kept."""
        return {ended.worker for ended in self._ends}

    def look(self) -> None:
        """From time to time at all channels: whoever broke one may go on for long."""
        now = time.monotonic()
        if now >= self._next_look and not self._over:
            self._next_look = now + POLL_INTERVAL_S
            self._found += self._broken(None)

    def end(self) -> None:
        """From now on every channel is broken by the supervisor."""
        self._over = True
        self._found.clear()

    def failure(self) -> Failure | None:
        """The one that came first, once everything has been heard; ``None`` if the supervisor was earlier."""
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
        """The ends that were kept."""
        kept, self._ends = self._ends, []
        return kept

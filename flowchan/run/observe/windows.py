"""Compute the rates and shares in a time window from snapshots of earlier statistics.

Algorithm. The counters in :class:`RunStats` only grow, so the difference between two snapshots covers the
time between them. The supervisor's thread takes a snapshot about every half second, when it is awake anyway.
Snapshots become rarer if they would cost more than a thousandth of a core. Old snapshots are thinned out, but
every window still has one near its beginning.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable

from flowchan.declare.operators import OPERATORS
from flowchan.run.observe.causes import cause_of
from flowchan.run.observe.cgroups import local_cores
from flowchan.run.policy.stats import EdgeStats, RunStats, StageStats

EVERY_S = 0.5
"""Minimum number of seconds between two snapshots of a run."""
COST = 1000
"""The time between two snapshots is at least this multiple of the time that one takes."""
FINENESS = 8
"""A snapshot is dropped if the time between its neighbours is at most their age divided by this number."""


def has_gil() -> bool:
    """Return whether the threads of this process share one global interpreter lock."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def between(earlier: RunStats | None, later: RunStats) -> RunStats:
    """Return ``later`` with rates, shares and cause for the time since ``earlier`` or the run's start."""
    window = max(later.elapsed - (0.0 if earlier is None else earlier.elapsed), 1e-9)
    stages_before = {} if earlier is None else {stage.name: stage for stage in earlier.stages}
    edges_before = {} if earlier is None else {edge.name: edge for edge in earlier.edges}
    stages = tuple(_stage(stages_before.get(stage.name), stage, window) for stage in later.stages)
    edges = tuple(_edge(edges_before.get(edge.name), edge, window) for edge in later.edges)
    now = dataclasses.replace(later, stages=stages, edges=edges, window=window)
    cause = cause_of(now, local_cores(), has_gil())
    bottleneck = cause.stage if cause is not None and cause.kind in ("bottleneck", "consumer") else None
    return dataclasses.replace(now, cause=cause, bottleneck=bottleneck)


def _stage(before: StageStats | None, now: StageStats, window: float) -> StageStats:
    worked = now.seconds if before is None else now.seconds.since(before.seconds)
    total = max(worked.working, 1e-9)
    takes_in = not OPERATORS[now.kind].begins
    items = now.items_in if takes_in else now.items_out
    if before is not None:
        items -= before.items_in if takes_in else before.items_out
    return dataclasses.replace(
        now,
        rate=max(0, items) / window,
        busy=min(1.0, worked.work / total),
        waiting_input=min(1.0, worked.input / total),
        waiting_output=min(1.0, (worked.place + worked.turn) / total),
        waiting_turn=min(1.0, worked.turn / total),
        cores=None if worked.cpu is None else worked.cpu / window,
        worked=worked,
    )


def _edge(before: EdgeStats | None, now: EdgeStats, window: float) -> EdgeStats:
    return dataclasses.replace(now, rate=max(0, now.passed - (before.passed if before else 0)) / window)


class History:
    """Keeps past statistics of a run, from which windows are computed."""

    def __init__(self) -> None:
        self._samples: list[RunStats] = []
        self._watcher: Callable[[RunStats], object] | None = None
        self._next_at = time.monotonic() + EVERY_S

    def watch(self, watcher: Callable[[RunStats], object] | None) -> None:
        """Call a function with each new snapshot, on the supervisor's thread. ``None`` stops the calls.

        The function's time counts as part of the snapshot. A slow function therefore makes snapshots rarer.
        The function must not raise an exception.
        """
        self._watcher = watcher

    def sample(self, take: Callable[[], RunStats]) -> None:
        """If a new snapshot is due, keep the statistics that ``take`` returns."""
        began = time.monotonic()
        if began < self._next_at:
            return
        newest = take()
        samples, old = [newest], self._samples[::-1]
        for sample, older in itertools.pairwise(old):
            if samples[-1].elapsed - older.elapsed > (newest.elapsed - older.elapsed) / FINENESS:
                samples.append(sample)
        samples += old[-1:]
        self._samples = samples[::-1]  # replace the list in one step, because other threads read it
        if (watcher := self._watcher) is not None:
            watcher(newest)
        now = time.monotonic()
        self._next_at = now + max(EVERY_S, COST * (now - began))

    def before(self, now: RunStats, window: float) -> RunStats | None:
        """Return the latest statistics that are at least ``window`` seconds older than ``now``.

        Return ``None`` if the run has not lasted that long.
        """
        old = [sample for sample in self._samples if now.elapsed - sample.elapsed >= window]
        return old[-1] if old else None

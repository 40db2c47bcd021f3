"""Choose the number of workers of ``workers="auto"`` stages from measurements in time windows.

The supervisor's loop calls :meth:`AutoScaler.due` and carries out its decisions. If the graph has no
automatic stage, the call only compares two numbers. Taking snapshots costs at most 1 % of a core.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from flowchan.declare.values import Stage
from flowchan.run.crew.memory import free_for_processes, resident
from flowchan.run.observe.cgroups import local_cores
from flowchan.run.observe.throughput import Model
from flowchan.run.observe.windows import between
from flowchan.run.policy.autoscale import WINDOW_S, AutoLimit, FreeMemory, Scaler, choose, pinned
from flowchan.run.policy.decisions import Decided
from flowchan.run.policy.plan import Plan
from flowchan.run.policy.scaling import Scale, ScalingDecision
from flowchan.run.policy.stats import RunStats

MOST_THREADS = 32
"""Default limit on the worker threads of a stage. It is high because threads often just wait."""
POLL_S = 0.1
"""Seconds between checks whether the workers have begun."""
COST = 100
"""The time between two snapshots is at least this multiple of the time that one takes."""


class AutoScaler:
    """Chooses the number of workers of each automatic stage in one run.

    Only the supervisor's thread calls its methods. Other threads read ``decisions``.
    """

    def __init__(self, plan: Plan) -> None:
        limits = {stage.name: _limit(stage) for stage in plan.graph.stages if stage.auto is not None}
        self._scaler = Scaler(limits)
        self._begin: RunStats | None = None  # statistics at the start of the current window
        self._ready = False
        self._chosen: set[Scale] = set()  # decisions that the supervisor has not carried out yet
        self.next_at = time.monotonic() + POLL_S if limits else math.inf

    @property
    def decisions(self) -> tuple[ScalingDecision, ...]:
        """All decisions made so far."""
        return self._scaler.decisions

    def due(self, goes_on: bool, take: Callable[[], RunStats]) -> tuple[ScalingDecision, ...]:
        """Return the changes that the supervisor should make now.

        Args:
            goes_on: False if the run is ending, so that nothing must change any more.
            take: Returns the current statistics of the run.

        Returns:
            The decisions to carry out.
        """
        began = time.monotonic()
        if began < self.next_at:
            return ()
        made = self._look(take()) if goes_on else ()
        now = time.monotonic()
        self.next_at = now + max(WINDOW_S if self._ready else POLL_S, COST * (now - began))
        if not goes_on or not self._scaler.limits:
            self.next_at = math.inf
        self._chosen = {Scale(decision.stage, decision.workers) for decision in made}
        return made

    def record(self, event: Any) -> None:
        """Stop scaling a stage automatically once the program has set its number of workers."""
        if not isinstance(event, Decided) or not isinstance(event.event, Scale):
            return
        scale, before, after = event.event, event.before.sizes, event.after.sizes
        if scale in self._chosen:
            self._chosen.discard(scale)
        elif after is not before:
            elapsed = after[scale.stage].since - event.before.began
            self._scaler = pinned(self._scaler, elapsed, before[scale.stage].workers, scale)

    def _look(self, now: RunStats) -> tuple[ScalingDecision, ...]:
        """Begin a window, do nothing until the window is long enough, or decide at its end."""
        if not self._ready:
            self._ready = self._scaler.ready(now)
            self._begin = now
            return ()
        window = between(self._begin, now)
        if not self._scaler.full(window):
            return ()
        self._begin = now
        self._scaler, made = choose(self._scaler, window, _model, self._memory(window))
        self._ready = not made
        return made

    def _memory(self, stats: RunStats) -> FreeMemory:
        limits = self._scaler.limits
        sizes = {
            stage.name: max(map(resident, stage.pids), default=0)
            for stage in stats.stages
            if stage.name in limits and limits[stage.name].own_process
        }
        return FreeMemory(free_for_processes(), sizes) if sizes else FreeMemory()


def _model(stats: RunStats) -> Model:
    """Return a model of the run that ignores the interpreter lock.

    The lock may not limit a stage on threads, because its function may release the lock. Such a stage can
    therefore get more workers, unless the lock already limits the whole run.
    """
    return Model.of(stats, gil=False)


def _limit(stage: Stage) -> AutoLimit:
    assert stage.auto is not None
    own_process, most = stage.placement.own_process, stage.auto.most
    if most is not None:
        return AutoLimit(most, id(stage.auto), own_process)
    return AutoLimit(local_cores() if own_process else MOST_THREADS, stage.name, own_process)

"""Choose the number of workers of each ``workers="auto"`` stage as a pure function of statistics.

Algorithm. After each time window, at most one of three things happens:

1. If the effect of the last change has not been checked yet, it is checked now. An increase must have raised
the rate by at least half of ``LEAST_GAIN``, and a reduction must not have lowered the rate by as much.
Otherwise the change is undone, and the same kind of change is not retried for ``BLOCKED_WINDOWS`` windows. If
the program itself limited the run in this window, an increase is kept.
2. If the model predicts that more workers would raise the rate by at least ``LEAST_GAIN``, workers are added.
Max-min filling distributes these workers: as long as the limits permit, the next worker goes to the stage
that allows the lowest rate. The number of a stage's workers at most doubles.
3. Stages whose utilisation was low in the last ``IDLE_WINDOWS`` windows lose at most half of their workers.

The first window after a change starts when the new workers have begun to work. No threads are added while the
interpreter lock limits the run, and no workers at all while all cores are in use. A process is added only if
free memory suffices for a process as large as the stage's largest.

Stages with the same limit share its workers. Once the limit is reached, workers move from faster stages to
slower ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from flowchan.run.policy.scaling import Scale, ScalingDecision
from flowchan.run.policy.stats import CauseKind, RunStats, StageStats

WINDOW_S = 1.0
"""Minimum length of a window in seconds."""
LEAST_ITEMS = 20
"""In a window shorter than ``SLOW_WINDOW_S``, each busy or changed stage must take at least this many
items."""
SLOW_WINDOW_S = 10.0
"""In a window of at least this many seconds, the busy stages need only take two items per worker."""
LONGEST_WINDOW_S = 60.0
"""Maximum length of a window in seconds."""
LEAST_GAIN = 0.05
"""Workers are added only if the predicted rate grows by at least this fraction."""
BUSY = 0.85
"""Workers are added only if at least one of the stages that gain workers has this utilisation."""
IDLE = 0.65
"""A stage may lose workers if its utilisation is below this value."""
IDLE_WINDOWS = 3
"""Number of consecutive windows with low utilisation before a stage loses workers."""
AIM = 0.75
"""Utilisation that a stage should have after losing workers."""
BLOCKED_WINDOWS = 10
"""Number of windows before an undone change may be retried."""
ENOUGH = 0.98
"""Max-min filling stops when the rate reaches this share of the highest rate that the stages allow."""
RATE_LIMITED = 0.95
"""A stage gets no more workers if its rate has reached this share of its ``rate=``."""

PROGRAM: frozenset[CauseKind] = frozenset({"input", "consumer"})
"""Causes outside the graph. If one of them limits the run, the effect of more workers cannot be measured."""


class Throughput(Protocol):
    """Model that predicts the rate of a run."""

    def rate(self, workers: Mapping[str, int]) -> float:
        """Predict the rate of the run with these numbers of workers."""


@dataclass(frozen=True, slots=True)
class AutoLimit:
    """Limit on the workers of one stage.

    Attributes:
        most: Maximum total number of workers of all stages with the same ``shared_by``.
        shared_by: Key of the limit; stages with equal keys share it.
        own_process: True if each worker is a process.
    """

    most: int
    shared_by: Hashable
    own_process: bool


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory that is available for more processes.

    Attributes:
        free: Number of bytes that new processes may use.
        resident: Size of each stage's largest process, in bytes.
    """

    free: float = math.inf
    resident: Mapping[str, int] = field(default_factory=dict)

    def processes(self, stage: str) -> float:
        """Return how many more processes of a stage fit into memory. Any number of threads fits."""
        size = self.resident.get(stage, 0)
        return math.inf if not size or math.isinf(self.free) else max(0.0, self.free) // size

    def without(self, stage: str, processes: int) -> FreeMemory:
        """Return the memory left after this number of additional processes of a stage has started."""
        return dataclasses.replace(self, free=self.free - processes * self.resident.get(stage, 0))


@dataclass(frozen=True, slots=True)
class Trial:
    """Change whose effect is still to be checked.

    Attributes:
        before: Numbers of workers of the changed stages before the change.
        rates: Rates of these stages before the change, in items per second.
        grew: True if the change added workers.
        made: Indexes of the decisions that made up the change.
    """

    before: Mapping[str, int]
    rates: Mapping[str, float]
    grew: bool
    made: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scaler:
    """State of automatic scaling in one run.

    Attributes:
        limits: Limits of the ``workers="auto"`` stages whose worker counts the program has not set.
        trial: The last change, until its effect has been checked.
        blocked: For each stage, how many more windows it must not gain (True) or lose (False) workers.
        idle: Utilisations of each stage in its latest windows, if all of them were low.
        decisions: All decisions so far.
    """

    limits: Mapping[str, AutoLimit]
    trial: Trial | None = None
    blocked: Mapping[tuple[str, bool], int] = field(default_factory=dict)
    idle: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    decisions: tuple[ScalingDecision, ...] = ()

    def ready(self, stats: RunStats) -> bool:
        """Return whether the workers of the changed stages, or initially of all stages, have begun work."""
        stages = self.limits if self.trial is None else self.trial.before
        return not any(stage.starting for stage in stats.stages if stage.name in stages)

    def full(self, stats: RunStats) -> bool:
        """Return whether a window is long enough for a decision.

        Every stage that is busy or was changed must have taken enough items for its rates to be comparable.
        """
        if not WINDOW_S <= stats.window < LONGEST_WINDOW_S:
            return stats.window >= WINDOW_S
        live = _live(self, stats).values()
        busy = [stage for stage in live if stage.busy >= BUSY]
        if stats.window >= SLOW_WINDOW_S:
            return all(stage.rate * stats.window >= 2 * stage.working for stage in busy)
        changed = () if self.trial is None else self.trial.before
        compared = [*busy, *(stage for stage in live if stage.name in changed)]
        return all(stage.rate * stats.window >= LEAST_ITEMS for stage in compared)


Chosen = tuple[Scaler, tuple[ScalingDecision, ...]]
"""The next state, and the decisions to carry out."""


def choose(
    scaler: Scaler, stats: RunStats, model: Callable[[RunStats], Throughput], memory: FreeMemory
) -> Chosen:
    """Choose the numbers of workers at the end of a window.

    Args:
        scaler: Previous state.
        stats: Statistics whose rates and shares cover the window.
        model: Returns a model of the run, from the statistics of the window.
        memory: Memory that is available for more processes.

    Returns:
        The next state, and the decisions to carry out.
    """
    stages = _live(scaler, stats)
    blocked = {key: left - 1 for key, left in scaler.blocked.items() if left > 0}
    idle = {
        name: (*scaler.idle.get(name, ()), stage.busy)[-IDLE_WINDOWS:]
        for name, stage in stages.items()
        if stage.busy < IDLE
    }
    scaler = dataclasses.replace(scaler, blocked=blocked, idle=idle)
    scaler, reverted = _checked(scaler, stats, stages)
    if reverted:
        return scaler, reverted
    grown = _grown(scaler, stats, stages, model, memory)
    changes, reason = grown or _shrunk(scaler, stages)
    return _changed(scaler, stats, stages, changes, reason)


def pinned(scaler: Scaler, elapsed: float, before: int, scale: Scale) -> Scaler:
    """Return the state after the program has changed a stage's number of workers from ``before``.

    From then on, automatic scaling does not change this stage.
    """
    if scale.stage not in scaler.limits:
        return scaler
    decision = ScalingDecision(
        elapsed, scale.stage, before, scale.workers, "run.scale() was called", "pinned"
    )
    limits = {name: limit for name, limit in scaler.limits.items() if name != scale.stage}
    return dataclasses.replace(scaler, limits=limits, decisions=(*scaler.decisions, decision))


def _live(scaler: Scaler, stats: RunStats) -> dict[str, StageStats]:
    """Return the stages whose number of workers may change now."""
    return {stage.name: stage for stage in stats.stages if stage.name in scaler.limits and stage.working}


def _changed(
    scaler: Scaler,
    stats: RunStats,
    stages: Mapping[str, StageStats],
    changes: Mapping[str, int],
    reason: Callable[[StageStats], str],
) -> Chosen:
    """Record changes as decisions whose effect the next window will show."""
    made = tuple(
        ScalingDecision(stats.elapsed, name, stages[name].workers, workers, reason(stages[name]))
        for name, workers in changes.items()
    )
    if not made:
        return scaler, ()
    first = len(scaler.decisions)
    trial = Trial(
        {name: stages[name].workers for name in changes},
        {name: stages[name].rate for name in changes},
        any(decision.workers > decision.workers_before for decision in made),
        tuple(range(first, first + len(made))),
    )
    idle = {name: busy for name, busy in scaler.idle.items() if name not in changes}
    decisions = (*scaler.decisions, *made)
    return dataclasses.replace(scaler, trial=trial, idle=idle, decisions=decisions), made


# --- checking the last change ---


def _checked(scaler: Scaler, stats: RunStats, stages: Mapping[str, StageStats]) -> Chosen:
    """Record the effect of the last change, and undo the change if its gain was too small."""
    trial = scaler.trial
    if trial is None:
        return scaler, ()
    scaler = dataclasses.replace(scaler, trial=None)
    still = [name for name in trial.before if name in stages]
    if not still:
        return _with_outcome(scaler, trial, "not checked, because the stage ended"), ()
    ratio = min(stages[name].rate / trial.rates[name] if trial.rates[name] else math.inf for name in still)
    text = f"{ratio:.2f} × the rate"
    if _paid(trial, ratio, stats, [stages[name] for name in still]):
        return _with_outcome(scaler, trial, f"kept: {text}"), ()
    scaler = _with_outcome(scaler, trial, f"reverted: {text}")
    made = tuple(
        ScalingDecision(
            stats.elapsed,
            name,
            stages[name].workers,
            trial.before[name],
            f"{stages[name].workers} workers gave {text} of {trial.before[name]}",
            "not checked",
        )
        for name in still
    )
    blocked = {(name, trial.before[name] < stages[name].workers): BLOCKED_WINDOWS for name in still}
    scaler = dataclasses.replace(
        scaler, blocked={**scaler.blocked, **blocked}, decisions=(*scaler.decisions, *made)
    )
    return scaler, made


def _paid(trial: Trial, ratio: float, stats: RunStats, changed: Iterable[StageStats]) -> bool:
    """Return whether a change has gained enough to be kept.

    A reduction is undone only if it has made a stage busy. If no stage is busy, something else lowered the
    rate.
    """
    if trial.grew:
        return ratio >= 1 + LEAST_GAIN / 2 or (stats.cause is not None and stats.cause.kind in PROGRAM)
    return ratio >= 1 - LEAST_GAIN / 2 or all(stage.busy < BUSY for stage in changed)


def _with_outcome(scaler: Scaler, trial: Trial, outcome: str) -> Scaler:
    decisions = list(scaler.decisions)
    for index in trial.made:
        decisions[index] = dataclasses.replace(decisions[index], outcome=outcome)
    return dataclasses.replace(scaler, decisions=tuple(decisions))


# --- adding workers ---

Change = tuple[Mapping[str, int], Callable[[StageStats], str]]
"""New number of workers of each changed stage, and a function that explains it."""


def _grown(
    scaler: Scaler,
    stats: RunStats,
    stages: Mapping[str, StageStats],
    model: Callable[[RunStats], Throughput],
    memory: FreeMemory,
) -> Change | None:
    cause = None if stats.cause is None else stats.cause.kind
    most = {
        name: _most(stage, memory)
        for name, stage in stages.items()
        if (name, True) not in scaler.blocked and _may_grow(stage, scaler.limits[name], cause)
    }
    if cause == "cores" or not any(stages[name].busy >= BUSY for name in most):
        return None
    predicts = model(stats)
    workers = {name: stage.workers for name, stage in stages.items()}
    wanted = _within(memory, workers, _filled(scaler, workers, most, predicts))
    changes = {name: number for name, number in wanted.items() if number != workers[name]}
    gain = predicts.rate(wanted) / max(predicts.rate(workers), 1e-9)
    if not changes or gain < 1 + LEAST_GAIN or not _eases_a_busy_stage(changes, stages):
        return None
    return (
        changes,
        lambda stage: f"busy {100 * stage.busy:.0f} % of the time; {gain:.2f} × the rate is predicted",
    )


def _may_grow(stage: StageStats, limit: AutoLimit, cause: str | None) -> bool:
    limited = stage.rate_limit is not None and stage.rate >= RATE_LIMITED * stage.rate_limit
    return not limited and (limit.own_process or cause != "gil")


def _eases_a_busy_stage(changes: Mapping[str, int], stages: Mapping[str, StageStats]) -> bool:
    more = [stage for name, stage in stages.items() if changes.get(name, 0) > stage.workers]
    return any(stage.busy >= BUSY for stage in more)


def _most(stage: StageStats, memory: FreeMemory) -> int:
    """Return the number of workers that a stage may have after one change."""
    return int(min(2 * stage.workers, stage.workers + memory.processes(stage.name)))


def _filled(
    scaler: Scaler, workers: Mapping[str, int], most: Mapping[str, int], predicts: Throughput
) -> dict[str, int]:
    """Distribute workers over the stages by max-min fair filling.

    A stage that shares its limit starts with half of its workers, so that the others can move to another
    stage.
    """
    limits = scaler.limits
    users = Counter(limits[name].shared_by for name in workers)
    shared = {name for name in most if users[limits[name].shared_by] > 1}
    filled = {name: max(1, number // 2) if name in shared else number for name, number in workers.items()}
    growing = set(most)
    while predicts.rate(filled) < ENOUGH * predicts.rate({**filled, **_unlimited(growing)}):
        slowest = min(growing, key=lambda name: predicts.rate(_unlimited(growing, name, filled)))
        if filled[slowest] < most[slowest] and _room(limits, filled, slowest) > 0:
            filled[slowest] += 1
        else:
            growing.discard(slowest)
    for name in sorted(shared):  # return the workers that no other stage needs
        missing = workers[name] - filled[name]
        filled[name] += max(0, min(missing, _room(limits, filled, name)))
    return filled


MANY = 10**6
"""A stage with this number of workers cannot limit the run."""


def _unlimited(
    growing: Iterable[str], but: str | None = None, filled: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return ``filled`` with ``MANY`` workers for each growing stage except ``but``."""
    return {**(filled or {}), **{name: MANY for name in growing if name != but}}


def _room(limits: Mapping[str, AutoLimit], workers: Mapping[str, int], stage: str) -> int:
    """Return how many more workers a stage's limit allows."""
    limit = limits[stage]
    same = [number for name, number in workers.items() if limits[name].shared_by == limit.shared_by]
    return limit.most - sum(same)


def _within(memory: FreeMemory, workers: Mapping[str, int], wanted: dict[str, int]) -> dict[str, int]:
    """Reduce the wanted numbers of workers until all new processes together fit into free memory."""
    for name, number in wanted.items():
        more = max(0, number - workers[name])
        allowed = int(min(more, memory.processes(name)))
        wanted[name] = number - more + allowed
        memory = memory.without(name, allowed)
    return wanted


# --- removing workers ---


def _shrunk(scaler: Scaler, stages: Mapping[str, StageStats]) -> Change:
    changes = {}
    for name, busy in scaler.idle.items():
        workers = stages[name].workers
        wanted = max(math.ceil(workers * max(busy) / AIM), math.ceil(workers / 2))
        if len(busy) == IDLE_WINDOWS and wanted < workers and (name, False) not in scaler.blocked:
            changes[name] = wanted
    return (
        changes,
        lambda stage: (
            f"busy at most {100 * max(scaler.idle[stage.name]):.0f} % of the time in {IDLE_WINDOWS} windows"
        ),
    )

"""Predict a run's throughput after a change, as a pure function of its statistics in a window.

Algorithm. Each resource limits the rate at which items can enter the graph:

- A stage with W workers allows W / (s · v) items per second. Per source item, the stage takes v items and
  spends s seconds on each. A stage with a rate limit r also allows at most r / v.
- The cores allow cores / Σ c · v, where c is the CPU time per item.
- The interpreter lock allows 1 / Σ c · v, summed over the stages on threads.
- A loop that admits no more items and has n busy workers allows n / Σ s · v, summed over its stages.
- If :func:`cause_of` names the program's puts, its gets or memory as the cause, their bound is the measured
  rate.

If work times vary and channels are small, workers wait for each other, and the rate falls below the smallest
bound. The predicted rate is therefore (Σ bound^-p)^(-1/p). The exponent p is chosen so that the formula
reproduces the measured rate: Σ u^p = 1 for the measured utilisations u. If some resource is always in use, p
is infinite, and the rate equals the smallest bound.

Work times include waits for a core and for the interpreter lock. If the run itself uses all cores or the
lock, a change affects these waits, so they are subtracted from the work times.

The model predicts ratios of rates well, but absolute rates less accurately.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flowchan.declare.operators import OPERATORS
from flowchan.declare.placements import PLACEMENTS
from flowchan.run.observe.causes import BUSY, ONE_CORE, loop_of, visits_of
from flowchan.run.observe.cgroups import local_cores
from flowchan.run.observe.windows import has_gil
from flowchan.run.policy.stats import CauseKind, RunStats, StageStats

CORES, LOCK, LOOP = "the cores", "the interpreter lock", "the items in flight"
FIXED: dict[CauseKind, str] = {"input": "the input", "consumer": "the program", "memory": "the memory"}
"""Names of the resources that are not stages. The bounds of those in ``FIXED`` never change."""
LEAST_EXPONENT, MOST_EXPONENT = 2.0, 64.0
"""Limits of the exponent p. At the upper limit, the rate is practically the smallest bound."""
HEAVY = 0.2
"""Minimum number of cores that a stage on threads must use to count as competing for the interpreter lock."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """Work of one stage, as the model uses it.

    Attributes:
        stage: Statistics of the stage.
        workers: Number of workers that take items.
        visits: Number of items that the stage takes per source item.
        each: Seconds of work per item.
        cpu: CPU seconds per item; 0 if unknown.
        lock_wait: Seconds per item that the stage waits while other stages hold the interpreter lock.
        local: True if the workers use the cores of this machine.
        threads: True if the workers are threads of this process.
    """

    stage: StageStats
    workers: int
    visits: float
    each: float
    cpu: float
    lock_wait: float
    local: bool
    threads: bool

    @property
    def utilisation(self) -> float:
        """Return the busy share of the workers, or the used share of the rate limit if that is larger."""
        limit = self.stage.rate_limit
        return min(1.0, max(self.stage.busy, self.stage.rate / limit if limit else 0.0))


@dataclass(frozen=True, slots=True)
class Change:
    """Hypothetical change to a run.

    Attributes:
        workers: New number of workers, by stage.
        faster: Speed-up factor, by stage.
        on_process: Stages to move from threads to processes.
    """

    workers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    faster: Mapping[str, float] = dataclasses.field(default_factory=dict)
    on_process: Collection[str] = ()


NOTHING = Change()


@dataclass(frozen=True, slots=True)
class Model:
    """Predicts the throughput of a run.

    Attributes:
        works: Work of the stages that took items, by stage.
        cores: Number of cores that the run may use.
        lock: True if the threads of this process compete for one interpreter lock.
        fixed: Bounds that do not depend on the numbers of workers, by resource.
        in_flight: Number of busy workers in a loop that admits too few items, or 0 without such a loop.
        loop: Stages of this loop.
        exponent: Exponent p of the formula above.
    """

    works: Mapping[str, StageWork]
    cores: int
    lock: bool
    fixed: Mapping[str, float]
    in_flight: float
    loop: frozenset[str]
    exponent: float

    @classmethod
    def of(cls, stats: RunStats, cores: int | None = None, gil: bool | None = None) -> Model:
        """Create the model of a run in a window.

        Args:
            stats: Statistics with rates and shares for a window, from :func:`between`.
            cores: Number of cores that the run may use (default: as many as this process may use).
            gil: True if threads share one interpreter lock (default: whether the threads of this process do).
        """
        cores = local_cores() if cores is None else cores
        works = _works(stats)
        lock = (has_gil() if gil is None else gil) and _used(works, threads=True) <= ONE_CORE
        looping = stats.cause is not None and stats.cause.kind == "in_flight"
        loop = frozenset(loop_of(stats) if looping else ()) & works.keys()
        in_flight = sum(works[name].each * works[name].stage.rate for name in loop)
        fixed = _fixed(stats)
        utilisations = [work.utilisation for work in works.values()] + [_used(works) / cores]
        if lock:
            utilisations.append(_used(works, threads=True))
        if fixed or loop:
            utilisations.append(1.0)
        if lock and _used(works, threads=True) >= BUSY:
            works = _without_lock_waits(works)
        if _used(works) >= BUSY * cores:
            works = {name: _without_core_waits(work, stats.window) for name, work in works.items()}
        return cls(works, cores, lock, fixed, in_flight, loop, _exponent(utilisations))

    def rate(self, workers: Mapping[str, int] | None = None, change: Change = NOTHING) -> float:
        """Return the number of items per second that all sources together emit.

        Args:
            workers: Number of workers, by stage (default: the current numbers).
            change: Other changes.
        """
        bounds = self.bounds(_with(change, workers)).values()
        least = min(bounds, default=0.0)
        if not least:
            return 0.0
        total = sum((least / bound) ** self.exponent for bound in bounds)
        return least / float(total ** (1 / self.exponent))

    def limited_by(self, workers: Mapping[str, int] | None = None, change: Change = NOTHING) -> str:
        """Return the resource with the smallest bound: the name of a stage, or a name from this module."""
        bounds = self.bounds(_with(change, workers))
        return min(bounds, key=bounds.__getitem__, default="")

    def bounds(self, change: Change = NOTHING) -> dict[str, float]:
        """Return, for each resource, the highest rate of the sources that it allows, in items per second."""
        found = dict(self.fixed)
        used = locked = around = 0.0
        for name, work in self.works.items():
            faster = change.faster.get(name, 1.0)
            load = work.visits / faster
            before = work.stage.workers
            count = max(1, work.workers + change.workers.get(name, before) - before)
            each = work.each - (work.lock_wait if change.on_process else 0.0)
            found[name] = _ratio(count, each * load)
            if work.stage.rate_limit is not None:
                found[name] = min(found[name], _ratio(work.stage.rate_limit, work.visits))
            used += work.cpu * load if work.local else 0.0
            locked += work.cpu * load if work.threads and name not in change.on_process else 0.0
            around += each * load if name in self.loop else 0.0
        found[CORES] = _ratio(self.cores, used)
        if self.lock:
            found[LOCK] = _ratio(1.0, locked)
        if self.in_flight:
            found[LOOP] = _ratio(self.in_flight, around)
        return found


def _ratio(amount: float, each: float) -> float:
    return amount / max(each, 1e-12)


def _with(change: Change, workers: Mapping[str, int] | None) -> Change:
    return dataclasses.replace(change, workers=workers) if workers is not None else change


def _works(stats: RunStats) -> dict[str, StageWork]:
    visits = visits_of(stats)
    works = {stage.name: _work(stage, stats, visits[stage.name]) for stage in stats.stages}
    return {name: work for name, work in works.items() if work is not None}


def _used(works: Mapping[str, StageWork], threads: bool = False) -> float:
    """Return the number of local cores that the stages use. If ``threads`` is true, count only threads."""
    return sum(
        work.stage.cores or 0.0 for work in works.values() if (work.threads if threads else work.local)
    )


def _work(stage: StageStats, stats: RunStats, visits: float) -> StageWork | None:
    """Return the work of a stage in the window, or None if the stage took no items or has no workers."""
    operator = OPERATORS[stage.kind]
    if operator.outside or stage.worked.working <= 0 or not visits:
        return None
    items, worked = stage.rate * stats.window, stage.worked
    if not items:  # an item may take longer than the window, so use the whole run
        items, worked = stage.items_out if operator.begins else stage.items_in, stage.seconds
    if not items:
        return None
    placement = PLACEMENTS.get(stage.on)
    threads = placement is not None and not placement.own_process and not stage.hosts
    return StageWork(
        stage, stage.working or stage.workers, visits, worked.work / items, (worked.cpu or 0.0) / items,
        0.0, not stage.hosts, threads,
    )  # fmt: skip


def _without_lock_waits(works: dict[str, StageWork]) -> dict[str, StageWork]:
    """Subtract the time for which threads waited while others held the interpreter lock.

    Threads that compute share the lock equally. Each of n such threads therefore waits for at most n - 1
    times its own CPU time. A thread that mostly sleeps takes the lock once per item. If other threads compute
    all the time, the sleeping thread waits up to one switch interval for the lock; the model assumes half of
    that. Only a move to processes avoids this wait.
    """
    heavy = {
        name: work.workers
        for name, work in works.items()
        if work.threads and (work.stage.cores or 0.0) >= HEAVY
    }
    found = {}
    for name, work in works.items():
        idle = max(0.0, work.each - work.cpu)
        if name in heavy:
            others = sum(heavy.values()) - 1
            found[name] = dataclasses.replace(work, each=work.each - min(idle, others * work.cpu))
        elif work.threads and heavy:
            found[name] = dataclasses.replace(work, lock_wait=min(idle, sys.getswitchinterval() / 2))
        else:
            found[name] = work
    return found


def _without_core_waits(work: StageWork, window: float) -> StageWork:
    items = work.stage.rate * window
    if not work.local or not items or work.stage.worked.ready is None:
        return work
    return dataclasses.replace(work, each=max(work.cpu, work.each - work.stage.worked.ready / items))


def _fixed(stats: RunStats) -> dict[str, float]:
    """Return the bound that the program's puts, its gets or memory set, if one of them limits the run."""
    cause = stats.cause
    if cause is None or cause.kind not in FIXED:
        return {}
    visits = visits_of(stats)
    rates = [
        stage.rate / visits[stage.name]
        for stage in stats.stages
        if stage.rate and visits[stage.name] and not OPERATORS[stage.kind].gathers
    ]
    return {FIXED[cause.kind]: min(rates)} if rates else {}


def _exponent(utilisations: Collection[float]) -> float:
    """Return the exponent p, within limits, for which the sum of u^p over all utilisations u is 1."""
    low, high = LEAST_EXPONENT, MOST_EXPONENT
    for _ in range(20):
        middle = (low + high) / 2
        if sum(min(1.0, one) ** middle for one in utilisations) > 1:
            low = middle
        else:
            high = middle
    return high

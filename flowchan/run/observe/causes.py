"""Find what limits a run. This is a pure function of the run's statistics in a time window.

Algorithm. The utilisation of a stage is the share of time in which its *working* workers do not wait. (A
worker is working from the moment it begins to work until it ends. A worker may wait for an item, for room in
a channel, or for earlier items.) A stage whose utilisation is at least ``BUSY`` is a bottleneck. Among
several bottlenecks, the stage with the smallest bound W / (s · v) is chosen. Here, W is the number of working
workers, and s is the busy time per item in seconds. The number of items per source item is v: the product of
the outputs per input of all earlier stages. Measured rates would mislead while channels are still filling.
Several bottlenecks are common, because stages before the real one are also busy while their channels have
room.

Two other causes are checked first. If threads of this process together use a whole core, they compete for the
global interpreter lock. Their stages then look busier than they are. If the kernel cannot give the workers
enough cores, more workers would not help. Without a bottleneck, all workers wait, and the other possible
causes are checked one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowchan.declare.operators import OPERATORS
from flowchan.declare.placements import PLACEMENTS
from flowchan.run.policy.stats import Cause, EdgeStats, RunStats, StageStats, WorkSeconds

BUSY = 0.85
"""Minimum utilisation of a bottleneck, and of a core or lock that counts as fully used."""
SLOWEST = 0.25
"""Minimum utilisation of the stage that is named if no other cause is found.

The stage must also be busy for at least this share of the window."""
SEEN = 0.1
"""Minimum share of the time for a cause to be reported."""
HELD_S = 0.1
"""Minimum time for which an item must have held up others before it is named, in seconds."""
LIMITED = 0.7
"""A stage that reaches this fraction of its rate limit counts as held back by the limit."""
ONE_CORE = 1.15
"""Maximum number of cores that threads can use while they share one interpreter lock."""
CROWDED = 4.0
"""Upper limit on the time for which a thread is assumed to hold the lock while it waits for a core, as a
multiple of its CPU time."""


@dataclass(frozen=True, slots=True)
class _Load:
    """Load of one stage in the window, computed from the time that its workers spent."""

    stage: StageStats
    worked: WorkSeconds
    window: float

    @property
    def workers(self) -> int:
        """Return the number of workers that are working, or of all workers if all have ended."""
        return self.stage.working or self.stage.workers

    @property
    def is_local(self) -> bool:
        """Return whether the stage's workers are threads of this process."""
        placement = PLACEMENTS.get(self.stage.on)
        return placement is not None and not placement.own_process and not self.stage.hosts

    @property
    def is_read_by_program(self) -> bool:
        return OPERATORS[self.stage.kind].gathers

    @property
    def occupied(self) -> float:
        """Return the share of the window in which the stage was busy.

        For a source that ended soon after the start of the window, this share is small.
        """
        return self.worked.work / (self.workers * self.window)

    def bound(self, visits: float) -> float:
        """Return the highest rate of the sources that this stage can keep up with, in items per second."""
        items = self.stage.rate * self.window
        each = self.worked.work / items if items else self.worked.work
        return self.workers / max(each * visits, 1e-12)


@dataclass(frozen=True, slots=True)
class _View:
    """Statistics of the window for which a cause is sought."""

    stats: RunStats
    loads: dict[str, _Load]  # only stages that had running workers in the window
    cores: int
    gil: bool

    @property
    def window(self) -> float:
        return self.stats.window

    def into(self, stage: str) -> list[EdgeStats]:
        return [edge for edge in self.stats.edges if edge.reader == stage]


def cause_of(stats: RunStats, cores: int, gil: bool) -> Cause | None:
    """Find the cause that limited a run in a window.

    Args:
        stats: Statistics at the end of the window. Their rates and shares must cover the window.
        cores: Number of cores that the run may use.
        gil: True if the threads of this process share one global interpreter lock.

    Returns:
        The cause, or None if no cause was found.
    """
    loads = {
        stage.name: _Load(stage, stage.worked, stats.window)
        for stage in stats.stages
        if not OPERATORS[stage.kind].outside and stage.worked.working > 0
    }
    view = _View(stats, loads, cores, gil)
    for find in _FINDERS:
        if (cause := find(view)) is not None:
            return cause
    return None


def _gil(view: _View) -> Cause | None:
    local = [load for load in view.loads.values() if load.is_local and load.worked.cpu is not None]
    if not view.gil or not local:
        return None
    cpu = {load.stage.name: (load.worked.cpu or 0.0) / view.window for load in local}
    used = sum(cpu.values())
    # A thread may have held the GIL while it waited for a core.
    held = used + sum(
        min((load.worked.ready or 0.0) / view.window, CROWDED * cpu[load.stage.name]) for load in local
    )
    most = max(local, key=lambda load: cpu[load.stage.name] / load.workers)
    alone = cpu[most.stage.name] / most.workers >= BUSY * used
    if held < BUSY or used > ONE_CORE or used < SEEN or alone:
        return None
    users = [name for name in sorted(cpu, key=cpu.__getitem__, reverse=True) if cpu[name] > SEEN * used]
    names = " and ".join(map(repr, users[:2]))
    return Cause(
        "gil",
        None,
        f"threads share one interpreter lock (used {_percent(min(1.0, held))} of the time, by {names}); "
        "move a stage to processes",
    )


def _cores(view: _View) -> Cause | None:
    known = [load.worked for load in view.loads.values() if load.worked.cpu is not None]
    used = sum(worked.cpu or 0.0 for worked in known) / view.window
    if used >= BUSY * view.cores and used > ONE_CORE:
        return Cause("cores", None, f"workers use {used:.1f} of {view.cores} cores")
    waited = sum(min(worked.ready or 0.0, worked.work) for worked in known)
    work = sum(worked.work for worked in known)
    if used > SEEN and waited >= 0.5 * work > 0:
        share = _percent(waited / work)
        return Cause("cores", None, f"workers spend {share} of their time waiting for a core")
    return None


def _stage(view: _View, least: float = BUSY) -> Cause | None:
    busy = [
        load
        for load in view.loads.values()
        if load.stage.busy >= least and load.stage.rate and load.occupied >= SLOWEST
    ]
    if not busy:
        return None
    visits = visits_of(view.stats) if len(busy) > 1 else {}
    slow = min(busy, key=lambda load: load.bound(visits.get(load.stage.name) or 1.0))
    name = slow.stage.name
    if slow.is_read_by_program:
        return Cause("consumer", name, f"the program is busy with the items that it reads from {name!r}")
    if slow.stage.rate_limit is not None and slow.stage.rate >= LIMITED * slow.stage.rate_limit:
        return Cause("bottleneck", name, f"its rate={slow.stage.rate_limit:g} allows no more items to start")
    why = f"its workers are busy {_percent(slow.stage.busy)} of the time"
    if missing := slow.stage.alive - slow.stage.working:
        why += f"; {missing} of {slow.stage.workers} have not started to work"
    return Cause("bottleneck", name, why)


def visits_of(stats: RunStats) -> dict[str, float]:
    """Return the number of items that each stage takes per source item.

    For a source, this is its share of the items from all sources. If the graph has a loop, the calculation
    stops after as many rounds as the graph has stages.
    """
    read = {edge.reader for edge in stats.edges}
    begins = {stage.name: stage.name not in read for stage in stats.stages}
    handled = {
        stage.name: stage.items_out if begins[stage.name] else stage.items_in for stage in stats.stages
    }
    total = sum(handled[name] for name in handled if begins[name])
    shares = {name: (handled[name] / total if total else 1.0) if begins[name] else 0.0 for name in handled}
    visits = shares
    for _ in handled:
        found = dict(shares)
        for edge in stats.edges:
            if edge.reader is not None:
                each = (edge.passed + edge.inside) / handled[edge.writer] if handled[edge.writer] else 1.0
                found[edge.reader] += visits[edge.writer] * each
        if found == visits:
            break
        visits = found
    return visits


def _consumer(view: _View) -> Cause | None:
    """Find a result whose writers have to wait because the program reads the result too slowly."""
    for stage in view.stats.stages:
        if OPERATORS[stage.kind].gathers and stage.alive:
            full = [
                edge for edge in view.into(stage.name) if edge.waiting_writers or edge.inside >= edge.capacity
            ]
            if full:
                return Cause(
                    "consumer", stage.name, f"{stage.name!r} waits for the program to read its items"
                )
    return None


def _order(view: _View) -> Cause | None:
    def held(load: _Load) -> float:
        """Return the share of the time in which workers were busy or waited for their turn.

        If readers and writers of a channel wait at the same time, the channel is full of later outputs. In
        this case, a wait for room is also a wait for a turn.
        """
        full = any(
            edge.waiting_readers and edge.waiting_writers
            for edge in view.stats.edges
            if edge.writer == load.stage.name
        )
        return load.stage.busy + (load.stage.waiting_output if full else load.stage.waiting_turn)

    ordered = [load for load in view.loads.values() if load.stage.waiting_turn >= SEEN and held(load) >= BUSY]
    if not ordered:
        return None
    worst = max(ordered, key=held).stage
    return Cause(
        "order",
        worst.name,
        f"outputs of {worst.name!r} wait for earlier items {_percent(worst.waiting_turn)} of the time; "
        f"{_held_up(view, worst)}give the stage a larger buffer, or ordered=False",
    )


def _held_up(view: _View, stage: StageStats) -> str:
    """Name the item for which an ordered stage has to wait, if the counters identify the item.

    Outputs follow the order of the items, so a waiting reader has taken all outputs before the missing one. A
    failed item has no output, so the number of the missing item is unknown after a failure.
    """
    outputs = [edge for edge in view.stats.edges if edge.writer == stage.name]
    held = max((edge.readers_waiting_for for edge in outputs), default=0.0)
    if held < HELD_S or not OPERATORS[stage.kind].owes or stage.failed or stage.unwanted:
        return ""
    number = max(edge.passed for edge in outputs) + 1
    return f"item {number:,} has held them up for {held:.1f} s; "


def _memory(view: _View) -> Cause | None:
    short = next((edge for edge in view.stats.edges if edge.short_of_bytes), None)
    if short is None:
        return None
    return Cause("memory", short.writer, f"channel {short.name!r} has reached its limit in bytes")


def _in_flight(view: _View) -> Cause | None:
    """Find a loop whose stages wait for items while other items wait to enter the loop."""
    loop = loop_of(view.stats)
    waiting = [view.loads[name].stage for name in loop if name in view.loads]
    if not waiting or not all(stage.waiting_input >= stage.waiting_output for stage in waiting):
        return None
    before = [edge for edge in view.stats.edges if edge.reader in loop and edge.writer not in loop]
    if before and not any(edge.inside or edge.waiting_writers for edge in before):
        return None
    names = ", ".join(repr(name) for name in loop)
    return Cause("in_flight", None, f"the loop of {names} admits too few items at a time")


def loop_of(stats: RunStats) -> list[str]:
    """Return the stages that lie on a loop."""
    behind: dict[str, set[str]] = {}
    for edge in stats.edges:
        if edge.reader is not None:
            behind.setdefault(edge.writer, set()).add(edge.reader)

    def comes_back(stage: str) -> bool:
        seen: set[str] = set()
        pending = [stage]
        while pending:
            new = behind.get(pending.pop(), set()) - seen
            seen |= new
            pending += new
        return stage in seen

    return [stage.name for stage in stats.stages if comes_back(stage.name)]


def _starting(view: _View) -> Cause | None:
    for stage in view.stats.stages:
        operator = OPERATORS[stage.kind]
        if stage.alive and not stage.working and not operator.outside and not operator.gathers:
            return Cause("starting", stage.name, f"no worker of {stage.name!r} has started to work yet")
    return None


def _input(view: _View) -> Cause | None:
    """Find an input into which the program puts items too slowly."""
    for stage in view.stats.stages:
        if OPERATORS[stage.kind].outside:
            edges = [edge for edge in view.stats.edges if edge.writer == stage.name]
            readers = [view.loads[edge.reader].stage for edge in edges if edge.reader in view.loads]
            if stage.rate and readers and all(reader.waiting_input >= 0.5 for reader in readers):
                return Cause(
                    "input",
                    stage.name,
                    f"the program puts {stage.rate:,.3g} items a second into {stage.name!r}",
                )
    return None


def _slowest(view: _View) -> Cause | None:
    """Name the busiest stage, because no other cause was found.

    In a short run, the start and the end take much of the time. No stage is then busy enough to count as the
    bottleneck.
    """
    return _stage(view, SLOWEST)


_FINDERS: tuple[Callable[[_View], Cause | None], ...] = (
    _gil, _cores, _stage, _consumer, _order, _memory, _starting, _in_flight, _input, _slowest,
)  # fmt: skip


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"

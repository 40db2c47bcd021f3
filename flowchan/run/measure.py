"""From the counts of the channels to the statistics of a run (R8). The channels count natively, so watching
costs the workers nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from flowchan.channel.channel import ChannelStats
from flowchan.declare.values import Link, Stage
from flowchan.declare.verbs import VERBS
from flowchan.run.decisions import State
from flowchan.run.events import WorkerId
from flowchan.run.opening import Channels
from flowchan.run.plan import Plan
from flowchan.run.policy.scaling import Size
from flowchan.run.stats import HostStats, LinkStats, RunState, RunStats, StageStats

IDLE = 0.005
"""A stage that is busy for a smaller part of the run than this holds nobody up."""


class Spans:
    """From when to when each worker worked: since it had built what the user declared, until it ended."""

    def __init__(self) -> None:
        self._began: dict[WorkerId, float] = {}  # of those that work now
        self._ended: Counter[str] = Counter()  # seconds of those that have ended, by stage

    def begin(self, worker: WorkerId) -> None:
        self._began[worker] = time.monotonic()

    def end(self, worker: WorkerId) -> None:
        began = self._began.pop(worker, None)
        if began is not None:
            self._ended[worker.stage] += time.monotonic() - began  # type: ignore[assignment]

    def seconds(self, now: float) -> Counter[str]:
        """What the workers of each stage have worked until ``now``."""
        found = Counter(self._ended)
        for worker, began in list(self._began.items()):
            found[worker.stage] += max(0.0, now - began)  # type: ignore[assignment]
        return found


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One link with the counts of its channel."""

    link: Link
    stats: ChannelStats


@dataclass(frozen=True, slots=True)
class Account:
    """What is known of a run beside the counts of its channels: its state, its seconds so far, and by stage
    the items tried again, those that nobody wanted, and the seconds that its workers have worked. ``pids``
    are those of worker processes, by worker; ``last_error`` is that of :class:`RunStats`. ``refused``
    items failed and were asked."""

    state: State
    elapsed: float
    retried: Mapping[str, int]
    unwanted: Mapping[str, int]
    worked: Mapping[str, float]
    pids: Mapping[WorkerId, int] = field(default_factory=dict)
    last_error: str = ""
    refused: Mapping[str, int] = field(default_factory=dict)


def measure(plan: Plan, channels: Channels) -> tuple[Snapshot, ...]:
    """The counts of all channels now."""
    return tuple(Snapshot(link, channels[link.name].stats()) for link in plan.links)


def summarise(
    plan: Plan, account: Account, snapshots: tuple[Snapshot, ...], hosts: tuple[HostStats, ...] = ()
) -> RunStats:
    """The statistics of a run."""
    state, elapsed = account.state, account.elapsed
    reading: dict[str | None, list[Snapshot]] = {}
    writing: dict[str, list[Snapshot]] = {}
    for snapshot in snapshots:
        reading.setdefault(snapshot.link.reader, []).append(snapshot)
        writing.setdefault(snapshot.link.writer, []).append(snapshot)
    alive = Counter(id.stage for id in state.alive)
    pids: dict[str, list[int]] = {}
    for id in sorted(state.alive & account.pids.keys(), key=lambda id: id.number):
        pids.setdefault(id.stage, []).append(account.pids[id])
    broken = Counter(failure.worker.stage for failure in state.failures if failure.item is not None)
    stages = []
    for stage in plan.graph.stages:
        about = _About(
            stage=stage,
            reads=reading.get(stage.name, []),
            writes=writing.get(stage.name, []),
            alive=alive[stage.name],
            broken=broken[stage.name] + account.refused.get(stage.name, 0),
            retried=account.retried.get(stage.name, 0),
            restarts=state.restarts.get(stage.name, 0),
            unwanted=account.unwanted.get(stage.name, 0),
            worked=account.worked.get(stage.name, 0.0),
            pids=tuple(pids.get(stage.name, ())),
            size=state.sizes.get(stage.name),
        )
        stages.append(_stage(about, elapsed, state.began + elapsed))
    links = tuple(_link(snapshot, elapsed, plan.share) for snapshot in snapshots)
    return RunStats(
        plan.graph.name,
        state_of(state),
        elapsed,
        tuple(stages),
        links,
        _bottleneck(stages),
        plan.seed,
        plan.memory,
        hosts,
        account.last_error,
    )


def _link(snapshot: Snapshot, elapsed: float, share: int) -> LinkStats:
    link, stats = snapshot.link, snapshot.stats
    return LinkStats(
        name=link.name, writer=link.writer, reader=link.reader, medium=link.medium.name,
        inside=stats.inside, capacity=link.capacity, passed=stats.items_out, rate=stats.items_out / elapsed,
        waiting_readers=stats.waiting_readers, waiting_writers=stats.waiting_writers,
        readers_waiting_for=stats.readers_waiting_for, writers_waiting_for=stats.writers_waiting_for,
        selecting=stats.selecting, woken=stats.woken, awaiting=stats.awaiting, bytes=stats.bytes_inside,
        share=share, short_of_bytes=stats.short_of_bytes, holders=stats.holders,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _About:
    """What is known of one stage. ``broken`` items failed and ended the run, or were asked; ``worked`` are
    the seconds between the beginnings and the ends of its workers, waits included."""

    stage: Stage
    reads: list[Snapshot]
    writes: list[Snapshot]
    alive: int
    broken: int
    retried: int
    restarts: int
    unwanted: int
    worked: float
    pids: tuple[int, ...]
    size: Size | None = None


def _stage(about: _About, elapsed: float, now: float) -> StageStats:
    stage, reads, writes = about.stage, about.reads, about.writes
    workers = stage.worker_count if about.size is None else about.size.workers
    whole = workers * elapsed if about.size is None else max(about.size.seconds(now), 1e-9)
    items_in = sum(s.stats.items_out for s in reads)
    in_hand = sum(s.stats.leased for s in reads)
    failed = about.broken + sum(s.stats.items_in for s in writes if s.link.errors)
    outs = [s for s in writes if not s.link.errors]
    # A tee puts each item into every branch; a stage that nobody reads has finished what it took.
    given = [s.stats.items_in for s in outs]
    unwanted = about.unwanted
    finished = max(0, items_in - in_hand - failed - unwanted)
    items_out = (max if stage.verb.repeats else sum)(given) if given else finished
    if stage.place.hosts and stage.verb.owes and _readers_left(about, outs):
        # Of what was on its way to a host or back then, no worker knows.
        unwanted = max(unwanted, items_in - items_out - failed - in_hand)
    members = 0
    if "members" in stage.options:  # a batch that failed as a whole has no output
        members = max(0, failed - max(0, items_in - items_out - in_hand - unwanted))
        failed -= members
    worked = min(1.0, about.worked / whole)
    waiting_in = min(worked, sum(s.stats.read_wait for s in reads) / whole)
    waiting_out = min(worked - waiting_in, sum(s.stats.write_wait for s in writes) / whole)
    return StageStats(
        name=stage.name, kind=stage.kind, on=stage.place.name, workers=workers,
        alive=about.alive, items_in=items_in, items_out=items_out, failed=failed, retried=about.retried,
        restarts=about.restarts, unwanted=unwanted, in_hand=in_hand,
        rate=(items_in if reads else items_out) / elapsed,
        busy=worked - waiting_in - waiting_out, waiting_input=waiting_in, waiting_output=waiting_out,
        hosts=stage.place.hosts, pids=about.pids, members_failed=members,
    )  # fmt: skip


def _readers_left(about: _About, outs: list[Snapshot]) -> bool:
    """Whether the stage has ended because nobody wanted its items any more."""
    left = any(s.stats.inside and not s.stats.readers for s in outs)
    return not about.alive and (about.unwanted > 0 or left)


def state_of(state: State) -> RunState:
    if state.phase in ("running", "stopping", "finishing"):
        return "stopping" if state.stopped else "running"
    if state.failures:
        return "failed"
    if state.phase == "aborting" or state.aborted:
        return "aborted"
    return "stopped" if state.stopped else "done"


def _bottleneck(stages: list[StageStats]) -> str | None:
    """The stage whose workers are busy for the largest part of the run: the others wait for it, before it to
    put and behind it to get. None where all are idle."""
    candidates = [stage for stage in stages if not VERBS[stage.kind].outside]
    slowest = max(candidates, key=lambda stage: stage.busy, default=None)
    return slowest.name if slowest is not None and len(candidates) > 1 and slowest.busy >= IDLE else None

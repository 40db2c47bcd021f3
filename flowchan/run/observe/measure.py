"""Compute the statistics of a run from the counters of its channels (R8).

The channels count their items in native code. Statistics therefore do not slow the workers down.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from flowchan.channel.channel import ChannelStats
from flowchan.declare.values import Edge, Stage
from flowchan.run.observe.clocks import Worked
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.plan import Plan
from flowchan.run.policy.scaling import Size
from flowchan.run.policy.stats import (
    EdgeStats,
    HostStats,
    RunState,
    RunStats,
    StageStats,
    WorkerStats,
    WorkSeconds,
)
from flowchan.run.policy.transitions import PolicyState
from flowchan.run.worker.opening import Channels, Ports


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters of the channel of one edge.

    ``read_waits`` maps each worker's number to the seconds for which the worker waited to read.
    ``write_waits`` contains two values for writing: the total, and the part spent waiting for earlier items.
    ``leased_at_break`` is the number of items that readers held when the channel broke. ``stats`` does not
    count dropped items as taken.
    """

    edge: Edge
    stats: ChannelStats
    read_waits: Mapping[int, float] = field(default_factory=dict)
    write_waits: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    leased_at_break: int = 0


@dataclass(frozen=True, slots=True)
class Account:
    """State of a run, except the counters of its channels.

    Attributes:
        state: State of the supervisor's policy.
        elapsed: Seconds since the run started.
        retried: Number of retries by stage.
        unwanted: Number of items without a receiver, by stage.
        worked: Time that the workers have spent, by stage.
        pids: Process IDs by worker.
        last_error: Same as in :class:`RunStats`.
        refused: Number of failed items that came from ``ask()``, by stage.
        warnings: Same as in :class:`RunStats`.
    """

    state: PolicyState
    elapsed: float
    retried: Mapping[str, int]
    unwanted: Mapping[str, int]
    worked: Mapping[str, Worked]
    pids: Mapping[WorkerId, int] = field(default_factory=dict)
    last_error: str = ""
    refused: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def measure(
    plan: Plan,
    channels: Channels,
    ports: Mapping[WorkerId, Ports],
    leased_at_break: Mapping[str, int],
    dropped: Mapping[str, int],
) -> tuple[Snapshot, ...]:
    """Return the counters of all channels now, and the wait times of all ``ports``.

    ``leased_at_break`` contains the number of items that workers held when each channel broke. ``dropped``
    contains the number of items that were removed from each channel without reaching a worker.
    """
    read: dict[str, dict[int, float]] = {}
    written: dict[str, dict[int, tuple[float, float]]] = {}
    for id, own_ports in list(ports.items()):  # a copy, because other threads add and remove workers
        for reader in own_ports.inputs.values():
            read.setdefault(reader.channel._name, {})[id.number] = reader._waited()[0]
        for writer in own_ports.writers():
            written.setdefault(writer.channel._name, {})[id.number] = writer._waited()
    return tuple(
        Snapshot(
            edge,
            _without(channels[edge.name].stats(), dropped.get(edge.name, 0)),
            read.get(edge.name, {}),
            written.get(edge.name, {}),
            leased_at_break.get(edge.name, 0),
        )
        for edge in plan.edges
    )


def _without(stats: ChannelStats, dropped: int) -> ChannelStats:
    """Return the statistics as if the dropped items were still in the channel."""
    return dataclasses.replace(stats, items_out=stats.items_out - dropped) if dropped else stats


def summarise(
    plan: Plan, account: Account, snapshots: tuple[Snapshot, ...], hosts: tuple[HostStats, ...] = ()
) -> RunStats:
    """Return the counters of a run, without the rates and shares that :func:`between` adds."""
    state, elapsed = account.state, account.elapsed
    reading: dict[str | None, list[Snapshot]] = {}
    writing: dict[str, list[Snapshot]] = {}
    for snapshot in snapshots:
        reading.setdefault(snapshot.edge.reader, []).append(snapshot)
        writing.setdefault(snapshot.edge.writer, []).append(snapshot)
    alive = Counter(id.stage for id in state.alive)
    pids: dict[str, list[int]] = {}
    for id in sorted(state.alive & account.pids.keys(), key=lambda id: id.number):
        pids.setdefault(id.stage, []).append(account.pids[id])
    broken = Counter(failure.worker.stage for failure in state.failures if failure.item is not None)
    stages = []
    for stage in plan.graph.stages:
        about = _StageInput(
            stage=stage,
            reads=reading.get(stage.name, []),
            writes=writing.get(stage.name, []),
            alive=alive[stage.name],
            broken=broken[stage.name] + account.refused.get(stage.name, 0),
            retried=account.retried.get(stage.name, 0),
            restarts=state.restarts.get(stage.name, 0),
            unwanted=account.unwanted.get(stage.name, 0),
            worked=account.worked.get(stage.name, Worked()),
            pids=tuple(pids.get(stage.name, ())),
            size=state.sizes.get(stage.name),
            cut_short=state_of(state) in ("failed", "aborted"),
        )
        stages.append(_stage(about))
    edges = tuple(_edge(snapshot, plan.share) for snapshot in snapshots)
    return RunStats(
        plan.graph.name,
        state_of(state),
        elapsed,
        tuple(stages),
        edges,
        None,
        plan.seed,
        plan.memory,
        hosts,
        account.last_error,
        warnings=account.warnings,
    )


def _edge(snapshot: Snapshot, share: int) -> EdgeStats:
    edge, stats = snapshot.edge, snapshot.stats
    return EdgeStats(
        name=edge.name, writer=edge.writer, reader=edge.reader, transport=edge.transport.name,
        inside=stats.inside, capacity=edge.capacity, passed=stats.items_out, rate=0.0,
        waiting_readers=stats.waiting_readers, waiting_writers=stats.waiting_writers,
        readers_waiting_for=stats.readers_waiting_for, writers_waiting_for=stats.writers_waiting_for,
        selecting=stats.selecting, woken=stats.woken, awaiting=stats.awaiting, bytes=stats.bytes_inside,
        share=share, short_of_bytes=stats.short_of_bytes, holders=stats.holders, put=stats.items_in,
        errors=edge.errors,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _StageInput:
    """Data from which the statistics of one stage are computed.

    ``broken`` is the number of failed items that ended the run or came from ``ask()``. ``worked`` comes from
    the clocks of the workers.
    """

    stage: Stage
    reads: list[Snapshot]
    writes: list[Snapshot]
    alive: int
    broken: int
    retried: int
    restarts: int
    unwanted: int
    worked: Worked
    pids: tuple[int, ...]
    size: Size | None = None
    cut_short: bool = False


def _stage(about: _StageInput) -> StageStats:
    stage, reads, writes = about.stage, about.reads, about.writes
    workers = stage.worker_count if about.size is None else about.size.workers
    items_in = sum(s.stats.items_out for s in reads)
    in_hand = sum(s.stats.leased for s in reads)
    failed = about.broken + sum(s.stats.items_in for s in writes if s.edge.errors)
    outs = [s for s in writes if not s.edge.errors]
    # A tee puts each item into every output, so take the largest count. For a stage without outputs, take the
    # number of finished items.
    given = [s.stats.items_in for s in outs]
    unwanted = about.unwanted
    cut_off = sum(s.leased_at_break for s in reads) - about.broken - in_hand
    discarded = max(0, cut_off) if about.cut_short else 0
    finished = max(0, items_in - in_hand - failed - unwanted - discarded)
    items_out = (max if stage.operator.repeats else sum)(given) if given else finished
    if stage.placement.hosts and stage.operator.owes and _lacks_readers(about, outs):
        # Workers do not count the items that were in transit to or from a host when the stage ended.
        unwanted = max(unwanted, items_in - items_out - failed - in_hand)
    if about.cut_short and stage.operator.owes:
        discarded = max(0, items_in - items_out - failed - in_hand - unwanted)
    members = 0
    if "members" in stage.options:  # a batch that failed as a whole has no output
        members = max(0, failed - max(0, items_in - items_out - in_hand - unwanted))
        failed -= members
    return StageStats(
        name=stage.name, kind=stage.kind, on=stage.placement.name, workers=workers,
        alive=about.alive, items_in=items_in, items_out=items_out, failed=failed, retried=about.retried,
        restarts=about.restarts, unwanted=unwanted, in_hand=in_hand,
        rate=0.0, busy=0.0, waiting_input=0.0, waiting_output=0.0,
        hosts=stage.placement.hosts, pids=about.pids, members_failed=members,
        working=len(about.worked.now), seconds=_seconds(about),
        per_worker=tuple(_worker(worker, about) for worker in about.worked.now), discarded=discarded,
        rate_limit=stage.rate, starting=_starting(about),
    )  # fmt: skip


def _starting(about: _StageInput) -> int:
    """Return the number of workers that have not begun, without those that only collect results."""
    return 0 if about.stage.operator.gathers else max(0, about.alive - len(about.worked.now))


def _seconds(about: _StageInput) -> WorkSeconds:
    """Return the time spent by all workers that the stage has ever had, including waits at its channels."""
    return _with_waits(
        about.worked.total,
        sum(snapshot.stats.read_wait for snapshot in about.reads),
        sum(snapshot.stats.write_wait for snapshot in about.writes),
        sum(snapshot.stats.turn_wait for snapshot in about.writes),
    )


def _worker(worker: WorkerStats, about: _StageInput) -> WorkerStats:
    """Return the time spent by one worker, including waits at its ports."""
    reads = sum(snapshot.read_waits.get(worker.number, 0.0) for snapshot in about.reads)
    writes = [snapshot.write_waits.get(worker.number, (0.0, 0.0)) for snapshot in about.writes]
    seconds = _with_waits(
        worker.seconds, reads, sum(wait for wait, _ in writes), sum(turn for _, turn in writes)
    )
    return WorkerStats(worker.number, worker.working, seconds)


def _with_waits(worked: WorkSeconds, reads: float, writes: float, turns: float) -> WorkSeconds:
    """Add wait times to the time of a worker or stage, within the limits of that time.

    A worker that waits at several channels counts its time at each of them. The sum is therefore limited to
    the time worked. A negative wait counts as zero, because the end of a worker may be recorded before the
    end of its wait.
    """
    reads = min(max(0.0, reads), worked.working)
    writes = min(max(0.0, writes), worked.working - reads)
    turn = min(max(0.0, turns), writes)
    return dataclasses.replace(worked, input=reads, place=writes - turn, turn=turn)


def _lacks_readers(about: _StageInput, outs: list[Snapshot]) -> bool:
    """Return whether the stage ended because none of its outputs had readers any more."""
    unread = any(s.stats.inside and not s.stats.readers for s in outs)
    return not about.alive and (about.unwanted > 0 or unread)


def state_of(state: PolicyState) -> RunState:
    """Return the state of the run in the words of ``Run.state``."""
    if state.phase in ("running", "stopping", "finishing"):
        return "stopping" if state.stopped else "running"
    if state.failures:
        return "failed"
    if state.phase == "aborting" or state.aborted:
        return "aborted"
    return "stopped" if state.stopped else "done"

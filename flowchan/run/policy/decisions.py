"""Decide what the supervisor does, as pure functions.

Each function maps a state and an event to the next state and the actions to take. The functions never touch
processes, threads, channels or clocks.

The phases of a run:

    running ──stop──> stopping ──┐
       │                         ├──all workers ended──> ended
       ├──failure──> failing ────┤
       ├──abort────> aborting ───┘
       └──every end of the graph reached──> finishing

In *stopping*, the sources are stopped and the other stages process the remaining items. *Stopping* has no
time limit unless the user sets a limit. In *failing* and *aborting*, all channels are broken.

Processes still running after ``GRACE`` seconds are terminated, and after twice that time they are killed. A
thread that is stuck in user code cannot be ended, and is abandoned. In *finishing*, workers are ended in the
same way, although no stage has failed. All stages whose effects the user sees have ended by then, and the
sources have been stopped. The remaining workers, such as a source that waits for its device, are no longer
needed.

A worker process that dies in *running* or *stopping* is replaced as long as its stage has restarts left
(``policy/restart_limit.py``). The first replacement starts at once. Each later one starts after a pause that
doubles with every death on the same item. If a worker dies ``HOPELESS`` times in a row before it begins to
work, it is not replaced again. If the user has set a number of restarts, this number takes the place of
``HOPELESS``, however long each start takes.

``policy/gang_decisions.py`` contains the decisions about gangs, and ``policy/scaling.py`` those about numbers
of workers. If a worker dies while it is being removed, it is replaced as usual, and its replacement is
removed.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from flowchan.errors import MemberLeft, WorkerDied
from flowchan.run.policy.actions import Action, DropQueued, EndServices, Replace, StopSources, Warn
from flowchan.run.policy.events import Death, Ended, Failure, GroupLost, ProcessEnded, WorkerId
from flowchan.run.policy.gang_decisions import (
    form_groups,
    group_lost,
    misses_peer,
    peer_ended,
    settle_gangs,
)
from flowchan.run.policy.restart_limit import (
    RESTART_PERIOD_S,
    has_restart,
    restarts_used,
    use_restart,
    uses_restart,
)
from flowchan.run.policy.scaling import AddWorker, RemoveWorker, Scale, scaled
from flowchan.run.policy.transitions import (
    Decision,
    PolicyState,
    channel_broken,
    run_aborted,
    run_stuck,
    terminate,
    without_member,
    worker_ended,
    worker_failed,
)

GRACE = 2.0
"""Time limit for workers to end when the run ends, in seconds."""
STOP_NOTICE_S = 30.0
"""Seconds after which a stopped run warns that it is still processing items."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""First and longest delay of a replacement in seconds. Delays begin with the second death on an item."""

HOPELESS = 4
"""Number of consecutive deaths, each before the worker began to work, after which the run ends."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """No worker can ever continue. ``failure`` says which worker waits for which channel."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Broke:
    """A channel of the run was aborted. ``failure`` names the channel, the worker and the cause."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Request to stop the run, from ``run.stop()`` or from the first Ctrl-C or SIGTERM.

    Attributes:
        timeout: Seconds after which the run is aborted if it is still active; None for no limit.
        finish_queued: If True, also finish the items that wait in channels. If False, finish only the items
            that workers hold.
    """

    timeout: float | None = None
    finish_queued: bool = True


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """Request to abort the run, from ``run.abort()`` or the second Ctrl-C."""


@dataclass(frozen=True, slots=True)
class EndWorker:
    """Request to end a worker's process with SIGTERM or, if ``force``, with SIGKILL."""

    worker: WorkerId
    force: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Some time has passed without any event."""


SupervisorEvent = (
    Ended
    | Failure
    | Death
    | ProcessEnded
    | GroupLost
    | Stuck
    | Broke
    | StopRequested
    | AbortRequested
    | Tick
    | Scale
    | EndWorker
)


@dataclass(frozen=True, slots=True)
class Decided:
    """Decision as the feed reports it: the event, the states before and after it, and the actions."""

    event: SupervisorEvent
    before: PolicyState
    after: PolicyState
    actions: tuple[Action, ...]


def decide(state: PolicyState, event: SupervisorEvent, now: float) -> Decision:
    """Return the next state and the actions to take after ``event`` at time ``now``."""
    if state.phase == "ended":
        return state, ()
    state, actions = _decide(state, event, now)
    # Settle gangs twice. If a gang ends the run, the gangs that were settled before it must stop waiting for
    # peers.
    for follow in (settle_gangs, form_groups, settle_gangs):
        state, more = follow(state, now)
        actions = (*actions, *more)
    return state, actions


def _decide(state: PolicyState, event: SupervisorEvent, now: float) -> Decision:
    match event:
        case Ended():
            return _ended(state, event, now)
        case Death():
            return _died(state, event, now)
        case ProcessEnded(worker):
            known = worker in state.alive and state.ends_with_peers(worker)
            return (peer_ended(state, worker) if known else state), ()
        case Failure():
            return _raised(state, event, now)
        case GroupLost():
            return group_lost(state, event)
        case Stuck(failure):
            return run_stuck(state, failure, now)
        case Broke(failure):
            return channel_broken(state, failure, now)
        case StopRequested():
            return _stop(state, event, now)
        case AbortRequested():
            return run_aborted(state, now)
        case Scale():
            return _scale(state, event, now)
        case EndWorker(worker, force):
            alive = worker in state.alive & state.processes
            return state, terminate(frozenset({worker}), force=force) if alive else ()
        case Tick():
            return _tick(state, now)


def next_at(state: PolicyState) -> float:
    """Return the time at which a tick will change the state, unless an event arrives earlier."""
    if state.phase == "stopping":
        notice = math.inf if state.notified else state.since + STOP_NOTICE_S
        if not state.services_end and state.alive & state.services and state.alive <= state.services:
            return state.since
        only_sources = state.alive - (frozenset() if state.services_end else state.services) <= state.sources
        return min(state.since + GRACE if only_sources else notice, state.stop_by)
    if state.phase not in ("finishing", "failing", "aborting"):
        return math.inf
    if not state.alive & state.processes or not state.terminated:
        return state.since + GRACE
    return math.inf if state.killed else state.since + 2 * GRACE


def _stop(state: PolicyState, asked: StopRequested, now: float) -> Decision:
    """Stop the sources. A later request may change the time limit or discard queued items."""
    if not state.goes_on:
        return dataclasses.replace(state, stopped=True), ()
    stop_by = state.stop_by if asked.timeout is None else now + asked.timeout
    actions: tuple[Action, ...] = () if asked.finish_queued else (DropQueued(),)
    if state.phase == "running":
        state, actions = dataclasses.replace(state, phase="stopping", since=now), (StopSources(), *actions)
    return dataclasses.replace(state, stopped=True, stop_by=stop_by), actions


def _ended(state: PolicyState, ended: Ended, now: float) -> Decision:
    stage = ended.worker.stage
    if ended.early and stage in state.gangs:
        state = dataclasses.replace(state, no_readers=state.no_readers | {stage})
    return worker_ended(state, ended.worker, now)


def _scale(state: PolicyState, scale: Scale, now: float) -> Decision:
    """Change the number of a stage's workers, unless the stage or the run is ending."""
    peers = frozenset(worker for worker in state.alive - state.leaving if worker.stage == scale.stage)
    if not state.goes_on or not peers:
        return state, ()
    size, new, fewer = scaled(state.sizes[scale.stage], scale, peers, now)
    added = frozenset(new)
    state = dataclasses.replace(
        state,
        sizes={**state.sizes, scale.stage: size},
        alive=state.alive | added,
        processes=state.processes | (added if peers & state.processes else frozenset()),
        ends=state.ends | (added if peers & state.ends else frozenset()),
        leaving=state.leaving | frozenset(fewer),
    )
    return state, (*map(AddWorker, new), *map(RemoveWorker, fewer))


def _died(state: PolicyState, death: Death, now: float) -> Decision:
    worker, stage = death.worker, death.worker.stage
    # The worker was abandoned, or its channels broke before it could report its end.
    if worker not in state.alive:
        return state, ()
    if state.ends_with_peers(worker):
        return peer_ended(state, worker), ()
    replaceable = _is_replaceable(state, death, now)
    if not (state.goes_on and replaceable):
        # If the run is ending anyway, the death of a worker that could be replaced is not a failure.
        expected = replaceable or state.terminated or state.phase == "finishing"
        return worker_failed(state, _failure_of(state, death, now), now, expected)
    replace = Replace(worker, _pause_before(death))
    state, warnings = _count_restart(state, death, now, replace.pause)
    warnings = (*warnings, *_state_lost(state, death))
    if stage in state.elastic:
        state = without_member(state, worker)
        return dataclasses.replace(state, joining=state.joining | {worker}), (*warnings, replace)
    if stage not in state.gangs:
        return state, (*warnings, replace)
    state = dataclasses.replace(state, restarting={**state.restarting, stage: replace})
    state = peer_ended(state, worker)
    peers = frozenset(other for other in state.alive if other.stage == stage)
    return state, (*warnings, *terminate(peers - state.ended_peers, force=True))


def _count_restart(state: PolicyState, death: Death, now: float, pause: float) -> Decision:
    stage = death.worker.stage
    if uses_restart(death):
        return use_restart(state, stage, now, pause)
    restarts = {**state.restarts, stage: state.restarts.get(stage, 0) + death.counts}
    return dataclasses.replace(state, restarts=restarts), ()


def _state_lost(state: PolicyState, death: Death) -> tuple[Action, ...]:
    """Warn that a dead worker's callable object may have held state. That state is now lost."""
    name = state.stateful.get(death.worker.stage)
    if name is None or death.unbegun > 0:
        return ()
    text = (
        f"worker {death.worker} was replaced and has a new {name}; the state of the old {name} is "
        "lost. If results depend on this state, set restarts=0, so that a death ends the run"
    )
    return (Warn(death.worker.stage, "state", text),)


def _is_replaceable(state: PolicyState, death: Death, now: float) -> bool:
    if death.error is not None or _is_hopeless(state, death):
        return False
    stage = death.worker.stage
    return death.always or (
        has_restart(state, stage, now) if uses_restart(death) else state.limits.get(stage, 0) > 0
    )


def _is_hopeless(state: PolicyState, death: Death) -> bool:
    """Return whether a worker has died too often before it began to work.

    Restarts per period are not considered, because each start may take longer than a period.
    """
    if death.worker.stage in state.explicit:
        return death.unbegun > state.limits.get(death.worker.stage, 0)
    return death.unbegun >= HOPELESS


def _pause_before(death: Death) -> float:
    """Return the delay before the replacement starts, in seconds."""
    return 0.0 if death.deaths < 2 else min(FIRST_PAUSE * 2 ** min(death.deaths - 2, 30), LONGEST_PAUSE)


def _failure_of(state: PolicyState, death: Death, now: float) -> Failure:
    """Return the run's failure for a dead worker that is not replaced."""
    if death.error is not None:
        return Failure(death.worker, death.error, None, death.pid, host=death.host)
    stage = death.worker.stage
    used, limit = restarts_used(state, stage, now), state.limits.get(stage, 0)
    why = f"{used} of {limit} restarts were used" + (f" in {RESTART_PERIOD_S:g} s" if used else "")
    if death.irreplaceable:
        why = death.irreplaceable
    elif used < limit or (_is_hopeless(state, death) and stage not in state.explicit):
        why = f"it keeps dying before it starts to work{death.hint}"
    text = f"the process of worker {death.worker} {death.how}; it is not replaced: {why}"
    error = WorkerDied(text, exitcode=death.exitcode, pid=death.pid)
    return Failure(death.worker, error, None, death.pid, host=death.host)


def _raised(state: PolicyState, failure: Failure, now: float) -> Decision:
    """Decide what follows from an error that a worker raised.

    In a gang, the error may only mean that a peer is missing. The worker itself has then not failed.
    """
    stage, missed = failure.worker.stage, misses_peer(state, failure)
    # This worker did fail, so its peers' earlier reports of a missing member are only consequences.
    if stage in state.gangs and not missed:
        own = tuple(one for one in state.failures if one.worker.stage != stage or not misses_peer(state, one))
        state = dataclasses.replace(state, failures=own)
    if missed and stage in state.no_readers:
        return worker_ended(state, failure.worker, now)
    if missed and not state.goes_on:
        return worker_failed(state, failure, now, expected=True)
    alone = isinstance(failure.error, MemberLeft) or failure.worker not in state.processes
    if not missed or alone or stage in state.elastic:
        return worker_failed(state, failure, now, expected=False)
    reports = {**state.missing_peer, failure.worker: failure}
    return dataclasses.replace(state, missing_peer=reports), ()


def _tick(state: PolicyState, now: float) -> Decision:
    waited = now - state.since
    if state.phase == "stopping":
        # All other stages have finished, and only blocked sources are left.
        if state.alive <= state.sources and waited > GRACE:
            return dataclasses.replace(state, phase="finishing", since=now), ()
        if not state.services_end and _waits_for_services(state, waited):
            return dataclasses.replace(state, services_end=True), (EndServices(),)
        if now >= state.stop_by:
            return run_aborted(state, now)
        return (state, ()) if state.notified or waited <= STOP_NOTICE_S else _notify(state)
    if state.phase not in ("finishing", "failing", "aborting") or waited <= GRACE:
        return state, ()
    stuck = state.alive & state.processes
    if stuck:
        if not state.terminated:
            return dataclasses.replace(state, terminated=True), terminate(stuck, force=False)
        if waited > 2 * GRACE and not state.killed:
            return dataclasses.replace(state, killed=True), terminate(stuck, force=True)
        return state, ()
    return dataclasses.replace(state, phase="ended", alive=frozenset(), abandoned=state.alive), ()


def _waits_for_services(state: PolicyState, waited: float) -> bool:
    """Return whether a stopping run waits only for services and for sources that have not ended in time."""
    others = state.alive - state.services
    return bool(state.alive & state.services) and others <= state.sources and (not others or waited > GRACE)


def _notify(state: PolicyState) -> Decision:
    """Warn that a run which is stopping is still processing items in flight."""
    stages = ", ".join(sorted({worker.stage for worker in state.alive - state.sources}))
    text = (
        f"the run was stopped {STOP_NOTICE_S:g} s ago and is still processing items in {stages}; call "
        "abort() to discard them"
    )
    return dataclasses.replace(state, notified=True), (Warn("", "stop", text),)

"""Define the state on which decisions depend, and the transitions that several decisions share.

All functions are pure: they map a state to the next state and the actions to take. ``policy/decisions.py``
describes the phases of a run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from flowchan.declare.fixed_workers import fixed_workers
from flowchan.run.policy.actions import (
    Action,
    BreakChannels,
    EndServices,
    ReleasePorts,
    Replace,
    StopSources,
    Terminate,
)
from flowchan.run.policy.events import Failure, WorkerId
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.plan import Plan
from flowchan.run.policy.scaling import Size

Phase = Literal["running", "stopping", "finishing", "failing", "aborting", "ended"]


@dataclass(frozen=True, slots=True)
class PolicyState:
    """State on which all decisions depend.

    Attributes:
        alive: Workers that have not ended.
        processes: Workers that have their own process.
        sources: Workers of the stages where the graph begins.
        ends: Workers of the stages that no other stage reads. When all have ended, the run is complete.
        limits: Maximum number of restarts of each stage in one period.
        restarts: Number of replaced workers of each stage.
        recent_restarts: Times of each stage's restarts that count against its limit.
        explicit: Stages for which the user has set the limit.
        stateful: Class names of callable objects that may hold state, by stage. A replacement has a new
            object.
        phase: Phase of the run.
        since: When the phase began, in seconds of a monotonic clock.
        failures: Failures of the run, in order.
        stopped: True if a stop was requested.
        stop_by: Time at which a stopped run is aborted.
        notified: True if the user has been warned that the stop takes a long time.
        aborted: True if the run was aborted.
        terminated: True if late processes were terminated.
        killed: True if late processes were killed.
        abandoned: Workers that had not ended when the run ended.
        gangs: Stages whose workers form a group and restart together.
        missing_peer: Reports of gang workers that found a peer missing.
        restarting: Gangs whose workers are ending so that all can restart, each with the replacement of the
            worker that died.
        ended_peers: Workers of gangs whose processes have ended and have not been replaced.
        no_readers: Gangs in which a worker ended because its outputs have no readers.
        elastic: Gangs that continue while one of their workers is being replaced.
        without_group: Workers of elastic gangs that wait for a group, each with the failure that ended its
            last group.
        joining: Workers of elastic gangs whose replacements have not started to work yet.
        changed: Elastic gangs in which a worker has died, ended or joined since the current group was formed.
        began: When the run began.
        sizes: Sizes of the stages that can be scaled.
        leaving: Workers that end after their current item, because the stage is being scaled down.
        services: Workers of services, which end after all others.
        services_end: True if the run has already asked the services to end.
    """

    alive: frozenset[WorkerId]
    processes: frozenset[WorkerId]
    sources: frozenset[WorkerId]
    ends: frozenset[WorkerId]
    limits: Mapping[str, int] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    recent_restarts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    explicit: frozenset[str] = frozenset()
    stateful: Mapping[str, str] = field(default_factory=dict)
    phase: Phase = "running"
    since: float = 0.0
    failures: tuple[Failure, ...] = ()
    stopped: bool = False
    stop_by: float = math.inf
    notified: bool = False
    aborted: bool = False
    terminated: bool = False
    killed: bool = False
    abandoned: frozenset[WorkerId] = frozenset()
    gangs: frozenset[str] = frozenset()
    missing_peer: Mapping[WorkerId, Failure] = field(default_factory=dict)
    restarting: Mapping[str, Replace] = field(default_factory=dict)
    ended_peers: frozenset[WorkerId] = frozenset()
    no_readers: frozenset[str] = frozenset()
    elastic: frozenset[str] = frozenset()
    without_group: Mapping[WorkerId, Failure | None] = field(default_factory=dict)
    joining: frozenset[WorkerId] = frozenset()
    changed: frozenset[str] = frozenset()
    began: float = 0.0
    sizes: Mapping[str, Size] = field(default_factory=dict)
    leaving: frozenset[WorkerId] = frozenset()
    services: frozenset[WorkerId] = frozenset()
    services_end: bool = False

    @property
    def goes_on(self) -> bool:
        """Return whether the run still replaces dead workers."""
        return self.phase in ("running", "stopping")

    def ends_with_peers(self, worker: WorkerId) -> bool:
        """Return whether a worker's process may end without a report, because its gang ends or restarts.

        The worker must have reported a missing peer, or its gang must be restarting.
        """
        return worker in self.missing_peer or worker.stage in self.restarting


Decision = tuple[PolicyState, tuple[Action, ...]]
"""The next state, and the actions to take."""


def first_state(plan: Plan, now: float) -> PolicyState:
    """Return the initial state of a run."""
    ids = frozenset(worker.id for worker in plan.workers)
    return PolicyState(
        alive=ids,
        processes=frozenset(worker.id for worker in plan.workers if worker.stage.placement.own_process),
        sources=frozenset(id for id in ids if id.stage in plan.sources),
        ends=frozenset(id for id in ids if id.stage in plan.ends),
        services=frozenset(id for id in ids if id.stage in plan.services),
        limits=plan.limits(),
        explicit=plan.explicit,
        stateful=plan.stateful,
        gangs=frozenset(stage.name for stage in plan.graph.stages if stage.gang),
        elastic=plan.elastic,
        since=now,
        began=now,
        sizes={
            stage.name: Size(stage.workers, now, stage.workers)
            for stage in plan.graph.stages
            if not fixed_workers(stage)
        },
    )


def worker_ended(state: PolicyState, worker: WorkerId, now: float) -> Decision:
    """Record that a worker has ended and will not be replaced."""
    alive = state.alive - {worker}
    state = without_member(state, worker)
    phase, since = state.phase, state.since
    actions: tuple[Action, ...] = (ReleasePorts(worker),)
    if not alive:
        phase = "ended"
    elif state.goes_on and alive <= state.services:
        if not state.services_end:
            actions = (*actions, EndServices())
        state = dataclasses.replace(state, services_end=True)
    elif state.goes_on and state.ends and not (alive & state.ends):
        # A stage that waits for an item does not notice that its outputs have no readers.
        if phase == "running":
            actions = (*actions, StopSources())
        phase, since = "finishing", now
        if alive & state.services:  # services end last; the other stages end as when a run is stopped
            phase, state = "stopping", dataclasses.replace(state, notified=True)
    leaving = state.leaving - {worker}
    return dataclasses.replace(state, alive=alive, phase=phase, since=since, leaving=leaving), actions


def worker_failed(state: PolicyState, failure: Failure, now: float, expected: bool) -> Decision:
    """Record that a worker ended with an error.

    An ``expected`` error, such as that of a worker that was terminated, is not a failure of the run.
    """
    breaking = state.phase in ("running", "stopping", "finishing") and not expected
    if not expected:
        state = dataclasses.replace(state, failures=with_failure(state.failures, failure))
    if breaking:
        state = dataclasses.replace(state, phase="failing", since=now)
    state, actions = worker_ended(state, failure.worker, now)
    return state, (*((BreakChannels(),) if breaking else ()), *actions)


def run_stuck(state: PolicyState, failure: Failure, now: float) -> Decision:
    """End a run with a failure because the run cannot continue, although no worker has failed."""
    if not state.goes_on:
        return state, ()
    failures = (*state.failures, failure)
    return dataclasses.replace(state, failures=failures, phase="failing", since=now), (BreakChannels(),)


def channel_broken(state: PolicyState, failure: Failure, now: float) -> Decision:
    """End a run with a failure because something other than the supervisor has aborted a channel."""
    breaking = state.phase in ("running", "stopping", "finishing")
    state = dataclasses.replace(state, failures=with_failure(state.failures, failure))
    if not breaking:
        return state, ()
    return dataclasses.replace(state, phase="failing", since=now), (BreakChannels(),)


def run_aborted(state: PolicyState, now: float) -> Decision:
    """Abort the run."""
    if state.phase in ("failing", "aborting"):
        return state, ()
    return dataclasses.replace(state, phase="aborting", since=now, aborted=True), (BreakChannels(),)


def without_member(state: PolicyState, worker: WorkerId) -> PolicyState:
    """Return the state without an elastic gang's worker that has ended.

    The other workers of the gang will form a group without it.
    """
    if worker.stage not in state.elastic:
        return state
    remaining = {other: loss for other, loss in state.without_group.items() if other != worker}
    changed = state.changed | {worker.stage}
    return dataclasses.replace(
        state, without_group=remaining, joining=state.joining - {worker}, changed=changed
    )


def with_failure(failures: tuple[Failure, ...], new: Failure) -> tuple[Failure, ...]:
    """Return the failures with a new one added.

    If a stage aborts its channel with an error and then raises the same error, this counts as one failure.
    """
    for index, old in enumerate(failures):
        if (
            old.channel is not None
            and old.worker in (new.worker, WorkerId(new.worker.stage, 0))
            and _same(old, new)
        ):
            return (*failures[:index], dataclasses.replace(new, channel=old.channel), *failures[index + 1 :])
    return (*failures, new)


def _same(one: Failure, other: Failure) -> bool:
    return one.error is other.error or text_of(one.error) == text_of(other.error)


def terminate(workers: frozenset[WorkerId], force: bool) -> tuple[Action, ...]:
    """Return the actions that terminate or kill the processes of these workers."""
    return tuple(Terminate(worker, force) for worker in sorted(workers, key=str))

"""Make the decisions about gangs: stages whose workers form a group.

The workers of a gang restart together. If a worker dies, the others are terminated, and all workers start
again after the last one has ended. When a peer dies, a worker may report that the peer is missing from a
group operation before the death itself is known. Such a report is not a failure.

If no worker died, there are two cases. If a worker ended because its outputs have no readers, its peers end
as well. If connections between the gang's hosts broke, all workers restart, as long as the stage has restarts
left.

In an elastic gang, only the dead worker is replaced. A worker whose group has ended waits for a new group.
This group is formed when all working members wait. When a replacement begins to work, it ends the current
group, so that the next group includes it. If a group ends although no worker died or joined, this counts as a
restart.
"""

from __future__ import annotations

import dataclasses

from flowchan.errors import MemberDied
from flowchan.run.policy.actions import Action, EndGroup, FormGroup, RestartGang
from flowchan.run.policy.events import Failure, GroupLost, WorkerId
from flowchan.run.policy.restart_limit import has_restart, use_restart
from flowchan.run.policy.transitions import Decision, PolicyState, run_stuck, worker_ended, worker_failed


def peer_ended(state: PolicyState, worker: WorkerId) -> PolicyState:
    """Record that the process of a gang's worker has ended after its worker's report."""
    return dataclasses.replace(state, ended_peers=state.ended_peers | {worker})


def misses_peer(state: PolicyState, failure: Failure) -> bool:
    """Return whether a worker of a gang failed only because a peer is missing."""
    return failure.worker.stage in state.gangs and isinstance(failure.error, MemberDied)


def settle_gangs(state: PolicyState, now: float) -> Decision:
    """Restart each gang whose workers have all ended.

    If none of them died and no restart is left, the run fails with a worker's report of a missing peer. If
    the run is ending, ended workers are settled without waiting for their peers.
    """
    actions: tuple[Action, ...] = ()
    for stage in sorted({worker.stage for worker in state.ended_peers}):
        peers = frozenset(worker for worker in state.alive if worker.stage == stage)
        if state.goes_on and not peers <= state.ended_peers and not _ends_early(state, stage):
            continue
        state, more = _settled(state, stage, _by_number(state.ended_peers & peers), now)
        actions = (*actions, *more)
    return state, actions


def _ends_early(state: PolicyState, stage: str) -> bool:
    """Return whether a gang ends because a worker's outputs have no readers any more."""
    return stage in state.no_readers and stage not in state.restarting


def _settled(state: PolicyState, stage: str, ended: list[WorkerId], now: float) -> Decision:
    restart, early, reports = state.restarting.get(stage), _ends_early(state, stage), state.missing_peer
    state = dataclasses.replace(
        state,
        ended_peers=frozenset(worker for worker in state.ended_peers if worker.stage != stage),
        missing_peer={worker: one for worker, one in reports.items() if worker not in ended},
        restarting={name: one for name, one in state.restarting.items() if name != stage},
    )
    if state.goes_on and ended and restart is not None:
        return state, (RestartGang(tuple(ended), restart.pause, restart.worker),)
    if state.goes_on and ended and not early and has_restart(state, stage, now):
        state, warnings = use_restart(state, stage, now)
        return state, (*warnings, RestartGang(tuple(ended), 0.0, None))
    actions: tuple[Action, ...] = ()
    fails = state.goes_on and not early
    for worker in ended:
        state, more = (
            worker_failed(state, reports[worker], now, expected=False)
            if fails and worker is ended[0]
            else worker_ended(state, worker, now)
        )
        actions = (*actions, *more)
    return state, actions


def group_lost(state: PolicyState, lost: GroupLost) -> Decision:
    """Record that a worker of an elastic gang waits for a group."""
    worker = lost.worker
    if worker not in state.alive:
        return state, ()
    changed = state.changed | {worker.stage} if worker in state.joining else state.changed
    waiting = {**state.without_group, worker: lost.failure}
    state = dataclasses.replace(
        state, without_group=waiting, joining=state.joining - {worker}, changed=changed
    )
    return state, (EndGroup(worker.stage),)


def form_groups(state: PolicyState, now: float) -> Decision:
    """Form a group for each elastic gang whose working members are all waiting for one."""
    actions: tuple[Action, ...] = ()
    for stage in sorted({worker.stage for worker in state.without_group}):
        peers = {worker for worker in state.alive - state.joining if worker.stage == stage}
        if state.phase in ("failing", "aborting") or not peers <= state.without_group.keys():
            continue
        if stage not in state.changed:
            reports = [one for worker, one in state.without_group.items() if worker in peers and one]
            if reports and not has_restart(state, stage, now):
                state, more = run_stuck(state, reports[0], now)
                actions = (*actions, *more)
                continue
            state, warnings = use_restart(state, stage, now)
            actions = (*actions, *warnings)
        new = {worker for worker in peers if state.without_group[worker] is None}
        waiting = {worker: one for worker, one in state.without_group.items() if worker not in peers}
        state = dataclasses.replace(state, without_group=waiting, changed=state.changed - {stage})
        actions = (*actions, FormGroup((*_by_number(peers - new), *_by_number(new))))
    return state, actions


def _by_number(workers: set[WorkerId] | frozenset[WorkerId]) -> list[WorkerId]:
    return sorted(workers, key=lambda worker: worker.number)

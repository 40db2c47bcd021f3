"""Test decisions about several gangs at once; the workers of the gangs report from other processes."""

from __future__ import annotations

import dataclasses
from typing import Any

from deciding import died, missing, received

from flowchan.run.policy.actions import Action, EndGroup, FormGroup, RestartGang
from flowchan.run.policy.decisions import decide
from flowchan.run.policy.events import GroupLost, ProcessEnded, WorkerId
from flowchan.run.policy.transitions import PolicyState

LEFT, RIGHT = (tuple(WorkerId(stage, number) for number in (1, 2)) for stage in ("left", "right"))


def gangs(*workers: WorkerId, **values: Any) -> PolicyState:
    alive = frozenset(map(received, workers))
    stages = frozenset(worker.stage for worker in workers)
    return PolicyState(
        alive=alive, processes=alive, sources=frozenset(), ends=alive, gangs=stages, elastic=stages, **values
    )


def lose(state: PolicyState, worker: WorkerId) -> tuple[PolicyState, tuple[Action, ...]]:
    """Make a worker wait for a group, because its last group has ended."""
    return decide(state, GroupLost(received(worker), missing(worker)), 0.0)


def test_group_is_formed_of_the_workers_of_one_gang() -> None:
    state = gangs(*LEFT, *RIGHT, limits={"left": 9, "right": 9})
    for first, second in (LEFT, RIGHT):
        state, actions = lose(state, second)
        assert actions == (EndGroup(first.stage),)
        state, actions = lose(state, first)
        assert actions == (EndGroup(first.stage), FormGroup((first, second)))
    assert state.restarts == {"left": 1, "right": 1}


def test_failure_names_a_worker_of_the_gang_without_restarts() -> None:
    state, _ = lose(gangs(*LEFT, *RIGHT, limits={"right": 1}), RIGHT[0])
    for worker in reversed(LEFT):
        assert state.phase == "running"
        state, _ = lose(state, worker)
    assert (state.phase, [one.worker for one in state.failures]) == ("failing", [LEFT[1]])


def test_gang_restarts_as_often_as_its_workers_die() -> None:
    workers = tuple(WorkerId("many", number) for number in range(1, 9))
    state = dataclasses.replace(gangs(*workers, limits={"many": 9}), elastic=frozenset())
    for victim in workers[:4]:
        state, _ = decide(state, died(victim), 0.0)
        for worker in workers:
            if worker != victim:
                state, actions = decide(state, ProcessEnded(received(worker)), 0.0)
        assert actions == (RestartGang(workers, 0.0, victim),)
        assert (state.restarting, state.ended_peers, state.missing_peer) == ({}, frozenset(), {})
    assert state.restarts == {"many": 4}

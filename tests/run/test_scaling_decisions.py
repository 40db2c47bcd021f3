"""Test decisions to add or terminate workers, and decisions at the limits."""

from __future__ import annotations

import dataclasses

import pytest
from deciding import died

from flowchan.run.policy.actions import Replace, Terminate
from flowchan.run.policy.decisions import HOPELESS, EndWorker, decide
from flowchan.run.policy.events import Ended, WorkerId
from flowchan.run.policy.scaling import AddWorker, Scale, Size
from flowchan.run.policy.transitions import PolicyState

SOURCE, WORK, SINK = (WorkerId(name, 1) for name in ("source", "work", "sink"))
STATE = PolicyState(
    alive=frozenset({SOURCE, WORK, SINK}), processes=frozenset({WORK}), sources=frozenset({SOURCE}),
    ends=frozenset({SINK}), limits={"work": 1}, sizes={"work": Size(1, 0.0, 1), "sink": Size(1, 0.0, 1)},
)  # fmt: skip


def test_request_to_terminate_a_worker_signals_only_live_processes() -> None:
    assert decide(STATE, EndWorker(WORK, False), 0.0) == (STATE, (Terminate(WORK, force=False),))
    assert decide(STATE, EndWorker(WORK, True), 0.0) == (STATE, (Terminate(WORK, force=True),))
    for other in (SINK, WorkerId("work", 2)):
        assert decide(STATE, EndWorker(other, True), 0.0) == (STATE, ())


def test_new_worker_has_a_process_like_its_peers() -> None:
    new = WorkerId("work", 2)
    state, actions = decide(STATE, Scale("work", 2), 0.0)
    assert actions == (AddWorker(new),)
    assert (state.processes, state.ends) == (frozenset({WORK, new}), frozenset({SINK}))
    assert state.alive == STATE.alive | {new}


def test_new_worker_is_an_end_like_its_peers() -> None:
    new = WorkerId("sink", 2)
    state, actions = decide(STATE, Scale("sink", 2), 0.0)
    assert actions == (AddWorker(new),)
    assert (state.processes, state.ends) == (frozenset({WORK}), frozenset({SINK, new}))
    state, _ = decide(state, Ended(SINK), 1.0)
    assert state.phase == "running"  # the new worker is still needed
    state, _ = decide(state, Ended(new), 2.0)
    assert state.phase == "finishing"


def test_several_early_ends_in_a_gang_are_remembered() -> None:
    first, second, third = (WorkerId("gang", number) for number in (1, 2, 3))
    state = dataclasses.replace(STATE, alive=frozenset({first, second, third}), gangs=frozenset({"gang"}))
    for worker in (first, second):
        state, _ = decide(state, Ended(worker, early=True), 0.0)
        assert state.no_readers == {"gang"}


@pytest.mark.parametrize(("limit", "replaced"), [(0, False), (1, True), (2, True)])
def test_worker_that_died_on_item_is_replaced_if_limit_positive(limit: int, replaced: bool) -> None:
    death = dataclasses.replace(died(WORK), over_item=1)
    _, actions = decide(dataclasses.replace(STATE, limits={"work": limit}), death, 0.0)
    assert (Replace(WORK, 0.0) in actions) == replaced


@pytest.mark.parametrize(("unbegun", "replaced"), [(HOPELESS - 1, True), (HOPELESS, False), (99, False)])
def test_worker_that_never_begins_is_not_replaced_forever(unbegun: int, replaced: bool) -> None:
    death = dataclasses.replace(died(WORK), unbegun=unbegun)
    _, actions = decide(STATE, death, 0.0)
    assert (Replace(WORK, 0.0) in actions) == replaced

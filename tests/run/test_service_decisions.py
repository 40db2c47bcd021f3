"""Test the supervisor's decisions about services, which end after all other workers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from deciding import died

from flowchan.run.policy.actions import EndServices, ReleasePorts, Replace, StopSources
from flowchan.run.policy.decisions import GRACE, StopRequested, Tick, decide, next_at
from flowchan.run.policy.events import Ended, WorkerId
from flowchan.run.policy.transitions import PolicyState

SOURCE, SINK, SERVICE, OTHER = (WorkerId(name, 1) for name in ("source", "sink", "service", "other"))
START = PolicyState(
    alive=frozenset({SOURCE, SINK, SERVICE, OTHER}),
    processes=frozenset({SERVICE, OTHER}),
    sources=frozenset({SOURCE}),
    ends=frozenset({SINK}),
    services=frozenset({SERVICE, OTHER}),
    limits={"service": 3},
)


def at(**values: Any) -> PolicyState:
    return dataclasses.replace(START, **values)


def test_services_end_when_all_other_workers_have_ended() -> None:
    state, actions = decide(START, Ended(SOURCE), 0.0)
    assert actions == (ReleasePorts(SOURCE),)
    state, actions = decide(state, Ended(SINK), 1.0)
    assert actions == (ReleasePorts(SINK), EndServices())
    assert state.phase == "running"
    state, actions = decide(state, Ended(SERVICE), 2.0)
    assert actions == (ReleasePorts(SERVICE),)
    state, actions = decide(state, Ended(OTHER), 3.0)
    assert (state.phase, actions) == ("ended", (ReleasePorts(OTHER),))


def test_service_that_dies_after_the_other_workers_is_replaced() -> None:
    state, _ = decide(at(alive=frozenset({SINK, SERVICE})), Ended(SINK), 0.0)
    state, actions = decide(state, died(SERVICE), 1.0)
    assert actions == (Replace(SERVICE, 0.0),)
    assert SERVICE in state.alive


def test_sources_are_stopped_before_the_services_end() -> None:
    state, actions = decide(START, Ended(SINK), 7.0)
    assert actions == (ReleasePorts(SINK), StopSources())
    assert (state.phase, state.stopped, next_at(state)) == ("stopping", False, 7.0 + GRACE)
    _, actions = decide(state, Ended(SOURCE), 8.0)
    assert actions == (ReleasePorts(SOURCE), EndServices())


def test_services_do_not_wait_for_a_source_that_does_not_end() -> None:
    state, _ = decide(START, Ended(SINK), 7.0)
    assert decide(state, Tick(), 7.0 + GRACE) == (state, ())
    state, actions = decide(state, Tick(), 7.1 + GRACE)
    assert (state.phase, actions) == ("stopping", (EndServices(),))
    for service in (SERVICE, OTHER):
        state, _ = decide(state, Ended(service), 10.0)
    assert (state.phase, state.alive) == ("finishing", {SOURCE})


@pytest.mark.parametrize("alive", [{SERVICE}, {SERVICE, OTHER}])
def test_stopped_run_of_services_alone_ends_them_at_once(alive: set[WorkerId]) -> None:
    state, _ = decide(at(alive=frozenset(alive)), StopRequested(), 0.0)
    state, actions = decide(state, Tick(), 0.0)
    assert actions == (EndServices(),)
    assert decide(state, Tick(), 1.0) == (state, ())

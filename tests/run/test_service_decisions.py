"""Test how the supervisor treats services, which must shut down after all other workers."""

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


def test_services_shut_down_after_all_other_workers_exit() -> None:
    state, actions = decide(START, Ended(SOURCE), 0.0)
    assert actions == (ReleasePorts(SOURCE),)
    state, actions = decide(state, Ended(SINK), 1.0)
    assert actions == (ReleasePorts(SINK), EndServices())
    assert state.phase == "running"
    state, actions = decide(state, Ended(SERVICE), 2.0)
    assert actions == (ReleasePorts(SERVICE),)
    state, actions = decide(state, Ended(OTHER), 3.0)
    assert (state.phase, actions) == ("ended", (ReleasePorts(OTHER),))


def test_service_is_replaced_if_it_dies_after_other_workers_exit() -> None:
    state, _ = decide(at(alive=frozenset({SINK, SERVICE})), Ended(SINK), 0.0)
    state, actions = decide(state, died(SERVICE), 1.0)
    assert actions == (Replace(SERVICE, 0.0),)
    assert SERVICE in state.alive


def test_sources_are_stopped_before_the_services_shut_down() -> None:
    state, actions = decide(START, Ended(SINK), 7.0)
    assert actions == (ReleasePorts(SINK), StopSources())
    assert (state.phase, state.stopped, next_at(state)) == ("stopping", False, 7.0 + GRACE)
    _, actions = decide(state, Ended(SOURCE), 8.0)
    assert actions == (ReleasePorts(SOURCE), EndServices())


def test_services_do_not_wait_for_a_source_that_keeps_running() -> None:
    state, _ = decide(START, Ended(SINK), 7.0)
    assert decide(state, Tick(), 7.0 + GRACE) == (state, ())
    state, actions = decide(state, Tick(), 7.1 + GRACE)
    assert (state.phase, actions) == ("stopping", (EndServices(),))
    for service in (SERVICE, OTHER):
        state, _ = decide(state, Ended(service), 10.0)
    assert (state.phase, state.alive) == ("finishing", {SOURCE})


@pytest.mark.parametrize("alive", [{SERVICE}, {SERVICE, OTHER}])
def test_stop_shuts_services_down_at_once_without_other_workers(alive: set[WorkerId]) -> None:
    state, _ = decide(at(alive=frozenset(alive)), StopRequested(), 0.0)
    state, actions = decide(state, Tick(), 0.0)
    assert actions == (EndServices(),)
    assert decide(state, Tick(), 1.0) == (state, ())

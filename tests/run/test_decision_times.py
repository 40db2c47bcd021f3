"""Test when the supervisor acts next, how long it pauses, and when a replacement has lost state."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from deciding import died

from flowchan.run.policy import decisions
from flowchan.run.policy.actions import Replace, Warn
from flowchan.run.policy.decisions import GRACE, STOP_NOTICE_S, Tick, decide, next_at
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.transitions import Phase, PolicyState

SOURCE, MAP, SINK = (WorkerId(name, 1) for name in ("source", "map", "sink"))
START = PolicyState(
    alive=frozenset({SOURCE, MAP, SINK}), processes=frozenset({MAP}), sources=frozenset({SOURCE}),
    ends=frozenset({SINK}), limits={"map": 100},
)  # fmt: skip
THREADS = frozenset({SOURCE, SINK})


@pytest.mark.parametrize(
    ("deaths", "pause"),
    [(0, 0.0), (1, 0.0), (2, 0.1), (3, 0.2), (4, 0.4), (7, 3.2), (8, 5.0), (9, 5.0), (10_000, 5.0)],
)
def test_pause_doubles_from_the_second_death_up_to_a_limit(deaths: int, pause: float) -> None:
    _, actions = decide(START, dataclasses.replace(died(MAP), deaths=deaths), 0.0)
    (action,) = actions
    assert isinstance(action, Replace)
    assert action.pause == pytest.approx(pause)


@pytest.mark.parametrize("phase", ["finishing", "failing", "aborting"])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 100.0 + GRACE),
        ({"terminated": True}, 100.0 + 2 * GRACE),
        ({"terminated": True, "killed": True}, math.inf),
        ({"terminated": True, "killed": True, "alive": THREADS}, 100.0 + GRACE),
    ],
)
def test_ending_run_acts_next_after_its_grace(phase: Phase, values: dict[str, Any], expected: float) -> None:
    """Threads are abandoned after the grace. Processes are terminated, and later killed."""
    assert next_at(dataclasses.replace(START, phase=phase, since=100.0, **values)) == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 100.0 + STOP_NOTICE_S),
        ({"notified": True}, math.inf),
        ({"stop_by": 101.0}, 101.0),
        ({"alive": frozenset({SOURCE})}, 100.0 + GRACE),
        ({"alive": frozenset({SOURCE}), "stop_by": 101.0}, 101.0),
    ],
)
def test_stopping_run_acts_next_at_its_earliest_limit(values: dict[str, Any], expected: float) -> None:
    assert next_at(dataclasses.replace(START, phase="stopping", since=100.0, **values)) == expected


@pytest.mark.parametrize("phase", ["running", "ended"])
def test_run_that_does_not_end_waits_for_events(phase: Phase) -> None:
    assert next_at(dataclasses.replace(START, phase=phase)) == math.inf


@pytest.mark.parametrize("phase", ["stopping", "finishing", "failing", "aborting"])
def test_only_tick_after_the_next_time_makes_progress(phase: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    """If other ticks made progress, the supervisor would keep waking up without a reason."""
    monkeypatch.setattr(decisions, "GRACE", 5.0)
    state = dataclasses.replace(START, phase=phase, since=100.0)
    times: list[float] = []
    while (at := next_at(state)) < math.inf:
        times.append(at)
        assert decide(state, Tick(), at - 1.0) == (state, ())
        before = state
        state, _ = decide(state, Tick(), at + 0.5)
        assert state != before
    assert times == ([130.0] if phase == "stopping" else [105.0, 110.0])


@pytest.mark.parametrize(
    ("stateful", "unbegun", "warned"),
    [({"map": "Model"}, 0, True), ({"map": "Model"}, 1, False), ({"source": "Model"}, 0, False)],
)
def test_replacement_warns_only_if_a_begun_worker_had_state(
    stateful: dict[str, str], unbegun: int, warned: bool
) -> None:
    state = dataclasses.replace(START, stateful=stateful)
    _, actions = decide(state, dataclasses.replace(died(MAP), unbegun=unbegun), 0.0)
    topics = [action.topic for action in actions if isinstance(action, Warn)]
    assert topics == (["state"] if warned else [])
    assert actions[-1] == Replace(MAP, 0.0)

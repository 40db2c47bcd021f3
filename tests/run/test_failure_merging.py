"""Test that an error counts once if a stage aborts its channel with it and then raises it."""

from __future__ import annotations

from typing import Any

import pytest
from deciding import failure, received

from flowchan.run.policy.actions import BreakChannels
from flowchan.run.policy.decisions import Broke, Stuck, decide
from flowchan.run.policy.events import Failure, WorkerId
from flowchan.run.policy.transitions import Phase, PolicyState, with_failure

FIRST, SECOND, OTHER = WorkerId("first", 1), WorkerId("first", 2), WorkerId("other", 1)
UNKNOWN = WorkerId("first", 0)
START = PolicyState(
    alive=frozenset({FIRST, SECOND, OTHER}),
    processes=frozenset(),
    sources=frozenset(),
    ends=frozenset({OTHER}),
)


def broke(worker: WorkerId, error: Any, channel: str | None = "out") -> Failure:
    return Failure(worker, error, None, 1, channel)


WRONG = ValueError("wrong")


@pytest.mark.parametrize("worker", [FIRST, UNKNOWN])
@pytest.mark.parametrize("error", [WRONG, ValueError("wrong")], ids=["same object", "from another process"])
def test_error_of_an_aborted_channel_and_its_worker_counts_once(worker: WorkerId, error: Exception) -> None:
    earlier, later = broke(OTHER, KeyError("a")), broke(OTHER, KeyError("b"), None)
    found = with_failure((earlier, broke(worker, WRONG), later), Failure(received(FIRST), error, "item", 1))
    assert found == (earlier, Failure(FIRST, error, "item", 1, "out"), later)


@pytest.mark.parametrize(
    "other",
    [
        broke(FIRST, WRONG, None), broke(SECOND, WRONG), broke(WorkerId("other", 0), WRONG),
        broke(FIRST, KeyError(1)),
    ],
    ids=["no channel", "another worker", "another stage", "another error"],
)  # fmt: skip
def test_error_with_another_cause_counts_separately(other: Failure) -> None:
    new = Failure(FIRST, ValueError("wrong"), "item", 1)
    assert with_failure((other,), new) == (other, new)


@pytest.mark.parametrize("phase", ["running", "stopping", "finishing", "failing", "aborting"])
def test_broken_channel_ends_a_run_that_goes_on(phase: Phase) -> None:
    state = PolicyState(START.alive, frozenset(), frozenset(), START.ends, phase=phase)
    cause = broke(UNKNOWN, WRONG)
    found, actions = decide(state, Broke(cause), 7.0)
    breaks = phase not in ("failing", "aborting")
    assert actions == ((BreakChannels(),) if breaks else ())
    assert (found.phase, found.since) == (("failing", 7.0) if breaks else (phase, 0.0))
    assert found.failures == (cause,)
    found, _ = decide(found, failure(FIRST), 8.0)
    assert [one.channel for one in found.failures] == ["out"]


@pytest.mark.parametrize("phase", ["running", "stopping", "finishing", "failing", "aborting"])
def test_deadlock_ends_a_run_only_before_it_ends(phase: Phase) -> None:
    state = PolicyState(START.alive, frozenset(), frozenset(), START.ends, phase=phase)
    stuck = failure(OTHER)
    found, actions = decide(state, Stuck(stuck), 7.0)
    if phase in ("running", "stopping"):
        assert (found.phase, found.since, found.failures) == ("failing", 7.0, (stuck,))
        assert actions == (BreakChannels(),)
    else:
        assert (found, actions) == (state, ())

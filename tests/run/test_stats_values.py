"""Test the values that statistics derive from their fields, and the health of a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flowchan import WorkSeconds
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.health import health_of
from flowchan.run.policy.stats import EdgeStats, RunStats, StageStats
from flowchan.run.policy.transitions import PolicyState

EARLY = WorkSeconds(working=2.0, input=0.5, place=0.25, turn=0.125, cpu=1.0, ready=0.5)
LATE = WorkSeconds(working=10.0, input=2.0, place=1.25, turn=0.625, cpu=4.0, ready=1.5)


def test_work_is_the_time_that_is_not_spent_waiting() -> None:
    assert LATE.work == 10.0 - 2.0 - 1.25 - 0.625
    assert WorkSeconds(working=1.0, input=0.5, place=0.5, turn=0.5).work == 0.0
    assert WorkSeconds(working=1.0).work == 1.0
    assert WorkSeconds().work == 0.0


def test_time_since_an_earlier_measurement_is_the_difference() -> None:
    assert LATE.since(EARLY) == WorkSeconds(8.0, 1.5, 1.0, 0.5, 3.0, 1.0)
    assert LATE.since(WorkSeconds()) == LATE
    assert EARLY.since(LATE) == WorkSeconds(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_time_that_is_unknown_stays_unknown() -> None:
    unknown = dataclasses.replace(LATE, cpu=None, ready=None)
    found = unknown.since(EARLY)
    assert (found.cpu, found.ready) == (None, None)
    earlier = dataclasses.replace(EARLY, cpu=None, ready=None)
    found = LATE.since(earlier)
    assert (found.cpu, found.ready) == (4.0, 1.5)


def stage(name: str, alive: int = 1, starting: int = 0, kind: str = "map") -> StageStats:
    made = StageStats(name, kind, "thread", 1, alive, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    return dataclasses.replace(made, starting=starting)


@pytest.mark.parametrize(
    ("alive", "starting", "state"),
    [
        (0, 0, "ended"), (1, 0, "running"), (1, 1, "starting"), (2, 1, "running"), (300, 299, "running"),
        (300, 300, "starting"), (1, 2, "starting"),
    ],
)  # fmt: skip
def test_stage_is_starting_while_no_worker_works(alive: int, starting: int, state: str) -> None:
    assert stage("work", alive, starting).state == state


def test_items_left_were_put_but_not_taken() -> None:
    edge = EdgeStats("work", "work", None, "threads", 0, 1, 7, 0.0, put=12)
    assert edge.left == 5
    assert dataclasses.replace(edge, passed=12).left == 0


def run_stats(*stages: StageStats, state: Any = "running") -> RunStats:
    return RunStats("sample", state, 1.0, stages, (), None)


def state_of(**values: Any) -> PolicyState:
    ids = frozenset({WorkerId("work", 1)})
    return PolicyState(alive=ids, processes=ids, sources=frozenset(), ends=ids, **values)


@pytest.mark.parametrize(
    ("state", "starting", "ready"),
    [
        ("running", 0, True), ("running", 1, False), ("stopping", 0, False), ("done", 0, False),
        ("failed", 0, False), ("aborted", 0, False), ("stopped", 0, False),
    ],
)  # fmt: skip
def test_run_is_ready_while_it_runs_and_nothing_starts(state: str, starting: int, ready: bool) -> None:
    other, work = stage("other"), stage("work", starting=starting)
    stats = run_stats(other, work, state=state)
    health = health_of(stats, state_of(), failed=False, waiting=0, now=0.0)
    assert health.ready == ready


def test_run_with_an_ended_stage_is_ready() -> None:
    stats = run_stats(stage("work", alive=0), stage("other"))
    assert health_of(stats, state_of(), failed=False, waiting=0, now=0.0).ready


def test_health_lists_all_stages_except_inputs() -> None:
    orders = stage("orders", alive=0, kind="input")
    stats = run_stats(orders, stage("work", starting=1), stage("last", alive=0))
    health = health_of(stats, state_of(), failed=True, waiting=3, now=0.0)
    assert health.stages == {"work": "starting", "last": "ended"}
    assert (health.failed, health.waiting) == (True, 3)


def test_health_counts_the_restarts_that_are_left_now() -> None:
    limits = {"work": 3, "unlimited": 10**9, "more": 10**9 + 1, "most": 10**9 - 1}
    state = state_of(limits=limits, recent_restarts={"work": (0.0, 30.0)})
    left = [health_of(run_stats(), state, False, 0, now).restarts_left for now in (30.0, 60.0, 90.0)]
    assert left == [{"work": number, "most": 10**9 - 1} for number in (1, 2, 3)]

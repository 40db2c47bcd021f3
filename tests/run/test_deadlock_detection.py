"""Test the detection of a deadlock, a pure function of two observations of a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flowchan.run.policy.deadlock import (
    MORE_MEMORY,
    NO_STAGE_PUTS,
    REMEDY,
    STILL,
    Activity,
    Deadlocks,
    Observation,
    Waits,
    judge,
)
from flowchan.run.policy.decisions import (
    Stuck,
)
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.stats import EdgeStats, RunStats, StageStats

RESULT = WorkerId("result", 1)
TWO = frozenset({WorkerId("first", 1), WorkerId("second", 1)})


def stage(name: str, kind: str = "map", alive: int = 1, restarts: int = 0) -> StageStats:
    return StageStats(name, kind, "thread", 1, alive, 0, 0, 0, 0, restarts, 0, 0, 0.0, 0.0, 0.0, 0.0)


def edge(writer: str, reader: str, readers: int = 0, writers: int = 0, **counts: Any) -> EdgeStats:
    found = EdgeStats(writer, writer, reader, "threads", 1, 1, 0, 0.0, readers, writers)
    return dataclasses.replace(found, **counts)


def observation(*edges: EdgeStats, stages: tuple[StageStats, ...] | None = None, **about: Any) -> Observation:
    if stages is None:
        stages = tuple(stage(name) for name in dict.fromkeys(one.writer for one in edges))
    return Observation(RunStats("graph", "running", 1.0, stages, edges, None), **about)


LOOP = observation(edge("first", "second", readers=1), edge("second", "first", readers=1))
"""Snapshot of two stages that wait for each other's items."""
FULL = observation(edge("first", "second", writers=1), edge("second", "first", writers=1))


def text_of(stuck: object) -> str:
    assert isinstance(stuck, Stuck)
    return str(stuck.failure.error)


def test_two_equal_snapshots_with_all_workers_waiting_are_a_deadlock() -> None:
    assert NO_STAGE_PUTS in text_of(judge(LOOP, LOOP))
    assert REMEDY in text_of(judge(FULL, FULL))


def test_remedy_is_more_memory_if_a_writer_waits_for_bytes() -> None:
    short = observation(
        edge("first", "second", writers=1, short_of_bytes=True), edge("second", "first", writers=1)
    )
    assert MORE_MEMORY in text_of(judge(short, short))


def test_single_snapshot_does_not_prove_a_deadlock() -> None:
    assert judge(None, LOOP) is None


@pytest.mark.parametrize(
    "moved",
    [
        observation(edge("first", "second", readers=1, passed=1), edge("second", "first", readers=1)),
        observation(edge("first", "second", readers=1, inside=0), edge("second", "first", readers=1)),
        observation(*LOOP.stats.edges, stages=(stage("first", restarts=1), stage("second"))),
        observation(*LOOP.stats.edges, counts=(1,)),
    ],
    ids=["an item was taken", "an item was put", "a worker was replaced", "something on another host"],
)
def test_progress_between_two_snapshots_is_not_a_deadlock(moved: Observation) -> None:
    assert isinstance(judge(moved, moved), Stuck)
    assert judge(moved, LOOP) is None
    assert judge(LOOP, moved) is None


@pytest.mark.parametrize(
    "going_on",
    [
        observation(edge("first", "second", readers=1), edge("second", "first")),
        observation(edge("first", "second", readers=1, woken=1), edge("second", "first", readers=1)),
        observation(edge("first", "second", readers=1, selecting=1), edge("second", "first", readers=1)),
        dataclasses.replace(LOOP, outside=True),
        dataclasses.replace(LOOP, unread=frozenset({RESULT})),
    ],
    ids=["one works", "one was woken", "one selects", "outside", "a result is unread"],
)
def test_worker_that_can_continue_is_not_a_deadlock(going_on: Observation) -> None:
    assert judge(LOOP, going_on) is None
    assert judge(going_on, LOOP) is None
    assert judge(going_on, going_on) is None


def results(writers: int, putting: int = 0, getting: int = 0) -> Observation:
    """Return an observation of a run with an input and two unread results.

    One of these results may have waiting writers.
    """
    return observation(
        edge("input", "work", writers=putting),
        edge("work", "result", writers=writers),
        edge("other", "another", readers=getting),
        unread=frozenset({RESULT, WorkerId("another", 1)}),
        inputs=frozenset({"input"}),
    )


@pytest.mark.parametrize("waits", [{"putting": 1}, {"getting": 1}, {}])
def test_full_result_is_collected_until_the_program_reads_it(waits: dict[str, int]) -> None:
    full = results(writers=1, **waits)
    assert judge(full, full) == {RESULT}


def test_unread_result_is_not_collected_while_it_has_room() -> None:
    assert judge(results(writers=0), results(writers=1)) is None
    assert judge(results(writers=1), results(writers=0)) is None
    assert judge(results(writers=0, putting=1), results(writers=0, putting=1)) is None


# --- when a run is inspected ---


def observations(activities: list[Activity]) -> tuple[int, list[object]]:
    """Return how often a run with two workers was inspected, and the result of each check."""
    times, count, now = iter(activities), [0], [0.0]
    deadlocks = Deadlocks(0.0)

    def closely(unread: frozenset[WorkerId]) -> Observation:
        count[0] += 1
        return LOOP

    found = []
    for _ in activities:
        now[0] += STILL
        found.append(deadlocks.check(now[0], TWO, lambda: next(times), closely))
    return count[0], found


def test_run_that_makes_progress_is_never_inspected() -> None:
    assert observations([Activity(moved, 2, 0) for moved in range(5)]) == (0, [None] * 5)


@pytest.mark.parametrize("activity", [Activity(7, 1, 0), Activity(7, 2, 0, opened=True)])
def test_run_with_a_worker_that_can_continue_is_not_inspected(activity: Activity) -> None:
    assert observations([activity] * 5) == (0, [None] * 5)


def test_run_with_unread_results_is_inspected_if_a_put_waits() -> None:
    unread = frozenset(TWO)
    assert observations([Activity(7, 2, 0, unread=unread)] * 3)[0] == 0
    assert observations([Activity(7, 0, 1, opened=True, unread=unread)] * 3)[0] == 2
    assert observations([Activity(7, 1, 0, unread=frozenset({RESULT}))] * 3)[0] == 0, "it has ended"


def test_run_without_progress_is_inspected_twice() -> None:
    count, found = observations([Activity(7, 1, 1)] * 3)
    assert count == 2
    assert found[:2] == [None, None]
    assert isinstance(found[2], Stuck)


def test_progress_between_two_snapshots_restarts_the_inspection() -> None:
    count, found = observations([Activity(7, 2, 0)] * 2 + [Activity(8, 2, 0)] * 2)
    assert (count, found) == (2, [None] * 4)


def test_other_hosts_are_queried_until_they_have_answered() -> None:
    answers = iter([None, None, LOOP, None, LOOP])
    deadlocks, found = Deadlocks(0.0), []
    for now in (1, 2, 2.01, 2.02, 3, 3.01):
        found.append(deadlocks.check(now, TWO, lambda: Activity(7, 2, 0), lambda _: next(answers)))
    assert found[:-1] == [None] * 5
    assert isinstance(found[-1], Stuck)
    assert next(answers, "all") == "all"


def test_remote_workers_count_as_waiting_only_if_they_report_it() -> None:
    absent = (stage("first"), dataclasses.replace(stage("second"), hosts=("far",)))
    stats = observation(
        edge("first", "second", readers=5), edge("second", "first", readers=1, writers=1), stages=absent
    ).stats
    into, out = Waits(reading={"first": 1}, writing={"second": 2}).put_into(stats).edges
    assert (into.waiting_readers, out.waiting_readers, out.waiting_writers) == (1, 1, 2)


def test_remote_reader_that_reports_no_wait_is_not_waiting() -> None:
    absent = tuple(dataclasses.replace(stage(name), hosts=("far",)) for name in ("first", "second"))
    stats = observation(edge("first", "second", readers=5, writers=1), stages=absent).stats
    (found,) = Waits().put_into(stats).edges
    assert (found.waiting_readers, found.waiting_writers) == (0, 1)


def test_next_check_is_due_one_interval_after_the_last() -> None:
    deadlocks = Deadlocks(10.0)
    assert deadlocks.next_at == 10.0 + STILL
    waiting = Activity(7, 2, 0)
    deadlocks.check(20.0, TWO, lambda: waiting, pytest.fail)  # the first check sees progress
    assert deadlocks.next_at == 20.0 + STILL
    deadlocks.check(30.0, TWO, lambda: waiting, lambda _: None)
    assert deadlocks.next_at <= 30.0  # other hosts have not answered
    deadlocks.check(30.1, TWO, pytest.fail, lambda _: LOOP)
    assert deadlocks.next_at == 30.1 + STILL


def test_observation_asks_only_about_live_workers_with_unread_results() -> None:
    first, second = sorted(TWO, key=str)
    deadlocks = Deadlocks(0.0)
    activity = Activity(7, 0, 1, unread=frozenset({first, RESULT}))
    asked: list[frozenset[WorkerId]] = []
    for now in (1.0, 2.0):
        deadlocks.check(now, frozenset({first, second}), lambda: activity, asked.append)
    assert asked == [{first}]


def test_deadlock_names_a_stage_that_waits_to_put() -> None:
    mixed = observation(
        edge("source", "zip", readers=1), edge("tee", "source", readers=1), edge("tee", "zip", writers=1)
    )
    stuck = judge(mixed, mixed)
    assert isinstance(stuck, Stuck)
    assert stuck.failure.worker == WorkerId("tee", 1)
    stuck = judge(LOOP, LOOP)
    assert isinstance(stuck, Stuck)
    assert stuck.failure.worker == WorkerId("second", 1)  # this worker reads the first channel


def test_run_is_not_inspected_before_the_interval() -> None:
    deadlocks = Deadlocks(0.0)
    assert deadlocks.check(STILL / 2, TWO, pytest.fail, pytest.fail) is None

"""Test that the simulator reproduces known properties of schedules, and reports infeasible orders.

These tests use neither a model nor torch.
"""

from __future__ import annotations

import re
from inspect import cleandoc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowchan.pipelines.sequential.engine.schedule import SCHEDULES, Step, parse, plan
from flowchan.pipelines.sequential.simulate import Simulated, simulate

SIZES = [(workers, chunks) for workers in (1, 2, 3, 4, 7) for chunks in (1, 2, 3, 4, 8, 16)]
TIMES = [(1, 1), (1, 2), (1.5, 0.25)]

sized = pytest.mark.parametrize(("workers", "chunks"), SIZES)
timed = pytest.mark.parametrize(("forward", "backward"), TIMES)


@st.composite
def plans(draw: st.DrawFn) -> list[list[Step]]:
    schedule: Any = draw(st.sampled_from(SCHEDULES))
    workers = draw(st.integers(1, 7))
    most = {"interleaved": 4, "zbv": 2, "dualpipev": 2}.get(schedule, 1)
    parts = draw(st.integers(workers, most * workers))
    return plan(schedule, workers, parts, draw(st.integers(1, 24)))


# --- known properties ---


@pytest.mark.each_pair
@sized
@timed
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b_matches_the_formula(
    schedule: Any, workers: int, chunks: int, forward: float, backward: float
) -> None:
    """The bubble is (W - 1) / (M + W - 1) for all durations of the steps."""
    found = simulate(plan(schedule, workers, workers, chunks), forward, backward)
    assert found.makespan == pytest.approx((chunks + workers - 1) * (forward + backward))
    assert found.bubbles == pytest.approx([(workers - 1) / (chunks + workers - 1)] * workers)
    assert found.bubble == pytest.approx((workers - 1) / (chunks + workers - 1))


@sized
def test_gpipe_holds_every_micro_batch(workers: int, chunks: int) -> None:
    assert simulate(plan("gpipe", workers, workers, chunks)).peaks == (chunks,) * workers


@sized
def test_1f1b_holds_at_most_one_micro_batch_per_later_part(workers: int, chunks: int) -> None:
    expected = tuple(min(chunks, workers - worker) for worker in range(workers))
    assert simulate(plan("1f1b", workers, workers, chunks)).peaks == expected


@timed
@pytest.mark.parametrize("each", [2, 3, 4])
@pytest.mark.parametrize(("workers", "chunks"), [(2, 2), (2, 8), (3, 3), (3, 9), (4, 4), (4, 8)])
def test_bubble_of_interleaved_shrinks_with_parts_per_worker(
    workers: int, chunks: int, each: int, forward: float, backward: float
) -> None:
    """If M is a multiple of W, the bubble is (W - 1) / (v M + W - 1), with v parts per worker."""
    found = simulate(plan("interleaved", workers, each * workers, chunks), forward, backward)
    assert found.bubble == pytest.approx((workers - 1) / (each * chunks + workers - 1))


@pytest.mark.parametrize("each", [2, 3])
@pytest.mark.parametrize(("workers", "chunks"), [(2, 2), (2, 8), (3, 9), (4, 4), (4, 8)])
def test_interleaved_holds_its_lead_plus_one_step(workers: int, chunks: int, each: int) -> None:
    expected = tuple(
        min(2 * (workers - 1 - worker) + (each - 1) * workers + 1, each * chunks) for worker in range(workers)
    )
    assert simulate(plan("interleaved", workers, each * workers, chunks)).peaks == expected


@sized
def test_zbh1_idles_a_third_as_long_as_1f1b(workers: int, chunks: int) -> None:
    """Idle time is (W - 1) (F + I - W) if the number of micro-batches is at least the number of workers."""
    found = simulate(plan("zbh1", workers, workers, chunks), 1, 2)
    if chunks >= workers:
        assert found.makespan == 3 * chunks + workers - 1
    assert max(found.peaks) == min(chunks, workers)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_zbv_workers_wait_only_for_the_first_micro_batch(workers: int, more: int) -> None:
    """The parts of zbv are half as large as the parts of 1f1b, and each worker has two of them."""
    chunks = max(2 * workers - 1, 1) + more
    found = simulate(plan("zbv", workers, 2 * workers, chunks), 1, 2)
    assert found.makespan == 6 * chunks + workers - 1
    assert max(found.peaks) <= 2 * workers


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_dualpipev_idles_like_zbv_and_holds_one_more(workers: int, more: int) -> None:
    chunks = 2 * workers + more
    found = simulate(plan("dualpipev", workers, 2 * workers, chunks), 1, 2)
    assert found.makespan == 6 * chunks + workers - 1
    assert max(found.peaks) <= 2 * workers + 1


def test_durations_can_differ_by_part_and_by_weights() -> None:
    found = simulate([parse("F0 I0 W0"), parse("F0 I0 W0", part=1)], [1, 2], [4, 3], weights=[3, 1])
    ends = [[(event.begin, event.end) for event in events] for events in found.events]
    assert ends == [[(0, 1), (5, 6), (6, 9)], [(1, 3), (3, 5), (5, 6)]]


def test_interleaved_with_a_remainder_is_faster_than_1f1b() -> None:
    """Five micro-batches run on two workers. A part of half the size takes half the time."""
    whole = simulate(plan("1f1b", 2, 2, 5), 1, 2)
    halves = simulate(plan("interleaved", 2, 4, 5), 0.5, 1)
    assert halves.makespan < whole.makespan


def test_staircase_draws_steps_and_idle_time() -> None:
    assert simulate(plan("gpipe", 2, 2, 3), 1, 2).staircase() == cleandoc("""
        0  F0 F1 F2 .  .  .  B0 -  B1 -  B2 -
        1  .  F0 F1 F2 B0 -  B1 -  B2 -  .  .
    """)
    assert simulate(plan("1f1b", 2, 2, 3), 1, 2).staircase() == cleandoc("""
        0  F0 F1 .  .  B0 -  F2 B1 -  .  B2 -
        1  .  F0 B0 -  F1 B1 -  F2 B2 -  .  .
    """)
    assert simulate(plan("interleaved", 2, 4, 2), 1, 1).staircase() == cleandoc("""
        0  0:F0 0:F1 2:F0 2:F1 .    2:B0 .    2:B1 0:B0 0:B1
        1  .    1:F0 1:F1 3:F0 3:B0 3:F1 3:B1 1:B0 1:B1 .
    """)


def test_staircase_requires_whole_units() -> None:
    with pytest.raises(
        ValueError, match=r"^staircase: steps must start and end on whole units of time, got 0.0 to 1.5$"
    ):
        simulate(plan("gpipe", 1, 1, 1), 1.5, 2).staircase()


def test_simulation_allows_forward_steps_only() -> None:
    found = simulate([parse("F0 F1 F2"), parse("F0 F1 F2", part=1)])
    assert found.makespan == 4
    assert found.bubbles == (0.25, 0.25)


def test_empty_plan_takes_no_time() -> None:
    found = simulate([])
    assert (found.makespan, found.bubble, found.peaks, found.staircase()) == (0, 0, (), "")


def test_worker_without_steps_waits_the_whole_time() -> None:
    assert simulate([parse("F0 B0"), []]).bubbles == (0, 1)


def test_simulation_returns_a_timeline_in_milliseconds() -> None:
    line = simulate(plan("1f1b", 2, 2, 4)).timeline("four")
    assert line.title == "four"
    assert len(line.events) == 16
    assert line.seconds == pytest.approx(0.015)
    assert line.busy() == pytest.approx({0: 0.8, 1: 0.8})


def test_picture_in_the_guide_matches_its_code() -> None:
    picture = Path(__file__).parents[2] / "docs" / "images" / "schedule.svg"
    drawn = simulate(plan("1f1b", 4, 4, 8)).timeline("1f1b: 4 parts, 8 chunks").svg()
    assert picture.read_text(encoding="utf-8") == drawn


# --- every schedule is feasible ---


@settings(deadline=None)
@given(plans(), st.floats(0.1, 10), st.floats(0.1, 10), st.sampled_from([None, 1, 2, 3]))
def test_every_schedule_is_feasible_with_any_capacity(
    lists: list[list[Step]], forward: float, backward: float, capacity: int | None
) -> None:
    found = simulate(lists, forward, backward, capacity)
    assert [[(event.op, event.chunk, event.part) for event in events] for events in found.events] == [
        [(step.op, step.chunk, step.part) for step in one] for one in lists
    ]
    check_times(found)


def check_times(found: Simulated) -> None:
    """Assert that a worker's steps do not overlap, and that each step follows its inputs."""
    begin = {(event.op, event.chunk, event.part): event.begin for events in found.events for event in events}
    end = {(event.op, event.chunk, event.part): event.end for events in found.events for event in events}
    for events in found.events:
        assert all(one.end <= other.begin for one, other in pairwise(events))
    for (op, chunk, part), when in begin.items():
        needed: list[tuple[Any, ...]] = [("F", chunk, part - 1)]
        if op in "BI":
            needed = [("F", chunk, part), ("B", chunk, part + 1), ("I", chunk, part + 1)]
        if op == "W":
            needed = [("I", chunk, part)]
        assert all(end[one] <= when for one in needed if one in end)


@sized
def test_capacity_1_never_makes_a_schedule_faster(workers: int, chunks: int) -> None:
    lists = plan("gpipe", workers, workers, chunks)
    assert simulate(lists, capacity=1).makespan >= simulate(lists).makespan


def test_message_that_arrives_early_is_kept_for_later() -> None:
    """The second worker needs the last micro-batch first, over a channel with capacity 1."""
    found = simulate([parse("F0 F1 F2"), parse("F2 F1 F0", part=1)], capacity=1)
    assert [event.chunk for event in found.events[1]] == [2, 1, 0]
    assert found.events[1][0].begin == 3


def test_sender_waits_while_the_channel_is_full() -> None:
    """The second worker has two parts, so it receives a micro-batch every two time units."""
    lists = [parse("F0 F1 F2 F3 F4"), parse("1:F0 2:F0 1:F1 2:F1 1:F2 2:F2 1:F3 2:F3 1:F4 2:F4")]
    wide, narrow = simulate(lists), simulate(lists, capacity=1)
    assert [event.begin for event in wide.events[0]] == [0, 1, 2, 3, 4]
    # F3 is finished at 4, but the channel has room for its result only at 5, when the result of F2 is
    # received.
    assert [event.begin for event in narrow.events[0]] == [0, 1, 2, 3, 5]
    assert wide.makespan == narrow.makespan == 11


# --- infeasible orders ---


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (["F0 F0"], "worker 0 must do each step once, got 0:F0 twice"),
        (["B0 F0"], "worker 0 must do 0:F0 before 0:B0"),
        (["B0"], "worker 0 must do 0:F0 before 0:B0"),
        (["1:F0 0:F0"], "worker 0 must do 0:F0 before 1:F0"),
        (["F0 F1", "F2"], "part 0 must be on one worker, got 0 and 1"),
        (["F0 I0 B0"], "worker 0 must do each step once, got 0:B0 twice"),
        (["F0 W0 I0"], "worker 0 must do 0:I0 before 0:W0"),
        (["0:F0", "2:F0"], "worker 1 needs 1:F0 for 2:F0, but no worker has part 1"),
        (["0:F0", "1:F1"], "deadlock: worker 1 waits before 1:F1 for 0:F1 from worker 0"),
        (
            ["0:F0 0:B0 0:F1 0:B1", "1:F0 1:F1 1:B0 1:B1"],
            "deadlock: worker 0 waits before 0:B0 for 1:B0 from worker 1; worker 1 waits before "
            "1:F1 for 0:F1 from worker 0",
        ),
    ],
)
def test_infeasible_order_raises_and_lists_waiting_workers(lists: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^simulate: {re.escape(message)}$"):
        simulate([parse(one) for one in lists])


def test_deadlock_due_to_capacity_is_detected() -> None:
    """Each worker sends four micro-batches to the other before it receives any."""
    lists = [parse("0:F0 0:F1 0:F2 0:F3 2:F0 2:F1 2:F2 2:F3"), parse("1:F0 1:F1 1:F2 1:F3")]
    with pytest.raises(
        ValueError,
        match=r"^simulate: deadlock: worker 0 waits after 0:F3 for room in its channel to worker 1; "
        r"worker 1 waits after 1:F1 for room in its channel to worker 0$",
    ):
        simulate(lists, capacity=1)
    assert simulate(lists, capacity=2).makespan == simulate(lists).makespan == 8


@settings(deadline=None)
@given(plans(), st.data())
def test_missing_step_raises(lists: list[list[Step]], data: st.DataObject) -> None:
    """Only steps without a consumer may be missing: gradients of weights, and backward passes of the first
    part."""
    worker = data.draw(st.integers(0, len(lists) - 1))
    missing = data.draw(st.sampled_from(lists[worker]))
    lists[worker] = [step for step in lists[worker] if step != missing]
    if missing.op == "W" or (missing.op == "B" and missing.part == 0):
        simulate(lists)
    else:
        with pytest.raises(ValueError, match=r"^simulate: "):
            simulate(lists)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "simulate: capacity must be at least 1, or None for no limit, got 0"),
        ({"forward": 0}, "simulate: forward must be a time greater than 0, got 0"),
        ({"backward": -1.0}, "simulate: backward must be a time greater than 0, got -1.0"),
        ({"forward": float("nan")}, "simulate: forward must be a time greater than 0, got nan"),
        ({"weights": 2.0}, "simulate: weights must be less than backward=2.0, got 2.0"),
        ({"backward": []}, "simulate: backward must have a time for each of 1 parts, got []"),
    ],
)
def test_simulate_rejects_a_wrong_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        simulate(plan("gpipe", 1, 1, 1), **arguments)

"""Test the text of ``run.explain()``, and when all workers wait, on hand-made statistics."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flowchan.channel.channel import Holder
from flowchan.run.policy.explain import all_wait, amount, explain, starting_text
from flowchan.run.policy.stats import EdgeStats, RunStats, StageStats


def stage(name: str, alive: int = 1, kind: str = "map", **values: Any) -> StageStats:
    made = StageStats(name, kind, "thread", 1, alive, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    return dataclasses.replace(made, **values)


def edge(writer: str, reader: str | None, **values: Any) -> EdgeStats:
    return dataclasses.replace(EdgeStats(writer, writer, reader, "threads", 1, 4, 0, 0.0), **values)


def stats(*stages: StageStats, edges: tuple[EdgeStats, ...] = ()) -> RunStats:
    return RunStats("sample", "running", 12.34, stages, edges, None)


# --- whether all workers wait ---


def test_worker_waits_at_any_channel_of_its_stage() -> None:
    first, second = (
        edge("numbers", "zip", waiting_readers=1), edge("zip", "sink", waiting_readers=1, waiting_writers=2)
    )  # fmt: skip
    assert all_wait(stats(stage("zip", alive=3), stage("sink"), edges=(first, second)))
    assert not all_wait(stats(stage("zip", alive=4), stage("sink"), edges=(first, second)))
    assert not all_wait(stats(stage("zip", alive=3), stage("sink", alive=2), edges=(first, second)))


def test_more_waits_than_live_workers_are_a_wait() -> None:
    """A worker counts at a channel that was read before the worker ended."""
    assert all_wait(stats(stage("zip"), edges=(edge("numbers", "zip", waiting_readers=2),)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, True), ({"woken": 1}, False), ({"selecting": 1}, False), ({"awaiting": 1}, True),
        ({"selecting": 1, "awaiting": 1}, True), ({"selecting": 2, "awaiting": 1}, False),
    ],
)  # fmt: skip
def test_worker_that_selects_or_was_woken_may_continue(values: dict[str, int], expected: bool) -> None:
    assert all_wait(stats(stage("b"), edges=(edge("a", "b", waiting_readers=1, **values),))) == expected


def test_ended_stage_does_not_have_to_wait() -> None:
    waiting = edge("a", "b", waiting_readers=1)
    assert all_wait(stats(stage("a", alive=0), stage("b"), edges=(waiting,)))
    assert not all_wait(stats(stage("a", alive=0), stage("b", alive=0), edges=(waiting,)))
    assert not all_wait(stats())


# --- the text ---


def does(one: StageStats, *others: StageStats, edges: tuple[EdgeStats, ...] = ()) -> str:
    """Return what the explanation says about the first stage."""
    head, line, *_ = explain(stats(one, *others, edges=edges)).splitlines()
    assert head == "graph 'sample' (running for 12.3 s):"
    return line


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"in_hand": 1, "busy": 0.5}, "  'work' works on 1 item (busy 50 %)"),
        ({"in_hand": 0}, "  'work' works on 0 items (busy 0 %)"),
        ({"in_hand": 2, "alive": 3}, "  'work' ×3 works on 2 items (busy 0 %)"),
        ({"hosts": ("a", "b")}, "  'work' on a, b works on 0 items (busy 0 %)"),
        ({"starting": 1}, "  'work' is starting: no worker has built its callable yet"),
        (
            {"starting": 1, "alive": 3},
            "  'work' ×3 works on 0 items (busy 0 %); 1 of its 3 workers are starting",
        ),
        (
            {"kind": "collect"},
            "  'work' waits for the program to read its items with run.iter() or run.wait()",
        ),
        ({"kind": "collect", "in_hand": 1}, "  'work' works on 1 item (busy 0 %)"),
    ],
)
def test_line_of_a_stage_shows_its_work(values: dict[str, Any], text: str) -> None:
    assert does(stage("work", **values)) == text


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        (stage("next", busy=0.25), "'next' is busy 25 %"),
        (stage("next", starting=1), "'next' is starting"),
        (stage("next", kind="collect"), "'next' waits for the program to read its items"),
        (stage("next", alive=0), "'next' has ended"),
    ],
)
def test_line_of_a_blocked_writer_shows_its_reader(reader: StageStats, text: str) -> None:
    blocked = edge("work", "next", waiting_writers=1, writers_waiting_for=1.25)
    assert does(stage("work"), reader, edges=(blocked,)) == (
        f"  'work' waits to put into 'work' (1 of 4) for 1.2 s, whose reader {text}"
    )


@pytest.mark.parametrize(
    ("writer", "text"),
    [
        (stage("orders", alive=0, kind="input"), "'orders' is filled from outside"),
        (stage("orders", alive=0), "'orders' has ended"),
    ],
)
def test_line_of_a_waiting_reader_shows_its_writer(writer: StageStats, text: str) -> None:
    waiting = edge("orders", "work", waiting_readers=1, readers_waiting_for=2.0, inside=0)
    assert does(stage("work"), writer, edges=(waiting,)) == (
        f"  'work' waits for an item from 'orders' (0 of 4) for 2.0 s, whose writer {text}"
    )


def test_line_lists_all_waits_of_a_stage_and_no_others() -> None:
    edges = (
        edge("left", "zip", waiting_readers=1), edge("right", "zip"), edge("zip", "next", waiting_writers=1),
        edge("left", "other", waiting_readers=1, waiting_writers=1),
    )  # fmt: skip
    assert does(stage("zip"), edges=edges) == (
        "  'zip' waits for an item from 'left' (1 of 4) for 0.0 s, whose writer 'left' has ended; "
        "waits to put into 'zip' (1 of 4) for 0.0 s, whose reader 'next' has ended"
    )


def test_full_channel_names_the_processes_that_hold_its_memory() -> None:
    full = edge(
        "work", "next", waiting_writers=1, short_of_bytes=True, bytes=2_500_000, share=3_000_000,
        holders=(Holder(11, 2, 1_500_000), Holder(12, 1, 500_000)),
    )  # fmt: skip
    assert (
        "into 'work' (1 of 4; 2.5 MB of its share of the run's memory, 3.0 MB; process 11 holds 2 blocks, "
        "1.5 MB; process 12 holds 1 blocks, 0.5 MB) for"
    ) in does(stage("work"), edges=(full,))


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0.0 KB"), (1_500, "1.5 KB"), (123_400, "123.4 KB"), (10**6 - 1, "1,000.0 KB"), (10**6, "1.0 MB"),
        (123_400_000, "123.4 MB"), (10**9 - 1, "1,000.0 MB"), (10**9, "1.0 GB"),
        (12_345 * 10**8, "1,234.5 GB"),
    ],
)  # fmt: skip
def test_amount_has_the_unit_that_fits(number: int, text: str) -> None:
    assert amount(number) == text


@pytest.mark.parametrize(
    ("alive", "starting", "text"), [(2, 0, ""), (2, 1, "1 starting"), (2, 2, "starting"), (0, 0, "")]
)
def test_starting_text_counts_only_workers_next_to_others(alive: int, starting: int, text: str) -> None:
    assert starting_text(stage("work", alive=alive, starting=starting)) == text

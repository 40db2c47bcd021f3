"""Test R8 (Statistics) for runs that fail, are aborted, are stopped or lose a worker.

Each item that was put into a channel must be out, failed, unwanted, discarded, or left in a channel.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from runs import Gate, everywhere, stage_of, waits
from support.waiting import wait_until

from flowchan import Graph, In, Out, Run, RunError


def same(item: Any) -> Any:
    return item


def accounts_for_every_item(run: Run) -> None:
    """Check that the counts of all stages and channels agree with each other and with the report."""
    stats = run.stats()
    report = run.report()
    assert "MISSING" not in report
    assert "TOO MANY" not in report
    assert "≠" not in report
    for edge in stats.edges:
        assert edge.put == edge.passed + edge.left, edge
    for stage in stats.stages:
        into = [edge for edge in stats.edges if edge.reader == stage.name]
        out = [edge for edge in stats.edges if edge.writer == stage.name]
        assert stage.items_in == sum(edge.passed for edge in into)
        if stage.kind == "map":
            assert stage.items_out == sum(edge.put for edge in out)
        if stage.kind in ("map", "sink"):
            fates = stage.items_out + stage.failed + stage.unwanted + stage.discarded + stage.in_hand
            assert stage.items_in == fates, stage


@pytest.mark.parametrize("ending", ["failed", "killed", "aborted", "stopped"])
@pytest.mark.parametrize("workers", [1, 3])
@everywhere
def test_item_balance_is_complete_after_a_run_that_ended_early(on: str, workers: int, ending: str) -> None:
    if ending == "killed" and on == "thread":
        pytest.skip("threads do not die")
    gate, begun = Gate(), Gate()

    def hold(item: int) -> int:
        if item >= 40:
            begun.wait()
            gate.wait()
        return item

    def work(item: int) -> int:
        if item == 30 and ending == "failed":
            raise ValueError("wrong")
        if item == 30 and ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    graph = Graph("account")
    held = graph.source(itertools.count).map(hold, on=on, workers=workers, capacity=8, name="hold")
    done = held.map(work, on=on, capacity=4, restarts=0, name="work")
    done.sink(same, on=on, name="end")
    run = graph.start()
    if ending in ("aborted", "stopped"):
        begun.wait_held(workers)
        begun.open()
        gate.wait_held(workers)
        getattr(run, {"aborted": "abort", "stopped": "stop"}[ending])()
        wait_until(lambda: run.state in ("aborted", "stopping"))
    begun.open()
    gate.open()
    if ending in ("aborted", "stopped"):
        run.wait()
    else:
        with pytest.raises(RunError):
            run.wait()
    accounts_for_every_item(run)
    left = sum(edge.left for edge in run.stats().edges)
    assert left > 0 or ending == "stopped"
    assert stage_of(run, "work").failed == (ending == "failed")
    assert stage_of(run, "work").discarded == (ending == "killed")
    if ending == "aborted":
        assert stage_of(run, "hold").discarded == workers
        assert f" out + {workers} discarded" in run.report()
    if ending == "stopped":
        assert left == 0


@everywhere
@pytest.mark.parametrize("kind", ["sink", "filter", "flat_map"])
def test_item_being_processed_when_the_channel_breaks_counts_as_discarded(on: str, kind: str) -> None:
    gate = Gate()

    def hold(item: int) -> Any:
        gate.wait()
        return [item] if kind == "flat_map" else item

    graph = Graph("account")
    stream = graph.source(range(100), capacity=8, name="numbers")
    made = getattr(stream, kind)(hold, on=on, name="hold")
    if made is not None:
        made.sink(same)
    run = graph.start()
    gate.wait_held()
    waits(run, "numbers", writers=1)
    run.abort()
    wait_until(lambda: run.state == "aborted")
    gate.open()
    run.wait()
    accounts_for_every_item(run)
    found = stage_of(run, "hold")
    assert (found.items_in, found.items_out, found.discarded) == (1, 0, 1)
    edge = run.stats().edges[0]
    assert edge.left >= 7
    row = next(line.split() for line in run.report().splitlines() if line.startswith("numbers  numbers"))
    assert row[4:8] == ["0/8", str(1 + edge.left), "1", str(edge.left)]


@everywhere
def test_item_of_a_killed_sink_counts_as_discarded(on: str) -> None:
    if on == "thread":
        pytest.skip("threads do not die")

    def die(item: int) -> None:
        if item == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    graph = Graph("account")
    graph.source(range(100), capacity=8).sink(die, on=on, restarts=0, name="end")
    run = graph.start()
    with pytest.raises(RunError):
        run.wait()
    accounts_for_every_item(run)
    assert (stage_of(run, "end").items_in, stage_of(run, "end").discarded) == (6, 1)


def test_items_left_in_channels_by_take_are_counted() -> None:
    graph = Graph("account")
    graph.source(range(100), capacity=8, name="numbers").map(same, capacity=8).take(3).collect()
    run = graph.start()
    run.wait()
    accounts_for_every_item(run)
    assert run.stats().edges[0].left + run.stats().edges[1].left > 0


@everywhere
def test_outputs_that_wait_for_earlier_items_count_as_left(on: str) -> None:
    gate = Gate()

    def hold_first(item: int) -> int:
        if item == 0:
            gate.wait()
        return item

    graph = Graph("account")
    graph.source(range(100)).map(hold_first, on=on, workers=2, capacity=4, name="work").sink(same)
    run = graph.start()
    gate.wait_held()
    waits(run, "work", readers=1, writers=1)
    run.abort()
    wait_until(lambda: run.state == "aborted")
    gate.open()
    run.wait()
    accounts_for_every_item(run)
    found = stage_of(run, "work")
    assert found.discarded >= 2
    assert found.items_in == found.discarded + run.stats().edges[1].left > 2


def test_general_stage_reports_its_discarded_items() -> None:
    gate = Gate()

    def pairs(items: In[int], out: Out[int]) -> None:
        for item in items:
            gate.wait()
            out.put(item)

    def numbers() -> Iterator[int]:
        yield from range(5)

    graph = Graph("account")
    graph.stage(pairs, graph.source(numbers), name="pairs").sink(same)
    run = graph.start()
    gate.wait_held()
    run.abort()
    wait_until(lambda: run.state == "aborted")
    gate.open()
    run.wait()
    accounts_for_every_item(run)
    assert stage_of(run, "pairs").discarded == 1
    assert "1 in, 0 out + 1 discarded" in run.report()

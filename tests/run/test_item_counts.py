"""Test R8 (Statistics): ``run.stats()`` at any time, and ``run.report()`` after the run.

The number of items in must equal items out plus failed items.
"""

from __future__ import annotations

import itertools
import select
from collections.abc import Iterator
from typing import Any

import pytest
from runs import Gate, everywhere, stage_of
from support.waiting import wait_until

from flowchan import Graph, In, Out, Run, RunError, StageStats


def fail_odd(item: int) -> int:
    if item % 2:
        raise ValueError(item)
    return item


def is_small(item: int) -> bool:
    return item < 5


def same(item: int) -> int:
    return item


def finished(graph: Graph) -> Run:
    run = graph.start()
    run.wait()
    return run


def balance(stage: StageStats) -> int:
    return stage.items_in - stage.items_out - stage.failed - stage.unwanted - stage.in_hand


@everywhere
def test_items_in_equal_items_out_plus_failed(on: Any) -> None:
    graph = Graph("r8")
    mapped = graph.source(range(100)).map(fail_odd, on=on, workers=2, name="map")
    mapped.sink(same, on=on, name="sink")
    mapped.errors.sink(same, name="bad")
    run = finished(graph)
    found = stage_of(run, "map")
    assert (found.items_in, found.items_out, found.failed) == (100, 50, 50)
    assert [stage_of(run, name).items_in for name in ("sink", "bad")] == [50, 50]
    assert "MISSING" not in run.report()
    assert "100 = 50 out + 50 failed" in run.report()


@everywhere
def test_item_that_ended_the_run_counts_as_failed(on: Any) -> None:
    graph = Graph("r8")
    graph.source([1]).map(fail_odd, on=on, name="map").sink(id)
    run = graph.start()
    with pytest.raises(RunError):
        run.wait()
    found = stage_of(run, "map")
    assert (found.items_in, found.items_out, found.failed) == (1, 0, 1)
    assert run.stats().state == "failed"


@everywhere
@pytest.mark.parametrize("workers", [1, 3])
def test_item_balance_includes_unwanted_items(workers: int, on: Any) -> None:
    graph = Graph("r8")
    graph.source(itertools.count).map(same, on=on, workers=workers, name="map").take(7).collect()
    run = finished(graph)
    found = stage_of(run, "map")
    assert balance(found) == 0
    assert found.items_out >= 7
    assert "MISSING" not in run.report()


def test_item_balance_includes_items_of_an_ended_branch() -> None:
    graph = Graph("r8")
    even, odd = graph.source(range(1000)).partition(same, 2, name="partition", capacity=1)
    even.take(1).collect()
    odd.collect()
    run = finished(graph)
    assert balance(stage_of(run, "partition")) == 0
    assert stage_of(run, "partition").unwanted > 0
    assert "MISSING" not in run.report()


@everywhere
def test_item_balance_of_a_filter_includes_dropped_items(on: Any) -> None:
    graph = Graph("r8")
    graph.source(range(20)).filter(is_small, on=on, name="filter").collect()
    run = finished(graph)
    assert "20 = 5 out + 15 dropped" in run.report()


@everywhere
def test_retries_are_counted(on: Any) -> None:
    graph = Graph("r8")
    mapped = graph.source(range(4)).map(fail_odd, on=on, retries=2, name="map")
    mapped.sink(id)
    mapped.errors.sink(id)
    found = stage_of(finished(graph), "map")
    assert (found.retried, found.failed) == (4, 2)


@everywhere
def test_stats_of_a_running_graph_show_items_being_processed(on: Any) -> None:
    gate = Gate()

    def hold(item: int) -> int:
        gate.wait()
        return item

    graph = Graph("r8")
    graph.source(range(10)).map(hold, on=on, workers=2, name="hold").sink(id, name="sink")
    run = graph.start()
    gate.wait_held(2)
    found = stage_of(run, "hold")
    assert (found.alive, found.items_in, found.items_out, found.in_hand) == (2, 2, 0, 2)
    assert run.stats().state == "running"
    assert "2 in hand" in run.report()
    gate.open()
    run.wait()
    assert (stage_of(run, "hold").items_out, stage_of(run, "hold").in_hand) == (10, 0)


def test_stats_show_the_fill_of_a_channel() -> None:
    gate = Gate()
    graph = Graph("r8")
    graph.source(range(100), name="numbers", capacity=5).sink(lambda _: gate.wait())
    run = graph.start()
    gate.wait_held()
    (edge,) = run.stats().edges
    wait_until(lambda: run.stats().edges[0].inside == 5)
    assert (edge.name, edge.capacity, edge.transport) == ("numbers", 5, "threads")
    gate.open()
    run.wait()
    assert run.stats().edges[0].passed == 100


@everywhere
def test_time_fractions_are_relative_to_working_time(on: Any) -> None:
    """Even the source, which ends at once, has time fractions between 0 and 1."""
    graph = Graph("r8")
    graph.source(range(20), on=on, name="quick").map(slow, on=on, workers=2, name="slow").sink(same, on=on)
    run = finished(graph)
    for stage in run.stats().stages:
        assert stage.seconds.working > 0
        shares = (stage.busy, stage.waiting_input, stage.waiting_output)
        assert all(0 <= share <= 1 for share in shares)
        assert sum(shares) == pytest.approx(1)
    assert stage_of(run, "quick").seconds.working < 0.5 * stage_of(run, "slow").seconds.working


def slow(item: int) -> int:
    """Sleep for 50 ms in a system call that releases the interpreter lock."""
    select.select([], [], [], 0.05)
    return item


def slow_elements() -> Iterator[int]:
    for number in range(20):
        yield slow(number)


class SlowToBegin:
    """Stage function that takes longer to build than to process its items."""

    def __init__(self) -> None:
        select.select([], [], [], 1.0)

    def __call__(self, item: int) -> int:
        return item


@everywhere
@pytest.mark.parametrize("items", [10, 60])
def test_bottleneck_is_found_after_few_items(items: int, on: Any) -> None:
    """The source ends long before the slow stage, but the slow stage is still the bottleneck."""
    graph = Graph("r8")
    graph.source(range(items), on=on).map(same, on=on).map(slow, name="slow", on=on).map(
        same, on=on
    ).collect()
    run = finished(graph)
    assert run.stats().bottleneck == "slow"
    assert "bottleneck: slow (busy" in run.report()


@everywhere
def test_source_with_slow_iterator_is_the_bottleneck(on: Any) -> None:
    graph = Graph("r8")
    graph.source(slow_elements, name="elements", on=on).map(same, on=on).collect()
    assert finished(graph).stats().bottleneck == "elements"


def test_more_workers_reduce_the_load_of_a_stage() -> None:
    """Four workers need 0.25 s for 20 items of 50 ms each. The next stage, with one worker, needs 1 s."""
    graph = Graph("r8")
    graph.source(range(20)).map(slow, workers=4, name="wide").map(slow, name="narrow").collect()
    assert finished(graph).stats().bottleneck == "narrow"


@everywhere
def test_time_to_build_a_worker_does_not_count_as_busy(on: Any) -> None:
    graph = Graph("r8")
    graph.source(range(10)).map(SlowToBegin, name="begins", on=on).map(slow, name="slow").collect()
    assert finished(graph).stats().bottleneck == "slow"


def test_program_that_reads_slowly_is_the_bottleneck() -> None:
    graph = Graph("r8")
    result = graph.source(range(20)).map(same).collect()
    with graph.start() as run:
        for item in run.iter(result):
            slow(item)
    assert run.stats().bottleneck == result.stage


def test_idle_graph_has_no_bottleneck() -> None:
    graph = Graph("r8")
    graph.input(name="numbers").map(same, name="idle").sink(same)
    with graph.start() as run:
        wait_until(lambda: run.stats().elapsed > 0.3 and stage_of(run, "idle").busy < 0.005)
        wait_until(lambda: run.stats().bottleneck is None)
        assert "bottleneck: none found" in run.report()


def test_bottleneck_is_named() -> None:
    gate = Gate()

    def held(item: int) -> int:
        gate.wait()
        return item

    graph = Graph("r8")
    graph.source(range(50), capacity=1).map(same, capacity=1).map(held, name="slow").sink(id)
    run = graph.start()
    gate.wait_held()
    wait_until(lambda: run.stats().bottleneck == "slow")
    assert "bottleneck: slow" in run.report()
    gate.open()
    run.wait()


@pytest.mark.parametrize("ending", ["done", "stopped", "aborted", "failed"])
def test_stats_show_the_final_state_of_a_run(ending: str) -> None:
    graph = Graph("r8")
    numbers = graph.input()
    numbers.map(fail_odd).sink(id)
    run = graph.start()
    if ending == "failed":
        run[numbers].put(1)
        with pytest.raises(RunError):
            run.wait()
    else:
        {"done": run[numbers].close, "stopped": run.stop, "aborted": run.abort}[ending]()
        run.wait()
    stats = run.stats()
    assert stats.state == ending
    assert all(stage.alive == 0 for stage in stats.stages)
    assert run.stats() == stats, "the statistics stay as they were at the end"
    assert ending in run.report()


def test_items_of_a_general_stage_are_counted() -> None:
    def pair(items: In[int], out: Out[tuple[int, int]]) -> None:
        for item in items:
            out.put((item, items.get()))

    graph = Graph("r8")
    graph.stage(pair, graph.source(range(10))).collect()
    found = stage_of(finished(graph), "pair")
    assert (found.items_in, found.items_out) == (10, 5)


def test_items_of_merge_tee_and_zip_are_counted() -> None:
    graph = Graph("r8")
    merged = graph.merge(graph.source(range(5)), graph.source(range(5)))
    one, other = merged.tee(2)
    one.zip(other).collect()
    run = finished(graph)
    found = {
        name: (stage_of(run, name).items_in, stage_of(run, name).items_out)
        for name in ("merge", "tee", "zip")
    }
    assert found == {"merge": (10, 10), "tee": (10, 10), "zip": (20, 10)}
    assert "MISSING" not in run.report()

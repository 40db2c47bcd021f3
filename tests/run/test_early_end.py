"""Test R2 (Early end): when a reader leaves, the stages before it are stopped without an error."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from runs import Gate, everywhere

from flowchan import Graph, In, Out, RunError


def same(item: int) -> int:
    return item


def forever() -> Iterator[int]:
    return itertools.count()


@everywhere
def test_take_stops_an_endless_source(on: Any) -> None:
    graph = Graph("r2")
    first = graph.source(forever, on=on).map(same, on=on).take(5).collect()
    assert graph.run()[first] == [0, 1, 2, 3, 4]


@everywhere
def test_take_stops_several_earlier_workers(on: Any) -> None:
    graph = Graph("r2")
    first = graph.source(forever, on=on, capacity=2).map(same, on=on, workers=3, capacity=1).take(5).collect()
    assert graph.run()[first] == [0, 1, 2, 3, 4]


def test_sink_that_returns_stops_earlier_stages() -> None:
    seen: list[int] = []

    def until_three(items: In[int]) -> None:
        for item in items:
            seen.append(item)
            if item == 3:
                return

    graph = Graph("r2")
    graph.stage(until_three, graph.source(forever).map(same))
    graph.run()
    assert seen == [0, 1, 2, 3]


def test_stopped_source_is_cleaned_up() -> None:
    cleaned = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            cleaned.set()

    graph = Graph("r2")
    first = graph.source(source).take(2).collect()
    graph.run()
    assert first
    assert cleaned.is_set()


@everywhere
def test_stopped_callable_class_is_closed(on: Any) -> None:
    closed = Gate()

    class Model:
        def __init__(self, closed: Gate) -> None:
            self.closed = closed

        def __call__(self, item: int) -> int:
            return item

        def close(self) -> None:
            self.closed.open()

    graph = Graph("r2")
    first = graph.source(forever).map(functools.partial(Model, closed), on=on).take(2).collect()
    assert graph.run()[first] == [0, 1]
    closed.wait()


def test_shortest_stream_of_a_zip_stops_the_others() -> None:
    graph = Graph("r2")
    pairs = graph.source(forever).zip(graph.source("ab")).collect()
    assert graph.run()[pairs] == [(0, "a"), (1, "b")]


def test_ended_branch_of_a_tee_does_not_affect_the_others() -> None:
    graph = Graph("r2")
    short, long = graph.source(range(1000)).tee(2, capacity=1)
    few, all_of_them = short.take(3).collect(), long.collect()
    results = graph.run()
    assert results[few] == [0, 1, 2]
    assert results[all_of_them] == list(range(1000))


def test_tee_without_branches_stops_its_source() -> None:
    graph = Graph("r2")
    one, other = graph.source(forever).tee(2)
    first, second = one.take(3).collect(), other.take(30).collect()
    results = graph.run()
    assert (len(results[first]), len(results[second])) == (3, 30)


def test_ended_branch_of_a_partition_does_not_affect_the_others() -> None:
    graph = Graph("r2")
    even, odd = graph.source(range(1000)).partition(lambda item: item, 2, capacity=1)
    few, rest = even.take(1).collect(), odd.collect()
    results = graph.run()
    assert results[few] == [0]
    assert results[rest] == list(range(1, 1000, 2))


def test_merge_stops_all_its_streams() -> None:
    graph = Graph("r2")
    some = graph.merge(graph.source(forever), graph.source(forever), graph.source([])).take(100).collect()
    assert len(graph.run()[some]) == 100


@everywhere
def test_early_end_reaches_the_source_while_another_branch_still_runs(on: Any) -> None:
    ended = threading.Event()

    def ticks_once(out: Out[int]) -> None:
        out.put(1)
        while not out.closed:
            pass
        ended.set()

    graph = Graph("r2")
    one = graph.stage(ticks_once).map(same, on=on, workers=2).filter(same).take(1).collect()
    other = graph.source(lambda: [ended.wait()]).collect()
    results = graph.run()
    assert (results[one], results[other]) == ([1], [True])


def test_source_stops_if_the_iteration_over_results_ends_early() -> None:
    graph = Graph("r2")
    numbers = graph.source(forever).map(same).collect()
    with graph.start() as run:
        for item in run.iter(numbers):
            if item == 3:
                break
    assert run.stats().state == "done"


def test_take_of_zero_items_ends_at_once() -> None:
    graph = Graph("r2")
    none = graph.source(forever).take(0).collect()
    assert graph.run()[none] == []


@pytest.mark.parametrize("restricted", ["map", "filter", "flat_map"])
def test_failure_ends_the_run_once_errors_have_no_reader(
    restricted: str,
) -> None:
    left = threading.Event()

    def fail(item: int) -> Any:
        if item > 0:
            left.wait()
        raise ValueError(f"item {item}")

    def read_one(errors: In[Any]) -> None:
        errors.get()
        errors.close()
        left.set()

    graph = Graph("r2")
    failing = getattr(graph.source(range(3)), restricted)(fail)
    failing.sink(print)
    graph.stage(read_one, failing.errors)
    with pytest.raises(RunError) as caught:
        graph.run()
    assert [str(error.__cause__) for error in caught.value.exceptions] == ["item 1"]


@pytest.mark.usefixtures("short_grace")
def test_source_blocked_on_a_device_is_abandoned_with_a_warning() -> None:
    device = threading.Event()

    def camera() -> Iterator[int]:
        yield 1
        device.wait()

    graph = Graph("r2")
    one = graph.source(camera).take(1).collect()
    with pytest.warns(  # noqa: PT031
        RuntimeWarning, match="worker camera 1 of graph 'r2' is still running code that cannot be interrupted"
    ):
        run = graph.start()
        assert run.wait()[one] == [1]
        run._supervisor._thread.join()
    device.set()


@pytest.mark.usefixtures("short_grace")
def test_source_process_blocked_on_a_device_is_ended() -> None:
    device = Gate()

    def camera() -> Iterator[int]:
        yield 1
        device.wait()

    graph = Graph("r2")
    one = graph.source(camera, on="process").take(1).collect()
    run = graph.start()
    assert run.wait()[one] == [1]
    assert run.stats().state == "done"

"""Test R1 (Cascade).

When a source ends, its channel closes. Each stage drains its inputs, finishes, and closes its outputs. The
run ends when all sinks have ended.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from runs import Gate, everywhere, stage_of
from support.waiting import wait_until

from flowchan import Graph, In, Out


def double(item: int) -> int:
    return 2 * item


def is_even(item: int) -> bool:
    return item % 2 == 0


def twice(item: int) -> list[int]:
    return [item, item]


@everywhere
def test_run_ends_after_every_item_when_its_source_ends(on: Any) -> None:
    graph = Graph("r1")
    doubled = graph.source(range(1000), on=on).map(double, on=on, workers=2).collect()
    assert graph.run()[doubled] == [2 * item for item in range(1000)]


@everywhere
def test_empty_source_ends_the_run(on: Any) -> None:
    graph = Graph("r1")
    doubled = graph.source([], on=on).map(double, on=on).collect()
    assert graph.run()[doubled] == []


@everywhere
def test_every_operator_drains_its_inputs_and_closes_its_outputs(on: Any) -> None:
    graph = Graph("r1")
    evens = graph.source(range(100), on=on).filter(is_even, on=on).flat_map(twice, on=on)
    left, right = evens.batch(7).unbatch().tee(2)
    low, high = left.partition(is_even, 2, on=on)
    pairs = graph.merge(low, high).zip(right).collect()
    assert len(graph.run()[pairs]) == 100


def test_stage_closes_its_output_after_its_input_is_drained() -> None:
    order: list[str] = []

    def first(items: In[int], out: Out[int]) -> None:
        for item in items:
            out.put(item)
        order.append("first has drained")

    def second(items: In[int]) -> None:
        for _ in items:
            pass
        order.append("second has drained")

    def source() -> Iterator[int]:
        yield from range(10)
        order.append("source has ended")

    graph = Graph("r1")
    graph.stage(second, graph.stage(first, graph.source(source)))
    graph.run()
    assert order == ["source has ended", "first has drained", "second has drained"]


@everywhere
def test_output_stays_open_until_the_last_worker_has_finished(on: Any) -> None:
    gate = Gate()

    def hold_the_first(item: int) -> int:
        if item == 0:
            gate.wait()
        return item

    graph = Graph("r1")
    mapped = (
        graph.source(range(20)).map(hold_the_first, on=on, workers=2, ordered=False, name="hold").collect()
    )
    with graph.start() as run:
        items = run.iter(mapped)
        others = [next(items) for _ in range(19)]
        gate.wait_held()
        gate.open()
        assert list(items) == [0]
    assert sorted(others) == list(range(1, 20))


def test_run_ends_after_all_sinks() -> None:
    gate = Gate()
    done: list[str] = []

    def slow(item: int) -> None:
        gate.wait()
        done.append("slow")

    graph = Graph("r1")
    one, other = graph.source([1]).tee(2)
    one.sink(slow, name="slow")
    other.sink(lambda _: done.append("quick"), name="quick")
    run = graph.start()
    gate.wait_held()
    wait_until(lambda: stage_of(run, "quick").alive == 0)
    with pytest.raises(TimeoutError, match="did not end"):
        run.wait(timeout=0)
    gate.open()
    run.wait()
    assert done == ["quick", "slow"]


@everywhere
def test_callable_class_is_closed_before_its_output(on: Any) -> None:
    gate = Gate()

    class Model:
        def __init__(self, gate: Gate) -> None:
            self.gate = gate

        def __call__(self, item: int) -> int:
            return item

        def close(self) -> None:
            self.gate.wait()

    graph = Graph("r1")
    model = functools.partial(Model, gate)
    items = graph.source([1, 2]).map(model, on=on, name="model").collect()
    run = graph.start()
    gate.wait_held()
    assert stage_of(run, "collect").alive == 1
    gate.open()
    assert run.wait()[items] == [1, 2]


def test_closed_input_ends_the_run() -> None:
    graph = Graph("r1")
    numbers = graph.input()
    doubled = numbers.map(double).collect()
    run = graph.start()
    run[numbers].put(4)
    run[numbers].close()
    assert run.wait()[doubled] == [8]


def test_general_stage_without_inputs_is_a_source() -> None:
    def count(out: Out[int]) -> None:
        for number in range(5):
            out.put(number)

    graph = Graph("r1")
    numbers = graph.stage(count).collect()
    assert graph.run()[numbers] == [0, 1, 2, 3, 4]


def test_merge_ends_with_its_last_stream() -> None:
    late = threading.Event()

    def late_source() -> Iterator[str]:
        late.wait()
        yield "late"

    graph = Graph("r1")
    early = graph.source(["early"], name="early")
    merged = graph.merge(early, graph.source(late_source)).collect()
    with graph.start() as run:
        items = run.iter(merged)
        assert next(items) == "early"
        wait_until(lambda: stage_of(run, "early").alive == 0)
        late.set()
        assert list(items) == ["late"]


def test_graph_runs_again_from_the_start() -> None:
    graph = Graph("r1")
    doubled = graph.source(range(3)).map(double).collect()
    assert [graph.run()[doubled] for _ in range(3)] == [[0, 2, 4]] * 3


def test_concurrent_runs_of_a_graph_are_independent() -> None:
    graph = Graph("r1")
    numbers = graph.input()
    doubled = numbers.map(double).collect()
    first, second = graph.start(), graph.start()
    first[numbers].put(1)
    second[numbers].put(2)
    for run in (first, second):
        run[numbers].close()
    assert (first.wait()[doubled], second.wait()[doubled]) == ([2], [4])

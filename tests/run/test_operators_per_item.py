"""Test the operators that call a function for each item, on threads and processes.

The tests cover order, retries, errors streams and callable classes.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from operator_cases import collected, fail_odd, is_even, numbers, repeated, same, words
from runs import Gate, everywhere, stage_of
from support.waiting import wait_until

from flowchan import Failed, Graph

# --- order of map, filter and flat_map ---


def held_first(gate: Gate, function: Any) -> Any:
    """Wrap ``function`` so that item 0 waits until the gate opens."""

    def held(item: int) -> Any:
        if item == 0:
            gate.wait()
        return function(item)

    return held


@everywhere
@pytest.mark.parametrize(
    ("operator", "function", "expected"),
    [
        ("map", same, list(range(40))),
        ("filter", is_even, list(range(0, 40, 2))),
        ("flat_map", repeated, [number for number in range(40) for _ in range(number % 4)]),
    ],
)
def test_several_workers_keep_the_order_of_the_input(
    operator: str, function: Any, expected: Any, on: Any
) -> None:
    """The other workers continue while the first item is held."""
    gate = Gate()
    stream = getattr(numbers(40), operator)(held_first(gate, function), on=on, workers=3, name="work")
    result = stream.collect()
    run = stream.graph.start()
    gate.wait_held()
    wait_until(lambda: stage_of(run, "work").items_in >= 3)
    gate.open()
    assert run.wait()[result] == expected


@everywhere
@pytest.mark.parametrize(
    ("operator", "function"), [("map", same), ("filter", bool), ("flat_map", lambda item: [item])]
)
def test_unordered_workers_do_not_wait_for_each_other(operator: str, function: Any, on: Any) -> None:
    gate = Gate()
    stream = getattr(numbers(20), operator)(held_first(gate, function), on=on, workers=2, ordered=False)
    result = stream.collect()
    with stream.graph.start() as run:
        items = run.iter(result)
        assert [next(items) for _ in range(19)] == list(range(1, 20))
        gate.wait_held()
        gate.open()
        assert list(items) == ([0] if operator != "filter" else [])


@everywhere
def test_workers_of_a_stage_run_concurrently(on: Any) -> None:
    gate = Gate()

    def hold(item: int) -> int:
        gate.wait()
        return item

    stream = numbers(8).map(hold, on=on, workers=4)
    result = stream.collect()
    run = stream.graph.start()
    gate.wait_held(4)
    gate.open()
    assert run.wait()[result] == list(range(8))


@everywhere
def test_order_is_kept_across_failed_items(on: Any) -> None:
    stream = numbers(50).map(fail_odd, on=on, workers=3)
    good, bad = stream.collect(), stream.errors.collect()
    results = stream.graph.run()
    assert results[good] == list(range(0, 50, 2))
    assert sorted(failed.item for failed in results[bad]) == list(range(1, 50, 2))


@everywhere
def test_many_items_arrive_once_and_in_order(on: Any) -> None:
    assert collected(
        numbers(20_000, on=on).map(same, on=on, workers=3).filter(is_even, on=on, workers=2)
    ) == list(range(0, 20_000, 2))


@everywhere
def test_flat_map_yields_the_elements_of_generators(on: Any) -> None:
    stream = Graph("operators").source(["to be or", "", "not to be"]).flat_map(words, on=on)
    assert collected(stream) == ["to", "be", "or", "not", "to", "be"]


def test_flat_map_passes_elements_on_at_once() -> None:
    seen = threading.Event()

    def slow(item: int) -> Iterator[int]:
        yield item
        seen.wait()
        yield item + 1

    graph = Graph("operators")
    result = graph.source([1]).flat_map(slow).collect()
    with graph.start() as run:
        items = run.iter(result)
        assert next(items) == 1
        seen.set()
        assert list(items) == [2]


@everywhere
def test_class_without_call_is_applied_to_each_item(on: Any) -> None:
    assert collected(Graph("operators").source(["1", "2"]).map(int, on=on)) == [1, 2]


# --- retries and errors ---


@everywhere
@pytest.mark.parametrize("operator", ["map", "filter"])
def test_item_is_retried_up_to_the_limit(operator: str, on: Any) -> None:
    class Flaky:
        def __init__(self) -> None:
            self.tries: Counter[int] = Counter()

        def __call__(self, item: int) -> int:
            self.tries[item] += 1
            if self.tries[item] <= item:
                raise ValueError(f"try {self.tries[item]}")
            return item

    stream = getattr(numbers(5), operator)(Flaky, on=on, retries=2)
    good, bad = stream.collect(), stream.errors.collect()
    results = stream.graph.run()
    assert results[good] == ([0, 1, 2] if operator == "map" else [1, 2])
    assert [(failed.item, failed.attempts, str(failed.error)) for failed in results[bad]] == [
        (3, 3, "try 3"),
        (4, 3, "try 3"),
    ]


@everywhere
def test_retry_of_flat_map_does_not_repeat_outputs(on: Any) -> None:
    class Flaky:
        def __init__(self) -> None:
            self.failed = False

        def __call__(self, item: int) -> Iterator[int]:
            yield from range(item)
            if not self.failed:
                self.failed = True
                raise ValueError
            yield item

    assert collected(Graph("operators").source([3]).flat_map(Flaky, on=on, retries=1)) == [0, 1, 2, 3]


def test_item_is_retried_in_a_sink() -> None:
    tried: list[int] = []

    def flaky(item: int) -> None:
        tried.append(item)
        if len(tried) < 3:
            raise ValueError

    stream = Graph("operators").source([7])
    stream.sink(flaky, retries=2)
    stream.graph.run()
    assert tried == [7, 7, 7]


def test_reduce_continues_after_a_failed_item() -> None:
    def add(so_far: int, item: int) -> int:
        return so_far + fail_odd(item)

    graph = Graph("operators")
    total = graph.source(range(6)).reduce(add, 0)
    bad = total.errors.map(lambda failed: failed.item).collect()
    results = graph.run()
    assert (results[total], results[bad]) == (0 + 2 + 4, [1, 3, 5])


@everywhere
def test_failed_partition_key_goes_to_the_errors_stream(on: Any) -> None:
    graph = Graph("operators")
    one, other = graph.source(range(6)).partition(fail_odd, 2, on=on)
    good = graph.merge(one, other).collect()
    bad = one.errors.collect()
    results = graph.run()
    assert sorted(results[good]) == [0, 2, 4]
    assert all(isinstance(failed, Failed) for failed in results[bad])


# --- callable classes ---


class Counting:
    """Stage function that returns how many items the instance has seen."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, item: int) -> int:
        self.seen += 1
        return self.seen


@everywhere
def test_callable_class_is_built_once_per_worker(on: Any) -> None:
    assert collected(numbers(10).map(Counting, on=on)) == list(range(1, 11))


@everywhere
def test_each_worker_has_its_own_instance_of_the_class(on: Any) -> None:
    gate = Gate()

    class Held(Counting):
        def __init__(self, gate: Gate) -> None:
            super().__init__()
            self.gate = gate

        def __call__(self, item: int) -> int:
            self.gate.wait()
            return super().__call__(item)

    stream = numbers(2).map(functools.partial(Held, gate), on=on, workers=2)
    result = stream.collect()
    run = stream.graph.start()
    gate.wait_held(2)
    gate.open()
    assert run.wait()[result] == [1, 1]


def test_callable_instance_is_shared_by_the_threads_of_a_stage() -> None:
    assert sorted(collected(numbers(10).map(Counting(), workers=1))) == list(range(1, 11))


@pytest.mark.parametrize("operator", ["map", "filter", "flat_map", "sink"])
def test_callable_class_is_closed_at_the_end(operator: str) -> None:
    lifecycle: list[str] = []

    class Model:
        def __init__(self) -> None:
            lifecycle.append("built")

        def __call__(self, item: int) -> list[int]:
            return [item]

        def close(self) -> None:
            lifecycle.append("closed")

    graph = Graph("operators")
    stream = getattr(graph.source(range(5)), operator)(Model, workers=2)
    if stream is not None:
        stream.sink(id)
    graph.run()
    assert sorted(lifecycle) == ["built", "built", "closed", "closed"]


# --- references to items ---


class Thing:
    pass


class Remember:
    """Stage function that keeps only weak references to its items."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Any]] = []

    def of_none(self, item: Any) -> None:
        self.seen.append(weakref.ref(item))

    def elements(self, item: Any) -> list[Any]:
        self.seen.append(weakref.ref(item))
        return []


@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("operator", ["map", "filter", "flat_map", "sink"])
def test_waiting_stage_does_not_keep_its_last_item(operator: str, kind: str) -> None:
    remember = Remember()
    plain = remember.elements if operator == "flat_map" else remember.of_none

    async def function(item: Any) -> Any:
        return plain(item)

    graph = Graph()
    numbers = graph.input()
    end = getattr(numbers.map(lambda _: Thing(), on="process"), operator)(
        plain if kind == "plain" else function
    )
    if operator != "sink":
        end.sink(lambda item: None)
    with graph.start() as run:
        run[numbers].put(1)
        wait_until(lambda: bool(remember.seen) and remember.seen[0]() is None)
        run[numbers].close()

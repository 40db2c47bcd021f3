"""Test each operator on threads, and also on processes if it accepts ``on=``."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from operator_cases import collected, numbers, same
from runs import Gate, everywhere
from support.waiting import wait_until

from flowchan import Graph, In, Out, RunError

# --- source ---


@everywhere
@pytest.mark.parametrize("items", [[1, 2, 3], (1, 2, 3), range(1, 4), {1: "a", 2: "b", 3: "c"}])
def test_source_yields_the_elements_of_an_iterable(items: Any, on: Any) -> None:
    assert collected(Graph("operators").source(items, on=on)) == [1, 2, 3]


@everywhere
def test_source_calls_a_callable_with_arguments_inside_the_run(on: Any) -> None:
    called = Gate()

    def source(first: int, *, last: int) -> Iterator[int]:
        called.open()
        yield from range(first, last)

    graph = Graph("operators")
    stream = graph.source(source, 3, last=6, on=on)
    assert not called.channel.closed
    assert collected(stream) == [3, 4, 5]


@everywhere
def test_none_passes_through_operators_like_any_item(on: Any) -> None:
    assert collected(Graph("operators").source([None, 0, None, ""], on=on).map(same, on=on)) == [
        None,
        0,
        None,
        "",
    ]


def test_source_accepts_an_old_style_sequence() -> None:
    class Old:
        def __getitem__(self, place: int) -> int:
            return [5, 6][place]

    assert collected(Graph("operators").source(Old())) == [5, 6]


# --- batch, unbatch, buffer ---


def test_batch_yields_full_lists_and_a_shorter_last_list() -> None:
    assert collected(numbers(7).batch(3)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_batch_of_an_empty_stream_is_empty() -> None:
    assert collected(numbers(0).batch(3)) == []


def test_batch_larger_than_its_input_channel_is_filled() -> None:
    assert collected(numbers(250, capacity=4).batch(100, timeout=600)) == [
        list(range(100)), list(range(100, 200)), list(range(200, 250)),
    ]  # fmt: skip


def test_partial_batch_is_sent_after_the_timeout() -> None:
    graph = Graph("operators")
    stream = graph.input()
    batches = stream.batch(3, timeout=0.01).collect()
    with graph.start() as run:
        items = run.iter(batches)
        run[stream].put(1)
        assert next(items) == [1]
        for number in (2, 3, 4, 5):
            run[stream].put(number)
        run[stream].close()
        assert list(itertools.chain.from_iterable(items)) == [2, 3, 4, 5]


def test_unbatch_yields_the_elements_again() -> None:
    assert collected(numbers(10).batch(4).unbatch()) == list(range(10))
    assert collected(Graph("operators").source([[], (1, 2), "ab"]).unbatch()) == [1, 2, "a", "b"]


def test_buffer_sets_the_capacity_of_the_channel() -> None:
    gate = Gate()
    stream = numbers(100).buffer(7)
    stream.sink(lambda _: gate.wait())
    run = stream.graph.start()
    gate.wait_held()
    wait_until(lambda: run.stats().edges[0].inside == 7)
    assert run.stats().edges[0].capacity == 7
    gate.open()
    run.wait()


# --- take, tee, partition, zip, merge ---


@pytest.mark.parametrize(
    ("n", "expected"), [(0, []), (1, [0]), (5, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 4, 5])]
)
def test_take_yields_the_first_items(n: int, expected: list[int]) -> None:
    assert collected(numbers(6).take(n)) == expected


def test_take_does_not_wait_for_an_item_after_the_last() -> None:
    graph = Graph("operators")
    stream = graph.input()
    two = stream.take(2).collect()
    run = graph.start()
    run[stream].put("a")
    run[stream].put("b")
    assert run.wait()[two] == ["a", "b"]


def test_tee_copies_every_item_to_every_branch() -> None:
    branches = numbers(100).tee(3)
    results = [branch.collect() for branch in branches]
    found = branches[0].graph.run()
    assert [found[result] for result in results] == [list(range(100))] * 3


@everywhere
@pytest.mark.parametrize(
    "key", [same, str, lambda item: (str(item), item), lambda _: None, lambda item: item % 3 or None]
)
def test_equal_keys_go_to_the_same_branch(key: Any, on: Any) -> None:
    graph = Graph("operators")
    items = graph.source([number % 10 for number in range(200)])
    branches = items.partition(key, 3, on=on, workers=2)
    results = [branch.collect() for branch in branches]
    found = graph.run()
    keys = [{repr(key(item)) for item in found[result]} for result in results]
    assert sum(len(found[result]) for result in results) == 200
    assert not any(one & other for one, other in itertools.combinations(keys, 2))


def test_integer_keys_rotate_over_the_branches() -> None:
    graph = Graph("operators")
    results = [branch.collect() for branch in graph.source(range(9)).partition(same, 3)]
    found = graph.run()
    assert [found[result] for result in results] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_zip_pairs_items_until_the_shortest_stream_ends() -> None:
    graph = Graph("operators")
    first, second, third = graph.source("abc"), graph.source(range(2)), graph.source(itertools.count)
    assert collected(first.zip(second, third)) == [("a", 0, 0), ("b", 1, 1)]


def test_zip_of_one_stream_yields_single_tuples() -> None:
    assert collected(numbers(2).zip()) == [(0,), (1,)]


def test_merge_keeps_the_order_of_each_stream() -> None:
    graph = Graph("operators")
    merged = collected(graph.merge(*(graph.source([(name, n) for n in range(50)]) for name in "abc")))
    for name in "abc":
        assert [item for item in merged if item[0] == name] == [(name, n) for n in range(50)]


def test_merge_does_not_wait_for_a_silent_stream() -> None:
    graph = Graph("operators")
    silent, lively = graph.input(), graph.source([1, 2])
    merged = graph.merge(silent, lively).collect()
    with graph.start() as run:
        items = run.iter(merged)
        assert [next(items), next(items)] == [1, 2]
        run[silent].close()
        assert list(items) == []


# --- reduce ---


def test_reduce_folds_from_the_left() -> None:
    graph = Graph("operators")
    text = graph.source("abc").reduce(lambda so_far, item: so_far + item, ">")
    assert graph.run()[text] == ">abc"


def test_reduce_without_an_initial_value_begins_with_the_first_item() -> None:
    graph = Graph("operators")
    product = graph.source([2, 3, 4]).reduce(lambda so_far, item: so_far * item)
    assert graph.run()[product] == 24


def test_reduce_of_an_empty_stream_returns_the_initial_value() -> None:
    graph = Graph("operators")
    total = graph.source([]).reduce(int.__add__, 5)
    assert graph.run()[total] == 5


def test_reduce_of_an_empty_stream_without_initial_value_fails() -> None:
    graph = Graph("operators")
    graph.source([]).reduce(int.__add__)
    with pytest.raises(RunError) as caught:
        graph.run()
    assert isinstance(caught.value.exceptions[0].__cause__, TypeError)


def test_reduce_accepts_none_as_initial_value() -> None:
    graph = Graph("operators")
    last = graph.source([1, 2]).reduce(lambda so_far, item: (so_far, item), None)
    assert graph.run()[last] == ((None, 1), 2)


def test_mutable_initial_value_is_not_shared_between_runs() -> None:
    def count(so_far: Counter[str], item: str) -> Counter[str]:
        so_far[item] += 1
        return so_far

    initial: Counter[str] = Counter()
    graph = Graph("operators")
    counts = graph.source("aab").reduce(count, initial)
    assert [graph.run()[counts] for _ in range(2)] == [Counter(a=2, b=1)] * 2
    assert initial == Counter()


def test_result_stream_of_a_reduce_can_be_read() -> None:
    graph = Graph("operators")
    total = graph.source(range(4)).reduce(int.__add__, 0)
    texts = total.map(str).collect()
    results = graph.run()
    assert (results[total], results[texts]) == (6, ["6"])


# --- sink, stage ---


@everywhere
def test_sink_is_called_for_each_item(on: Any) -> None:
    gate = Gate()

    def last(item: int) -> None:
        if item == 99:
            gate.open()

    graph = Graph("operators")
    graph.source(range(100)).sink(last, on=on, workers=2)
    graph.run()
    gate.wait()


@everywhere
def test_general_stage_gets_its_ports_by_parameter_name(on: Any) -> None:
    def split(numbers: In[int], even: Out[int], odd: Out[int]) -> None:
        for number in numbers:
            (odd if number % 2 else even).put(number)

    graph = Graph("operators")
    even, odd = graph.stage(split, graph.source(range(10)), on=on)
    evens, odds = even.collect(), odd.collect()
    results = graph.run()
    assert (results[evens], results[odds]) == ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9])


@everywhere
def test_general_stage_may_read_several_streams(on: Any) -> None:
    def interleave(left: In[int], right: In[int], out: Out[int]) -> None:
        for first in left:
            out.put(first)
            out.put(right.get())

    graph = Graph("operators")
    stream = graph.stage(interleave, graph.source([1, 3]), graph.source([2, 4]), on=on)
    assert collected(stream) == [1, 2, 3, 4]


@everywhere
def test_workers_of_a_general_stage_share_its_ports(on: Any) -> None:
    def work(items: In[int], out: Out[int]) -> None:
        for item in items:
            out.put(item)

    graph = Graph("operators")
    assert sorted(collected(graph.stage(work, graph.source(range(100)), on=on, workers=3))) == list(
        range(100)
    )

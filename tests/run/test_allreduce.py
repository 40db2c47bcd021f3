"""Test ``allreduce``: round k combines the k-th item from every worker that has one."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from runs import everywhere

from flowchan import Graph, GraphError, In, Out, Reduced, RunError, Stream, worker
from flowchan.viz import to_dot, to_mermaid


def rounds(stream: Stream) -> list[Reduced]:
    result = stream.collect()
    found: list[Reduced] = stream.graph.run()[result]
    return found


def some(numbers: Out[int]) -> None:
    """In worker n, put n numbers."""
    me = worker().number
    for k in range(me):
        numbers.put(10 * me + k)


@everywhere
def test_round_combines_one_item_from_each_remaining_worker(on: Any) -> None:
    graph = Graph("rounds")
    numbers = graph.stage(some, on=on, workers=3)
    assert rounds(numbers.allreduce("sum")) == [(10 + 20 + 30, 3, 0), (21 + 31, 2, 1), (32, 1, 2)]


@everywhere
def test_round_omits_a_worker_that_ended_without_items(on: Any) -> None:
    def none_of_the_first(out: Out[int]) -> None:
        if worker().number > 1:
            out.put(worker().number)

    graph = Graph("rounds")
    assert rounds(graph.stage(none_of_the_first, on=on, workers=3).allreduce("max")) == [(3, 2, 0)]


@everywhere
def test_allreduce_combines_all_items_of_an_ordered_stage(on: Any) -> None:
    graph = Graph("shares")
    halves = graph.source(range(1, 301)).map(abs, on=on, workers=3, capacity=2)
    found = rounds(halves.allreduce(capacity=1))
    assert [one.round for one in found] == [*range(len(found))]
    assert sum(one.value for one in found) == sum(range(1, 301))
    assert sum(one.contributors for one in found) == 300


def test_coroutine_workers_contribute_separately() -> None:
    async def late(number: int) -> int:
        return number

    graph = Graph("async")
    found = rounds(graph.source(range(100)).map(late, workers=4).allreduce())
    assert sum(one.value for one in found) == sum(range(100))


def test_each_worker_of_a_merge_has_its_own_stream() -> None:
    graph = Graph("streams")
    streams = [graph.source([number] * number, name=f"s{number}") for number in (1, 2, 3)]
    assert rounds(graph.merge(*streams).allreduce("sum")) == [(6, 3, 0), (5, 2, 1), (3, 1, 2)]


def test_single_worker_has_rounds_with_one_item_each() -> None:
    assert rounds(Graph("one").source([7, 8]).allreduce("mean")) == [(7.0, 1, 0), (8.0, 1, 1)]


def test_custom_function_combines_items_in_the_order_of_workers() -> None:
    graph = Graph("function")
    streams = [graph.source([letter], name=letter) for letter in "abcd"]
    found = rounds(graph.merge(*streams).allreduce(lambda a, b: f"({a}{b})"))
    assert [one.value for one in found] == ["(((ab)c)d)"]


def test_failing_operation_ends_the_run_and_names_the_round() -> None:
    graph = Graph("raises")
    streams = [graph.source([{"a": 1}, {key: 2}], name=key) for key in "ab"]
    graph.merge(*streams).allreduce().collect()
    with pytest.raises(RunError) as caught:
        graph.run()
    (error,) = caught.value.exceptions
    assert "in only some" in str(error)
    assert error.stage == "allreduce"  # type: ignore[attr-defined]
    assert error.__cause__ is not None
    assert "in round 1 of allreduce, from 2 workers" in error.__cause__.__notes__


@everywhere
def test_workers_stop_when_the_reader_wants_no_more_rounds(on: Any) -> None:
    def endless(out: Out[int]) -> None:
        out.put_many(itertools.repeat(1))

    graph = Graph("r2")
    total = graph.stage(endless, on=on, workers=2, capacity=2).allreduce().take(5).collect()
    run = graph.start()
    assert run.wait()[total] == [(2, 2, k) for k in range(5)]
    assert run.stats().state == "done"


@everywhere
def test_allreduce_of_one_output_leaves_the_other_output_shared(on: Any) -> None:
    """Only the output that allreduce reads has separate channels for the workers."""

    def both(numbers: In[int], sums: Out[int], log: Out[int]) -> None:
        for number in numbers:
            sums.put(number)
            log.put(number)

    graph = Graph("outputs")
    sums, log = graph.stage(both, graph.source(range(50)), on=on, workers=2)
    total, logged = sums.allreduce().collect(), log.collect()
    results = graph.run()
    assert sum(one.value for one in results[total]) == sum(range(50))
    assert Counter(results[logged]) == Counter(range(50))


def test_item_counts_and_channels_are_separate_for_each_worker() -> None:
    graph = Graph("account")
    graph.stage(some, workers=3, capacity=5).allreduce().collect()
    run = graph.start()
    run.wait()
    stats = run.stats()
    inputs = {(edge.name, edge.passed, edge.capacity) for edge in stats.edges if edge.writer == "some"}
    assert inputs == {("some 1", 1, 5), ("some 2", 2, 5), ("some 3", 3, 5)}
    (allreduce,) = (stage for stage in stats.stages if stage.name == "allreduce")
    assert (allreduce.items_in, allreduce.items_out) == (6, 3)
    assert "6 in, 3 out" in run.report()


def test_drawing_shows_one_arrow_for_all_workers() -> None:
    graph = Graph("drawn")
    graph.stage(some, workers=3, capacity=5).allreduce("max").collect()
    for text in (to_dot(graph), to_mermaid(graph)):
        assert text.count("each worker") == 1
        assert "Reduced" in text


def test_errors_for_wrong_arguments_name_the_allowed_values() -> None:
    numbers = Graph("wrong").source([1])
    with pytest.raises(ValueError, match=r"op must be one of 'sum', 'mean'.* or a function"):
        numbers.allreduce("add")
    with pytest.raises(TypeError, match="op must be a function"):
        numbers.allreduce(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean 'capacity'"):
        numbers.allreduce("sum", capacty=3)  # type: ignore[call-arg]


def test_check_reports_wrong_uses_of_allreduce() -> None:
    graph = Graph("checked")
    numbers = graph.stage(some, workers=2, name="some")
    numbers.allreduce(lambda a: a).collect()
    numbers.collect()
    graph.source([1], name="some 2").collect()
    rules = {(problem.rule, problem.stage) for problem in graph.check()}
    assert rules == {
        ("read-twice", "some"),
        ("ports", "allreduce"),
        ("duplicate", "some 2"),
    }
    with pytest.raises(GraphError, match="allreduce calls '<lambda>' with two arguments"):
        graph.run()

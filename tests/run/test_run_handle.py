"""Test the handle of a run: starting, putting, iterating, waiting, results, and ways to leave its block."""

from __future__ import annotations

import itertools
import sysconfig
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import pytest
from runs import Gate, everywhere, stage_of
from support.waiting import wait_blocked, wait_until

from flowchan import Broken, Closed, Graph, GraphError, In, Run, RunError


def double(item: int) -> int:
    return 2 * item


def fail(item: int) -> int:
    raise ValueError(f"item {item}")


@everywhere
def test_iter_yields_the_results_of_put_items_one_by_one(on: Any) -> None:
    graph = Graph("handle")
    numbers = graph.input()
    doubled = numbers.map(double, on=on).collect()
    with graph.start() as run:
        items = run.iter(doubled)
        for number in range(5):
            run[numbers].put(number)
            assert next(items) == 2 * number
        run[numbers].close()
        assert list(items) == []


def test_leaving_the_with_block_closes_the_inputs_and_waits() -> None:
    seen: list[int] = []
    graph = Graph("handle")
    numbers = graph.input()
    numbers.map(double).sink(seen.append)
    with graph.start() as run:
        for number in range(100):
            run[numbers].put(number)
    assert seen == [2 * number for number in range(100)]
    assert run.stats().state == "done"


def test_put_into_a_closed_input_raises_value_error() -> None:
    graph = Graph("handle")
    numbers = graph.input()
    numbers.sink(id)
    with graph.start() as run:
        run[numbers].close()
        with pytest.raises(ValueError, match="closed"):
            run[numbers].put(1)


def test_put_without_readers_raises_closed() -> None:
    graph = Graph("handle")
    numbers = graph.input()
    numbers.take(1).sink(id)
    with graph.start() as run, pytest.raises(Closed):  # noqa: PT012
        while True:
            run[numbers].put(1)


def test_blocked_put_raises_closed_when_the_run_stops() -> None:
    gate = Gate()
    outcome: list[str] = []
    graph = Graph("handle")
    numbers = graph.input(capacity=1)
    numbers.sink(lambda _: gate.wait())
    run = graph.start()

    def put_three() -> None:
        try:
            for number in range(3):
                run[numbers].put(number)
        except Closed:
            outcome.append("closed")

    writer = threading.Thread(target=put_three)
    writer.start()
    gate.wait_held()
    wait_blocked(run._ports.channels["input"], writers=1)
    run.stop()
    writer.join()
    gate.open()
    run.wait()
    assert outcome == ["closed"]


@everywhere
def test_results_are_indexed_by_stream(on: Any) -> None:
    graph = Graph("handle")
    left, right = graph.source(range(4), on=on).tee(2)
    total, squares = left.reduce(int.__add__, 0), right.map(double, on=on).collect()
    results = graph.run()
    assert (results[total], results[squares]) == (6, [0, 2, 4, 6])
    assert set(results) == {total, squares}
    assert len(results) == 2
    assert total in results


def test_error_for_a_stream_without_a_result_lists_the_results() -> None:
    graph = Graph("handle")
    numbers = graph.source([1], name="numbers")
    numbers.collect(name="all")
    with pytest.raises(KeyError, match=r"numbers.*is not a result.*the results are all .reduce and collect"):
        graph.run()[numbers]


def test_iterated_stream_is_not_a_result() -> None:
    graph = Graph("handle")
    numbers = graph.source([1]).collect()
    run = graph.start()
    assert list(run.iter(numbers)) == [1]
    with pytest.raises(KeyError, match="the results are none"):
        run.wait()[numbers]


def test_error_names_the_stream_that_is_not_an_input() -> None:
    graph, other = Graph("handle"), Graph("other")
    numbers, foreign = graph.input(name="numbers"), other.input(name="numbers")
    doubled = numbers.map(double)
    doubled.sink(id)
    foreign.sink(id)
    with graph.start() as run:
        for wrong in (doubled, foreign, "numbers"):
            with pytest.raises(KeyError, match=r"is not an input of this run.*graph\.input\(\)"):
                run[wrong]  # type: ignore[index]


def test_iter_accepts_only_collect_streams_of_this_graph() -> None:
    graph, other = Graph("handle"), Graph("other")
    numbers = graph.source([1], name="numbers")
    total = numbers.reduce(int.__add__)
    foreign = other.source([1]).collect()
    with graph.start() as run:
        with pytest.raises(
            ValueError, match=r"iterate over reduce\.collect\(\)|is not a result of the graph"
        ):
            run.iter(total)
        with pytest.raises(ValueError, match="does not belong to graph 'handle'"):
            run.iter(foreign)
        with pytest.raises(
            TypeError, match=r"iter: stream must be the stream that collect\(\) returned, got"
        ):
            run.iter("numbers")  # type: ignore[arg-type]


def test_items_of_a_stream_can_be_iterated_only_once() -> None:
    graph = Graph("handle")
    numbers = graph.source([1]).collect()
    with graph.start() as run:
        items = run.iter(numbers)
        with pytest.raises(ValueError, match="already taken"):
            run.iter(numbers)
        assert list(items) == [1]
    with pytest.raises(ValueError, match="already taken"):
        run.iter(numbers)


def test_iter_after_wait_is_rejected() -> None:
    graph = Graph("handle")
    numbers = graph.source([1]).collect()
    run = graph.start()
    assert run.wait()[numbers] == [1]
    with pytest.raises(ValueError, match="already taken by wait"):
        run.iter(numbers)


def test_two_results_are_iterated_together() -> None:
    graph = Graph("handle")
    left, right = graph.source(range(1000)).tee(2)
    one, other = left.collect(), right.map(double).collect()
    with graph.start() as run:
        pairs = list(zip(run.iter(one), run.iter(other), strict=True))
    assert pairs == [(number, 2 * number) for number in range(1000)]


@everywhere
def test_early_end_of_the_iteration_ends_run_without_error(on: Any) -> None:
    graph = Graph("handle")
    numbers = graph.source(itertools.count, on=on).map(double, on=on, workers=2).collect()
    with graph.start() as run:
        for item in run.iter(numbers):
            if item >= 10:
                break
    assert run.stats().state == "done"


def test_with_block_left_with_a_used_iterator_ends_the_run() -> None:
    graph = Graph("handle")
    numbers = graph.source(itertools.count).collect()
    with graph.start() as run:
        items = run.iter(numbers)
        assert next(items) == 0
    assert run.stats().state == "done"


def test_with_block_left_with_an_unused_iterator_ends_the_run() -> None:
    graph = Graph("handle")
    numbers = graph.source(itertools.count).collect()
    with graph.start() as run:
        items = run.iter(numbers)
    assert run.stats().state == "done"
    del items


def test_iteration_in_another_thread_continues_after_the_with_block() -> None:
    graph = Graph("handle")
    numbers = graph.input(capacity=1)
    doubled = numbers.map(double, capacity=1).collect()
    seen: list[int] = []
    with graph.start() as run:
        reader = threading.Thread(target=lambda: seen.extend(run.iter(doubled)))
        reader.start()
        wait_blocked(run._ports.channels["double"], readers=1)
        for number in range(50):
            run[numbers].put(number)
    reader.join()
    assert seen == [2 * number for number in range(50)]


def test_exception_in_the_with_block_aborts_the_run_and_propagates() -> None:
    graph = Graph("handle")
    graph.source(itertools.count).sink(id)
    with pytest.raises(LookupError, match="mine"), graph.start() as run:
        raise LookupError("mine")
    assert run.stats().state == "aborted"


@pytest.mark.parametrize("held", [True, False])
@everywhere
def test_exception_while_iterating_results_aborts_the_run_and_propagates(on: Any, held: bool) -> None:
    graph = Graph("handle")
    numbers = graph.source(itertools.count, on=on).collect()
    with pytest.raises(LookupError, match="mine"), graph.start() as run:  # noqa: PT012
        items = [run.iter(numbers)]
        for _ in items[0] if held else items.pop():
            raise LookupError("mine")
    states = {"aborted"}
    if not held and sysconfig.get_config_var("Py_GIL_DISABLED"):
        # The loop drops its iterator before the block ends, so the source may already have ended, because it
        # had no readers left. With a GIL, the run notices both at the same time.
        states.add("done")
    assert run.stats().state in states


def test_exception_in_the_with_block_of_an_ended_run_propagates() -> None:
    graph = Graph("handle")
    numbers = graph.source([1]).collect()
    with pytest.raises(LookupError, match="mine"), graph.start() as run:  # noqa: PT012
        assert list(run.iter(numbers)) == [1]
        run.wait()
        raise LookupError("mine")


@everywhere
def test_failure_while_iterating_results_raises_the_run_error(on: Any) -> None:
    graph = Graph("handle")
    numbers = graph.source([1]).map(fail, on=on).collect()
    with pytest.raises(RunError) as caught, graph.start() as run:
        for _ in run.iter(numbers):
            pass
    assert str(caught.value.exceptions[0].__cause__) == "item 1"
    assert run.stats().state == "failed"


@everywhere
def test_failure_raises_run_error_in_a_with_block_that_puts(on: Any) -> None:
    graph = Graph("handle")
    numbers = graph.input(capacity=1)
    numbers.map(fail, on=on).sink(id)
    with pytest.raises(RunError) as caught, graph.start() as run:  # noqa: PT012
        while True:
            run[numbers].put(1)
    assert str(caught.value.exceptions[0].__cause__) == "item 1"


def test_failure_raises_run_error_in_an_empty_with_block() -> None:
    graph = Graph("handle")
    graph.source([1]).map(fail).sink(id)
    with pytest.raises(RunError), graph.start():
        pass


def test_abort_while_iterating_results_raises_broken() -> None:
    graph = Graph("handle")
    numbers = graph.source(itertools.count).collect()
    run = graph.start()
    items = run.iter(numbers)
    assert next(items) == 0
    run.abort()
    with pytest.raises(Broken):
        list(items)
    run.wait()
    assert run.stats().state == "aborted"


def test_wait_with_timeout_raises_and_the_run_continues() -> None:
    graph = Graph("handle")
    numbers = graph.input()
    doubled = numbers.map(double).collect()
    run = graph.start()
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match="'handle' did not end within"):
            run.wait(timeout)
    run[numbers].put(1)
    run[numbers].close()
    assert run.wait(timeout=60)[doubled] == [2]


def test_second_wait_has_the_same_outcome() -> None:
    graph = Graph("handle")
    numbers = graph.source([1]).collect()
    run = graph.start()
    assert run.wait()[numbers] == run.wait()[numbers] == [1]
    graph = Graph("handle")
    graph.source([1]).map(fail).sink(id)
    run = graph.start()
    for _ in range(2):
        with pytest.raises(RunError):
            run.wait()


def test_several_threads_may_wait_for_a_run() -> None:
    """All threads must get the results.

    The test is repeated, so that some runs end at the moment when a thread starts to wait.
    """
    for _ in range(50):
        graph = Graph("handle")
        numbers = graph.input()
        doubled = numbers.map(double).collect()
        with futures.ThreadPoolExecutor(4) as threads, graph.start() as run:
            found = [threads.submit(run.wait) for _ in range(4)]
            run[numbers].put(1)
            run[numbers].close()
            assert [one.result()[doubled] for one in found] == [[2]] * 4


def test_run_may_start_in_one_thread_and_end_in_another() -> None:
    graph = Graph("handle")
    numbers = graph.input()
    doubled = numbers.map(double, on="process").collect()
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(graph.start()))
    thread.start()
    thread.join()
    (run,) = runs
    run[numbers].put(1)
    run[numbers].close()
    assert run.wait()[doubled] == [2]


def test_invalid_graph_does_not_start() -> None:
    graph = Graph("handle")
    graph.source([1])
    with pytest.raises(GraphError, match="no stage reads"):
        graph.start()


def test_run_closes_the_inputs() -> None:
    graph = Graph("handle")
    total = graph.input().reduce(int.__add__, 0)
    assert graph.run()[total] == 0


def test_run_shows_its_state() -> None:
    graph = Graph("handle")
    numbers = graph.input()
    numbers.sink(id)
    run = graph.start()
    assert repr(run) == "<Run of 'handle': running>"
    run[numbers].close()
    run.wait()
    assert repr(run) == "<Run of 'handle': done>"


def test_stages_start_before_the_program_waits() -> None:
    seen = threading.Event()
    graph = Graph("handle")
    graph.source([1]).sink(lambda _: seen.set())
    run = graph.start()
    wait_until(seen.is_set)
    run.wait()


def test_slow_reader_slows_the_graph_down() -> None:
    graph = Graph("handle")

    def source() -> Iterator[int]:
        return itertools.count()

    numbers = graph.source(source, name="numbers", capacity=3).collect()
    with graph.start() as run:
        items = run.iter(numbers)
        assert next(items) == 0
        wait_blocked(run._ports.channels["numbers"], writers=1)
        assert stage_of(run, "numbers").items_out <= 5
        items.close()  # type: ignore[attr-defined]


def test_stage_may_run_another_graph() -> None:
    def inner(item: int) -> int:
        graph = Graph("inner")
        total = graph.source(range(item)).map(double).reduce(int.__add__, 0)
        return graph.run()[total]

    graph = Graph("handle")
    totals = graph.source([3, 4]).map(inner).collect()
    assert graph.run()[totals] == [6, 12]


def test_general_stage_gets_its_keyword_arguments() -> None:
    def scale(items: In[int], factor: int = 1, *, total: list[int]) -> None:
        total.extend(item * factor for item in items)

    found: list[int] = []
    graph = Graph("handle")
    graph.stage(scale, graph.source([1, 2]), factor=3, total=found)
    graph.run()
    assert found == [3, 6]


def test_stages_may_have_names_of_files_that_are_not_utf8() -> None:
    graph = Graph("file \udcff")
    read = graph.source(range(4), name="read \udcff").map(abs, on="process", workers=2, name="\udcfd")
    even, odd = read.partition(lambda number: number % 2, 2, name="\udcfe")
    odd.sink(str)
    numbers = even.collect(name="\udcfc")
    with graph.start() as run:
        assert len(run.wait()[numbers]) == 2
    assert {edge.name for edge in run.stats().edges} >= {"read \\udcff", "\\udcfd"}

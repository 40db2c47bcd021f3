"""The handle of a run: start, put, iterate, wait, results, and leaving the block in every way."""

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

from flowchan import Broken, Closed, Graph, GraphError, In, Run, RunError, Stream


def double(item: int) -> int:
    return 2 * item


def fail(item: int) -> int:
    raise ValueError(f"item {item}")


@everywhere
def test_items_that_are_put_come_out_of_iter_as_they_come(on: Any) -> None:
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


def test_leaving_the_block_closes_the_inputs_and_waits() -> None:
    seen: list[int] = []
    graph = Graph("handle")
    numbers = graph.input()
    numbers.map(double).sink(seen.append)
    with graph.start() as run:
        for number in range(100):
            run[numbers].put(number)
    assert seen == [2 * number for number in range(100)]
    assert run.stats().state == "done"


def test_putting_through_an_input_that_was_closed_is_misuse() -> None:
    graph = Graph("handle")
    numbers = graph.input()
    numbers.sink(id)
    with graph.start() as run:
        run[numbers].close()
        with pytest.raises(ValueError, match="closed"):
            run[numbers].put(1)


def test_putting_what_nobody_wants_any_more_raises_closed() -> None:
    graph = Graph("handle")
    numbers = graph.input()
    numbers.take(1).sink(id)
    with graph.start() as run, pytest.raises(Closed):  # noqa: PT012
        while True:
            run[numbers].put(1)


def test_putting_waits_while_the_graph_is_full_and_raises_closed_when_it_is_stopped() -> None:
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
def test_results_are_given_by_stream(on: Any) -> None:
    graph = Graph("handle")
    left, right = graph.source(range(4), on=on).tee(2)
    total, squares = left.reduce(int.__add__, 0), right.map(double, on=on).collect()
    results = graph.run()
    assert (results[total], results[squares]) == (6, [0, 2, 4, 6])
    assert set(results) == {total, squares}
    assert len(results) == 2
    assert total in results


def test_a_stream_that_is_no_result_is_named_with_those_that_are() -> None:
    graph = Graph("handle")
    numbers = graph.source([1], name="numbers")
    numbers.collect(name="all")
    with pytest.raises(KeyError, match=r"numbers.*is not a result.*reduce and collect.*here: all"):
        graph.run()[numbers]


def test_what_was_iterated_over_is_no_result() -> None:
    graph = Graph("handle")
    numbers = graph.source([1]).collect()
    run = graph.start()
    assert list(run.iter(numbers)) == [1]
    with pytest.raises(KeyError, match="here: none"):
        run.wait()[numbers]


def test_a_stream_that_is_no_input_is_named() -> None:
    graph, other = Graph("handle"), Graph("other")
    numbers, foreign = graph.input(name="numbers"), other.input(name="numbers")
    doubled = numbers.map(double)
    doubled.sink(id)
    foreign.sink(id)
    with graph.start() as run:
        for wrong in (doubled, foreign, "numbers"):
            with pytest.raises(KeyError, match=r"is not an input of this run.*graph\.input\(\)"):
                run[wrong]  # type: ignore[index]


def test_iter_takes_only_collect_streams_of_this_graph() -> None:
    graph, other = Graph("handle"), Graph("other")
    numbers = graph.source([1], name="numbers")
    total = numbers.reduce(int.__add__)
    foreign = other.source([1]).collect()
    with graph.start() as run:
        with pytest.raises(ValueError, match=r"iterate over reduce\.collect\(\)|does not leave the graph"):
            run.iter(total)
        with pytest.raises(ValueError, match="is not a stream of graph 'handle'"):
            run.iter(foreign)


def test_the_items_of_a_stream_are_taken_once() -> None:
    graph = Graph("handle")
    numbers = graph.source([1]).collect()
    with graph.start() as run:
        items = run.iter(numbers)
        with pytest.raises(ValueError, match="taken already"):
            run.iter(numbers)
        assert list(items) == [1]
    with pytest.raises(ValueError, match="taken already"):
        run.iter(numbers)


def test_iter_after_wait_is_refused() -> None:
    graph = Graph("handle")
    numbers = graph.source([1]).collect()
    run = graph.start()
    assert run.wait()[numbers] == [1]
    with pytest.raises(ValueError, match="taken already: by wait"):
        run.iter(numbers)


def test_two_results_are_iterated_side_by_side() -> None:
    graph = Graph("handle")
    left, right = graph.source(range(1000)).tee(2)
    one, other = left.collect(), right.map(double).collect()
    with graph.start() as run:
        pairs = list(zip(run.iter(one), run.iter(other), strict=True))
    assert pairs == [(number, 2 * number) for number in range(1000)]


@everywhere
def test_leaving_the_loop_early_ends_the_run_without_an_error(on: Any) -> None:
    graph = Graph("handle")
    numbers = graph.source(itertools.count, on=on).map(double, on=on, workers=2).collect()
    with graph.start() as run:
        for item in run.iter(numbers):
            if item >= 10:
                break
    assert run.stats().state == "done"


def test_leaving_the_block_with_an_iterator_half_used_ends_the_run() -> None:
    graph = Graph("handle")
    numbers = graph.source(itertools.count).collect()
    with graph.start() as run:
        items = run.iter(numbers)
        assert next(items) == 0
    assert run.stats().state == "done"


def test_leaving_the_block_with_an_iterator_never_used_ends_the_run() -> None:
    graph = Graph("handle")
    numbers = graph.source(itertools.count).collect()
    with graph.start() as run:
        items = run.iter(numbers)
    assert run.stats().state == "done"
    del items


def test_what_another_thread_iterates_over_goes_on_after_the_block() -> None:
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


def test_an_exception_in_the_block_aborts_the_run_and_is_not_hidden() -> None:
    graph = Graph("handle")
    graph.source(itertools.count).sink(id)
    with pytest.raises(LookupError, match="mine"), graph.start() as run:
        raise LookupError("mine")
    assert run.stats().state == "aborted"


@pytest.mark.parametrize("held", [True, False])
@everywhere
def test_an_exception_in_the_loop_aborts_the_run_and_is_not_hidden(on: Any, held: bool) -> None:
    graph = Graph("handle")
    numbers = graph.source(itertools.count, on=on).collect()
    with pytest.raises(LookupError, match="mine"), graph.start() as run:  # noqa: PT012
        items = [run.iter(numbers)]
        for _ in items[0] if held else items.pop():
            raise LookupError("mine")
    states = {"aborted"}
    if not held and sysconfig.get_config_var("Py_GIL_DISABLED"):
        # The loop drops its iterator before the block is left, so nobody wants any more of the source. With
        # a GIL the run hears both at a time.
        states.add("done")
    assert run.stats().state in states


def test_an_exception_in_the_block_after_the_run_has_ended_is_not_hidden() -> None:
    graph = Graph("handle")
    numbers = graph.source([1]).collect()
    with pytest.raises(LookupError, match="mine"), graph.start() as run:  # noqa: PT012
        assert list(run.iter(numbers)) == [1]
        run.wait()
        raise LookupError("mine")


@everywhere
def test_a_failure_ends_the_loop_with_the_run_error(on: Any) -> None:
    graph = Graph("handle")
    numbers = graph.source([1]).map(fail, on=on).collect()
    with pytest.raises(RunError) as caught, graph.start() as run:
        for _ in run.iter(numbers):
            pass
    assert str(caught.value.exceptions[0].__cause__) == "item 1"
    assert run.stats().state == "failed"


@everywhere
def test_a_failure_ends_a_block_that_puts_with_the_run_error(on: Any) -> None:
    graph = Graph("handle")
    numbers = graph.input(capacity=1)
    numbers.map(fail, on=on).sink(id)
    with pytest.raises(RunError) as caught, graph.start() as run:  # noqa: PT012
        while True:
            run[numbers].put(1)
    assert str(caught.value.exceptions[0].__cause__) == "item 1"


def test_a_failure_ends_a_block_that_does_nothing_with_the_run_error() -> None:
    graph = Graph("handle")
    graph.source([1]).map(fail).sink(id)
    with pytest.raises(RunError), graph.start():
        pass


def test_aborting_ends_the_loop_with_broken() -> None:
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


def test_waiting_no_longer_than_the_timeout_raises_and_the_run_goes_on() -> None:
    graph = Graph("handle")
    numbers = graph.input()
    doubled = numbers.map(double).collect()
    run = graph.start()
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match="'handle' still goes on after"):
            run.wait(timeout)
    run[numbers].put(1)
    run[numbers].close()
    assert run.wait(timeout=60)[doubled] == [2]


def test_waiting_again_gives_the_same() -> None:
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


def test_several_threads_may_wait() -> None:
    """Again and again: where the run ends while one of them still begins to wait, all have the results."""
    for _ in range(50):
        graph = Graph("handle")
        numbers = graph.input()
        doubled = numbers.map(double).collect()
        with futures.ThreadPoolExecutor(4) as threads, graph.start() as run:
            found = [threads.submit(run.wait) for _ in range(4)]
            run[numbers].put(1)
            run[numbers].close()
            assert [one.result()[doubled] for one in found] == [[2]] * 4


def test_a_run_is_started_in_one_thread_and_ended_in_another() -> None:
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


def test_a_wrong_graph_does_not_start() -> None:
    graph = Graph("handle")
    graph.source([1])
    with pytest.raises(GraphError, match="nobody reads"):
        graph.start()


def test_run_closes_the_inputs() -> None:
    graph = Graph("handle")
    total = graph.input().reduce(int.__add__, 0)
    assert graph.run()[total] == 0


def test_a_run_shows_its_state() -> None:
    graph = Graph("handle")
    numbers = graph.input()
    numbers.sink(id)
    run = graph.start()
    assert repr(run) == "<Run of 'handle': running>"
    run[numbers].close()
    run.wait()
    assert repr(run) == "<Run of 'handle': done>"


def test_stages_begin_before_anybody_waits() -> None:
    seen = threading.Event()
    graph = Graph("handle")
    graph.source([1]).sink(lambda _: seen.set())
    run = graph.start()
    wait_until(seen.is_set)
    run.wait()


def test_a_slow_reader_holds_the_graph_back() -> None:
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


def test_a_run_inside_a_stage_of_another_run() -> None:
    def inner(item: int) -> int:
        graph = Graph("inner")
        total = graph.source(range(item)).map(double).reduce(int.__add__, 0)
        return graph.run()[total]

    graph = Graph("handle")
    totals = graph.source([3, 4]).map(inner).collect()
    assert graph.run()[totals] == [6, 12]


def test_a_general_stage_gets_its_keyword_arguments() -> None:
    def scale(items: In[int], factor: int = 1, *, total: list[int]) -> None:
        total.extend(item * factor for item in items)

    found: list[int] = []
    graph = Graph("handle")
    graph.stage(scale, graph.source([1, 2]), factor=3, total=found)
    graph.run()
    assert found == [3, 6]


def service() -> tuple[Graph, Stream, Stream]:
    """A graph that is asked from outside: it, its input and its answers."""
    graph = Graph("service")
    questions = graph.input()
    return graph, questions, questions.map(str).collect()


@pytest.mark.usefixtures("looks")
def test_more_can_be_put_than_the_channels_hold_before_anybody_reads() -> None:
    """The program waits in its put, so a result that nobody reads yet is taken in."""
    graph, questions, answers = service()
    with graph.start() as run:
        for number in range(1000):
            run[questions].put(number)
    assert run.wait()[answers] == [str(number) for number in range(1000)]


@pytest.mark.usefixtures("looks")
def test_what_was_taken_in_can_still_be_iterated_over() -> None:
    graph, questions, answers = service()
    with graph.start() as run:
        for number in range(500):
            run[questions].put(number)
        items = run.iter(answers)
        assert [next(items) for _ in range(400)] == [str(number) for number in range(400)]
        run[questions].put(500)
        run[questions].close()
        assert list(items) == [str(number) for number in range(400, 501)]
    assert answers not in run.wait()


@pytest.mark.usefixtures("looks")
def test_a_loop_over_one_branch_waits_for_no_reader_of_the_other() -> None:
    graph = Graph("branches")
    left, right = (branch.collect() for branch in graph.source(range(500)).tee(2))
    with graph.start() as run:
        assert list(run.iter(left)) == list(range(500))
    assert run.wait()[right] == list(range(500))


@pytest.mark.usefixtures("looks")
def test_leaving_what_was_taken_in_early_stops_the_stages_before() -> None:
    graph, questions, answers = service()
    with graph.start() as run:
        for number in range(500):
            run[questions].put(number)
        for _ in run.iter(answers):
            break
    assert run.stats().state in ("done", "stopped")

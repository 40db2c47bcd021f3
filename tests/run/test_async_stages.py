"""Test ``async def`` stages on threads.

The workers of such a stage are tasks in one event loop, on one thread. Order, errors, retries and ends are
the same as for other stages.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import warnings
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from runs import Gate, stage_of
from support.waiting import wait_until

from flowchan import Failed, Graph, In, Out, RunError, StageError


def result_of(graph: Graph, stream: Any) -> Any:
    return graph.run()[stream]


def failure_of(graph: Graph) -> StageError:
    with pytest.raises(RunError) as caught:
        graph.run()
    (error,) = caught.value.exceptions
    return error


async def same(item: Any) -> Any:
    return item


# --- tasks in one event loop ---


def test_workers_of_an_async_stage_run_concurrently() -> None:
    """Each call waits until three calls are running."""
    meeting = asyncio.Barrier(3)

    async def meet(item: int) -> int:
        await meeting.wait()
        return item

    graph = Graph("async")
    met = graph.source(range(9)).map(meet, workers=3).collect()
    assert result_of(graph, met) == list(range(9))


def test_workers_of_an_async_stage_share_one_thread() -> None:
    async def where(_: int) -> int:
        await asyncio.sleep(0)
        return threading.get_ident()

    graph = Graph("async")
    threads = graph.source(range(20)).map(where, workers=5).collect()
    found = set(result_of(graph, threads))
    assert len(found) == 1
    assert threading.get_ident() not in found


def test_a_hundred_workers_do_not_start_a_hundred_threads() -> None:
    inside = asyncio.Barrier(100)
    most = 0

    async def meet(item: int) -> int:
        nonlocal most
        await inside.wait()
        most = max(most, threading.active_count())
        return item

    before = threading.active_count()
    graph = Graph("async")
    met = graph.source(range(100)).map(meet, workers=100).collect()
    assert result_of(graph, met) == list(range(100))
    assert most - before < 10


def test_two_async_stages_work_concurrently() -> None:
    meeting = asyncio.Event()

    async def first(item: int) -> int:
        return item

    async def second(item: int) -> int:
        if item == 5:
            meeting.set()
        await meeting.wait()
        return item

    graph = Graph("async")
    done = graph.source(range(6)).map(first, workers=2).map(second, workers=6).collect()
    assert result_of(graph, done) == list(range(6))


def overtaking(ordered: bool) -> list[int]:
    """Return the outputs of a run that finishes item 0 after item 1."""
    passed = asyncio.Event()

    async def overtake(item: int) -> int:
        if item == 0:
            await passed.wait()
        else:
            passed.set()
        return item

    graph = Graph("async")
    out = graph.source([0, 1]).map(overtake, workers=2, ordered=ordered).collect()
    found: list[int] = result_of(graph, out)
    return found


def test_ordered_outputs_keep_the_order_of_items() -> None:
    assert overtaking(ordered=True) == [0, 1]


def test_unordered_outputs_arrive_as_soon_as_they_are_done() -> None:
    assert overtaking(ordered=False) == [1, 0]


# --- operators ---


def test_async_filter_keeps_wanted_items() -> None:
    async def even(item: int) -> bool:
        await asyncio.sleep(0)
        return item % 2 == 0

    graph = Graph("async")
    evens = graph.source(range(30)).filter(even, workers=4).collect()
    assert result_of(graph, evens) == list(range(0, 30, 2))


def test_flat_map_accepts_an_async_generator_or_a_coroutine() -> None:
    async def generate(item: int) -> AsyncIterator[int]:
        for number in range(item):
            await asyncio.sleep(0)
            yield number

    async def give(item: int) -> list[int]:
        return [item] * 2

    graph = Graph("async")
    out = graph.source(range(4)).flat_map(generate, workers=3).flat_map(give, workers=2).collect()
    assert result_of(graph, out) == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 2, 2]


def test_async_sink_gets_all_items() -> None:
    seen: list[int] = []

    async def keep(item: int) -> None:
        await asyncio.sleep(0)
        seen.append(item)

    graph = Graph("async")
    graph.source(range(50)).sink(keep, workers=5)
    graph.run()
    assert sorted(seen) == list(range(50))


def test_partials_and_bound_methods_of_coroutines_work() -> None:
    class Scale:
        async def by(self, factor: int, item: int) -> int:
            return factor * item

    graph = Graph("async")
    out = graph.source(range(4)).map(functools.partial(Scale().by, 10), workers=2).collect()
    assert result_of(graph, out) == [0, 10, 20, 30]


@pytest.mark.parametrize("awaits", [False, True])
def test_callable_class_is_built_once_per_worker_and_closed(awaits: bool) -> None:
    events: Counter[str] = Counter()
    meeting = asyncio.Barrier(3)

    class Client:
        def __init__(self) -> None:
            events["built"] += 1

        async def __call__(self, item: int) -> int:
            await meeting.wait()
            return -item

        def close(self) -> Any:
            events["closed"] += not awaits
            return self.aclose() if awaits else None

        async def aclose(self) -> None:
            await asyncio.sleep(0)
            events["closed"] += 1

    graph = Graph("async")
    out = graph.source(range(6)).map(Client, workers=3).collect()
    assert result_of(graph, out) == [0, -1, -2, -3, -4, -5]
    assert events == {"built": 3, "closed": 3}


def test_general_stage_awaits_its_ports() -> None:
    async def split(numbers: In[int], even: Out[int], odd: Out[int]) -> None:
        async for number in numbers:
            await (odd if number % 2 else even).aput(number)

    graph = Graph("async")
    even, odd = graph.stage(split, graph.source(range(10)))
    evens, odds = even.collect(), odd.collect()
    results = graph.run()
    assert results[evens] == [0, 2, 4, 6, 8]
    assert results[odds] == [1, 3, 5, 7, 9]


def test_general_stage_may_be_a_source_or_await_several_inputs() -> None:
    async def count(out: Out[int], start: int) -> None:
        for number in range(start, start + 3):
            await out.aput(number)

    async def add(left: In[int], right: In[int], out: Out[int]) -> None:
        async for first in left:
            (second,) = await asyncio.gather(right.aget())
            await out.aput(first + second)

    graph = Graph("async")
    ones, tens = graph.stage(count, start=1), graph.stage(count, start=10)
    out = graph.stage(add, ones, tens).collect()
    assert result_of(graph, out) == [11, 13, 15]


@pytest.mark.parametrize("on", ["thread", "process"])
def test_neighbours_of_an_async_stage_may_be_threads_or_processes(on: Any) -> None:
    graph = Graph("async")
    out = graph.source(range(200), on=on).map(same, workers=8).map(abs, on=on, workers=2).collect()
    assert result_of(graph, out) == list(range(200))


# --- failures ---


async def fail(item: int) -> int:
    await asyncio.sleep(0)
    if item % 3 == 1:
        raise LookupError(f"item {item}")
    return item


def test_failure_ends_the_run_and_names_stage_item_and_worker() -> None:
    graph = Graph("async")
    graph.source(range(3)).map(fail, name="failing").sink(same)
    error = failure_of(graph)
    assert (error.stage, error.item, error.worker) == ("failing", "1", "failing 1")
    assert isinstance(error.__cause__, LookupError)


def test_failure_of_one_task_cancels_the_others() -> None:
    """The cancelled tasks await events that are never set. Only the failed task is blamed."""
    cancelled: list[int] = []
    together = asyncio.Barrier(3)

    async def hang_or_fail(item: int) -> None:
        await together.wait()
        if item == 2:
            raise LookupError
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    graph = Graph("async")
    graph.source(range(3)).sink(hang_or_fail, workers=3)
    assert isinstance(failure_of(graph).__cause__, LookupError)
    assert sorted(cancelled) == [0, 1]


def test_failed_items_go_to_the_errors_stream() -> None:
    graph = Graph("async")
    stream = graph.source(range(9)).map(fail, workers=4)
    good, bad = stream.collect(), stream.errors.collect()
    results = graph.run()
    assert results[good] == [0, 2, 3, 5, 6, 8]
    failed: list[Failed] = sorted(results[bad], key=lambda failed: failed.item)
    assert [(each.item, type(each.error), each.attempts) for each in failed] == [
        (item, LookupError, 1) for item in (1, 4, 7)
    ]


@pytest.mark.parametrize("operator", ["map", "filter", "sink"])
def test_failed_items_are_retried(operator: str) -> None:
    tries: Counter[int] = Counter()

    async def second_time(item: int) -> int:
        tries[item] += 1
        await asyncio.sleep(0)
        if tries[item] == 1:
            raise LookupError
        return item

    graph = Graph("async")
    out = getattr(graph.source(range(1, 10)), operator)(second_time, workers=3, retries=1, name="tried")
    if out is not None:
        out.sink(same)
    run = graph.start()
    run.wait()
    assert tries == dict.fromkeys(range(1, 10), 2)
    assert stage_of(run, "tried").retried == 9


def test_retry_of_flat_map_does_not_repeat_outputs() -> None:
    tries: Counter[int] = Counter()

    async def twice(item: int) -> AsyncIterator[int]:
        tries[item] += 1
        yield item
        if tries[item] == 1:
            raise LookupError
        yield -item

    graph = Graph("async")
    out = graph.source([1, 2]).flat_map(twice, retries=1).collect()
    assert result_of(graph, out) == [1, -1, 2, -2]


def test_only_the_item_that_cannot_be_sent_fails() -> None:
    async def unsendable(item: int) -> Any:
        return threading.Lock() if item == 1 else item

    graph = Graph("async")
    stream = graph.source(range(3)).map(unsendable)
    good, bad = (
        stream.map(abs, on="process").collect(),
        stream.errors.map(lambda failed: failed.item).collect(),
    )
    results = graph.run()
    assert (results[good], results[bad]) == ([0, 2], [1])


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_base_exception_ends_the_run(error: type[BaseException]) -> None:
    async def leave(item: int) -> int:
        raise error

    graph = Graph("async")
    stream = graph.source(range(3)).map(leave, retries=5)
    stream.sink(same)
    stream.errors.sink(same)
    assert isinstance(failure_of(graph).__cause__, error)


def test_class_that_cannot_be_built_ends_the_run() -> None:
    class Client:
        def __init__(self) -> None:
            raise ConnectionError

        async def __call__(self, item: int) -> int:
            return item

    graph = Graph("async")
    graph.source(range(3)).map(Client).sink(same)
    assert isinstance(failure_of(graph).__cause__, ConnectionError)


# --- early end, stop and abort ---


def test_take_stops_the_async_stages_before_it() -> None:
    graph = Graph("async")
    out = graph.source(itertools.count).map(same, workers=3).take(4).collect()
    assert result_of(graph, out) == [0, 1, 2, 3]


def test_stop_finishes_items_in_flight() -> None:
    gate = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def hold(item: int) -> int:
        loops.append(asyncio.get_running_loop())
        await gate.wait()
        return item

    graph = Graph("async")
    out = graph.source(itertools.count, name="numbers", capacity=8).map(hold, workers=4).collect()
    run = graph.start()
    wait_until(lambda: len(loops) == 4)
    run.stop()
    wait_until(lambda: run._ports.channels["numbers"].closed)
    loops[0].call_soon_threadsafe(gate.set)
    items = run.wait()[out]
    assert items == list(range(len(items)))
    assert len(items) == stage_of(run, "numbers").items_out
    assert run.stats().state == "stopped"


def test_abort_ends_tasks_that_await_forever() -> None:
    """Tasks can be cancelled, so the run warns of no code that is still running."""
    inside: list[int] = []
    cleaned: list[int] = []

    async def hang(item: int) -> int:
        inside.append(item)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # the cleanup may await
            cleaned.append(item)
        return item

    graph = Graph("async")
    graph.source(itertools.count).map(hang, workers=3).sink(same)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = graph.start()
        wait_until(lambda: len(inside) == 3)
        run.abort()
        run.wait()
    assert sorted(cleaned) == [0, 1, 2]
    assert run.stats().state == "aborted"


def test_source_that_awaits_forever_does_not_delay_a_finished_run() -> None:
    async def device(out: Out[int]) -> None:
        await out.aput(1)
        await asyncio.Event().wait()

    graph = Graph("async")
    out = graph.stage(device).take(1).collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert result_of(graph, out) == [1]


def test_open_input_feeds_an_async_stage() -> None:
    graph = Graph("async")
    numbers = graph.input()
    out = numbers.map(same, workers=3).collect()
    with graph.start() as run:
        for item in range(20):
            run[numbers].put(item)
    assert run.wait()[out] == list(range(20))


def test_results_are_iterated_while_tasks_work() -> None:
    gate = Gate()
    graph = Graph("async")
    out = graph.source(range(5)).map(same, workers=2).collect()
    with graph.start() as run:
        assert list(run.iter(out)) == [0, 1, 2, 3, 4]
    gate.open()


# --- checks before the run ---


def problems_of(graph: Graph) -> list[tuple[str, str]]:
    return [(problem.rule, problem.stage) for problem in graph.check()]


async def numbers() -> AsyncIterator[int]:
    yield 1


async def key(item: int) -> int:
    return item


async def add(left: int, right: int) -> int:
    return left + right


def test_check_reports_async_functions_in_operators_without_async_support() -> None:
    graph = Graph("async")
    source = graph.source(numbers)
    for branch in source.partition(key, 2, name="parts"):
        branch.sink(print)
    graph.source([1]).reduce(add, 0, name="total")
    assert [problem for problem in problems_of(graph) if problem[0] == "async"] == [
        ("async", "parts"), ("async", "total"),
    ]  # fmt: skip


def test_async_stages_are_checked_like_other_stages() -> None:
    async def to_upper(item: str) -> str:
        return item.upper()

    graph = Graph("async")
    graph.source([1]).map(to_upper, name="to_upper")
    assert problems_of(graph) == [("unread", "to_upper")]
    with pytest.raises(ValueError, match="workers"):
        graph.source([1]).map(to_upper, workers=0)

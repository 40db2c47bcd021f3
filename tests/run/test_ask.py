"""Test requests to a running graph: each answer must reach its caller, whatever the stages do with items."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from runs import stage_of
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Full, Graph, Run, RunError, Stream, WorkerDied
from flowchan.run.policy import seeds
from flowchan.run.worker import cancelled_requests, requests


def double(number: int) -> int:
    if number == 13:
        raise ValueError("thirteen")
    if number == 14:
        os._exit(7)
    return 2 * number


def double_all(numbers: list[int]) -> list[Any]:
    return [ValueError("thirteen") if number == 13 else 2 * number for number in numbers]


async def double_later(number: int) -> int:
    await asyncio.sleep(0)
    return double(number)


def by_threads(stream: Stream[int]) -> Stream[int]:
    return stream.map(double, workers=3, ordered=False)


def by_processes(stream: Stream[int]) -> Stream[int]:
    return stream.map(double, on="process", workers=2, max_deaths=1)


def by_coroutines(stream: Stream[int]) -> Stream[int]:
    return stream.map(double_later, workers=20)


def in_batches(stream: Stream[int]) -> Stream[Any]:
    return stream.batch(8, timeout=0.002).map(double_all, on="process").unbatch()


def in_batches_to_the_end(stream: Stream[int]) -> Stream[Any]:
    return stream.batch(8, timeout=0.002).map(double_all)


def by_branches(stream: Stream[int]) -> Stream[int]:
    even, odd = stream.partition(lambda number: number % 2, 2)
    return stream.graph.merge(even.map(double), odd.filter(lambda number: True).map(double))  # type: ignore[attr-defined]


VARIANTS = [by_threads, by_processes, by_coroutines, in_batches, in_batches_to_the_end, by_branches]


def ask_in_graph(
    declare: Callable[[Stream[int]], Stream[Any]], use: Callable[[Run, Any], Awaitable[Any]]
) -> Any:
    """Return the result of ``use(run, questions)`` for a graph from an input to a collect."""

    async def main() -> Any:
        graph = Graph("ask_in_graph")
        questions: Any = graph.input("questions")
        declare(questions).collect(name="end")
        with graph.start() as run:
            return await use(run, questions)

    return asyncio.run(main())


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_hundred_concurrent_requests_get_their_own_answers(variant: Any) -> None:
    async def use(run: Run, questions: Any) -> None:
        answers = [run.ask(questions, number) for number in (*range(13), 13, *range(15, 201))]
        found = await asyncio.gather(*answers, return_exceptions=True)
        assert found[:13] + found[14:] == [2 * n for n in (*range(13), *range(15, 201))]
        assert isinstance(found[13], ValueError)
        assert str(found[13]) == "thirteen"

    ask_in_graph(variant, use)


def test_items_without_requests_reach_the_results() -> None:
    async def main() -> None:
        graph = Graph("ask_in_graph")
        questions: Any = graph.input("questions")
        result = questions.batch(4, timeout=0.001).map(double_all).unbatch().collect()
        with graph.start() as run:
            for number in range(10):
                await run[questions].aput(number)
                assert await run.ask(questions, 100 + number) == 200 + 2 * number
        assert run.wait()[result] == [2 * number for number in range(10)]

    asyncio.run(main())


def test_caller_learns_that_its_item_killed_the_worker() -> None:
    async def use(run: Run, questions: Any) -> None:
        with pytest.raises(WorkerDied, match="exited with code 7"):
            await run.ask(questions, 14)
        assert await run.ask(questions, 4) == 8

    ask_in_graph(by_processes, use)


class Bomb:
    """Item that kills the worker that unpickles it."""

    def __reduce__(self) -> Any:
        return explode, (os.getpid(),)


def explode(maker: int) -> Any:
    if os.getpid() != maker:
        os._exit(7)


@pytest.mark.parametrize("in_batches", [False, True])
def test_caller_learns_that_unpickling_its_item_killed_the_worker(in_batches: bool) -> None:
    """The item is sent alone or in a batch with other items, and the run continues."""

    def declare(stream: Stream[Any]) -> Stream[Any]:
        batches = stream.batch(2, timeout=0.001) if in_batches else stream
        return batches.map(lambda item: item, on="process", max_deaths=2)

    async def use(run: Run, questions: Any) -> None:
        asks = [run.ask(questions, Bomb()) for _ in range(2)]
        for error in await asyncio.gather(*asks, return_exceptions=True):
            assert isinstance(error, WorkerDied)
            assert "each exited with code 7" in str(error)
        assert await run.ask(questions, 4) == 4

    ask_in_graph(declare, use)


def test_failed_request_is_counted_and_does_not_end_the_run() -> None:
    async def main() -> str:
        graph = Graph("ask_in_graph")
        questions: Any = graph.input("questions")
        questions.map(double, name="double").collect(name="end")
        with graph.start() as run:
            for _ in range(3):
                with pytest.raises(ValueError, match="thirteen"):
                    await run.ask(questions, 13)
            await run.ask(questions, 1)
        return run.report()

    assert "double     4 = 1 out + 3 failed" in asyncio.run(main()).splitlines()


def test_sink_answers_requests_with_its_return_value() -> None:
    async def main() -> None:
        graph = Graph("ask_in_graph")
        questions: Any = graph.input("questions")
        questions.sink(double)
        with graph.start() as run:
            assert await run.ask(questions, 4) == 8

    asyncio.run(main())


def test_all_requests_in_a_batch_are_answered_wherever_it_ends() -> None:
    """The batch reaches a second function, a filter that drops it, or a sink."""

    async def main() -> None:
        graph = Graph("ask_in_graph")
        batches: Any = graph.input("batches")
        again, sieved = (graph.input(name) for name in ("again", "sieved"))
        batches.batch(4, timeout=0.002).sink(double_all)
        again.batch(4, timeout=0.002).map(list).map(double_all, name="second").collect()
        sieved.batch(4, timeout=0.002).filter(lambda batch: False, name="sieve").collect()
        with graph.start() as run:
            assert await asyncio.gather(*(run.ask(batches, number) for number in range(6))) == [
                0,
                2,
                4,
                6,
                8,
                10,
            ]
            one, other = await asyncio.gather(run.ask(again, 3), run.ask(again, 13), return_exceptions=True)
            assert (one, type(other)) == (6, ValueError)
            cancelled = await asyncio.gather(*(run.ask(sieved, n) for n in range(3)), return_exceptions=True)
            assert [type(error) for error in cancelled] == [LookupError] * 3

    asyncio.run(main())


def test_caller_learns_that_a_filter_dropped_its_item() -> None:
    async def use(run: Run, questions: Any) -> None:
        with pytest.raises(LookupError, match="stage 'sieve' dropped the item, so it has no answer"):
            await run.ask(questions, 3)

    ask_in_graph(lambda stream: stream.filter(lambda number: number != 3, name="sieve"), use)


@pytest.mark.parametrize("on", ["thread", "process"])
def test_cancelled_request_is_dropped_at_the_next_stage(on: Any) -> None:
    gate = Gate()

    def hold(number: int) -> int:
        if number == 0:
            gate.wait()
        return number

    async def main() -> Run:
        graph = Graph("ask_in_graph")
        questions: Any = graph.input("questions")
        questions.map(hold, on=on, name="hold").map(double, on=on, name="double").collect(name="end")
        with graph.start() as run:
            first = asyncio.create_task(run.ask(questions, 0))
            await asyncio.to_thread(gate.wait_held)
            cancelled = asyncio.create_task(run.ask(questions, 1))
            with pytest.raises(TimeoutError, match=r"^ask: no answer within timeout=0\.01 s$"):
                await run.ask(questions, 2, timeout=0.01)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            gate.open()
            assert await first == 0
            assert await run.ask(questions, 3) == 6
        return run

    run = asyncio.run(main())
    assert stage_of(run, "hold").items_in == 4
    assert stage_of(run, "double").items_in == 2
    assert stage_of(run, "hold").unwanted == 2
    assert "MISSING" not in run.report()


def test_late_cancellation_does_not_cancel_another_request() -> None:
    async def main() -> None:
        seeds.enter(seeds.Worker("stage", 1, 1, 0, 0))
        reported: list[int] = []
        questions = requests.Requests(lambda: None, reported.append)
        try:
            first, *others, last = [
                questions.begin(None, "input")[0] for _ in range(cancelled_requests.SLOTS + 1)
            ]
            for one in others:
                questions.forget(one.question)
            questions.forget(first.question)
            assert not cancelled_requests.is_cancelled(last.question, last.board)
            questions.forget(last.question)
            assert cancelled_requests.is_cancelled(last.question, last.board)
            assert not cancelled_requests.is_cancelled(first.question, first.board)
            assert reported == [one.question for one in (*others, first, last)]
        finally:
            questions.end()

    asyncio.run(main())


def test_caller_learns_that_its_item_entered_an_ended_branch() -> None:
    """A ``take`` that has enough items, or a stage before the ``take``, drops the item."""

    async def main() -> None:
        graph = Graph("ask_in_graph")
        questions: Any = graph.input("questions", capacity=100)
        branches = questions.partition(lambda number: number % 3, 3)
        branches[0].take(1).collect(name="one")
        branches[1].map(double).take(1).collect(name="other")
        branches[2].collect()
        with graph.start() as run:
            for number in (0, 1):
                assert await run.ask(questions, number) == 2 * number
                answers = [run.ask(questions, number + 3, timeout=60) for _ in range(2)]
                cancelled = await asyncio.gather(*answers, return_exceptions=True)
                assert [type(error) for error in cancelled] == [LookupError] * 2
            assert await run.ask(questions, 2) == 2
        assert "MISSING" not in run.report()

    asyncio.run(main())


class NeverArrives:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def unreadable(number: int) -> Any:
    return 2 * number if number else NeverArrives()


@pytest.mark.parametrize(
    ("variant", "item"),
    [
        (by_processes, NeverArrives()),
        (in_batches, NeverArrives()),
        (lambda stream: stream.map(unreadable, on="process"), 0),
    ],
)
def test_caller_learns_that_its_item_cannot_be_unpickled(variant: Any, item: Any) -> None:
    """The item is unpickled in a worker, in a batch, or at the end of the graph."""

    async def use(run: Run, questions: Any) -> None:
        answers = [run.ask(questions, one, timeout=60) for one in (1, item, 2)]
        one, failed, two = await asyncio.gather(*answers, return_exceptions=True)
        assert (one, type(failed), two) == (2, ZeroDivisionError, 4)

    ask_in_graph(variant, use)


@pytest.mark.parametrize("item", [5, "five", [5]], ids=str)
def test_caller_learns_that_its_batch_cannot_be_unpickled(item: Any) -> None:
    """Only the batch's readable item has a caller, which would get an answer if the item were sent alone."""

    async def main() -> None:
        graph = Graph("ask_in_graph")
        questions: Any = graph.input("questions")
        batches = questions.batch(2).map(list, on="process", name="copy")
        batches.collect()
        failed = batches.errors.collect()
        with graph.start() as run:
            answer = asyncio.create_task(run.ask(questions, item, timeout=60))
            await asyncio.to_thread(wait_until, lambda: stage_of(run, "batch").items_in == 1)
            await run[questions].aput(NeverArrives())
            with pytest.raises(ZeroDivisionError):
                await answer
        assert len(run.wait()[failed]) == 1

    asyncio.run(main())


def test_run_error_for_a_request_shows_the_item_without_wrapper() -> None:
    async def use(run: Run, questions: Any) -> None:
        with pytest.raises(RunError):
            await run.ask(questions, 3)

    with pytest.raises(RunError) as caught:
        ask_in_graph(lambda stream: stream.map(exit), use)
    assert caught.value.exceptions[0].item == "3"


async def waiting_for_answers(run: Run, number: int) -> None:
    while run.health().waiting != number:
        await asyncio.sleep(0.001)


def test_ask_beyond_max_waiting_raises_full_and_puts_nothing() -> None:
    gate = Gate()

    async def main() -> None:
        graph = Graph("shedding")
        questions, others = graph.input("questions"), graph.input("others")
        graph.merge(questions, others).map(gate.wait, name="held").collect(name="end")
        with graph.start() as run:
            calls = [asyncio.ensure_future(run.ask(questions, n, max_waiting=2)) for n in range(2)]
            await waiting_for_answers(run, 2)
            with pytest.raises(Full, match=r"^ask: max_waiting=2 requests at input 'questions' have"):
                await run.ask(questions, 2, max_waiting=2)
            # each input has a separate count
            other = asyncio.ensure_future(run.ask(others, 3, max_waiting=1))
            await waiting_for_answers(run, 3)
            calls[0].cancel()
            await waiting_for_answers(run, 2)
            last = asyncio.ensure_future(run.ask(questions, 4, max_waiting=2))
            await waiting_for_answers(run, 3)
            gate.open()
            assert await asyncio.gather(calls[1], other, last) == [1, 3, 4]
            await waiting_for_answers(run, 0)
            assert await run.ask(questions, 5, max_waiting=1) == 5
        assert sum(edge.put for edge in run.stats().edges if edge.reader == "merge") == 5

    asyncio.run(main())


@pytest.mark.parametrize(("wrong", "error"), [(0, ValueError), ("5", TypeError)])
def test_ask_refuses_a_wrong_max_waiting(wrong: Any, error: type[Exception]) -> None:
    async def use(run: Run, questions: Any) -> None:
        with pytest.raises(error, match=r"^ask: max_waiting must be "):
            await run.ask(questions, 1, max_waiting=wrong)

    ask_in_graph(by_threads, use)


def test_all_callers_learn_that_the_run_failed() -> None:
    gate = Gate()
    found: list[Any] = []

    async def use(run: Run, questions: Any) -> None:
        answers = [asyncio.create_task(run.ask(questions, number)) for number in range(5)]
        await asyncio.to_thread(gate.wait_held)
        run[questions].channel.abort(OSError("the disk is full"))
        await asyncio.to_thread(wait_until, lambda: run.state == "failed")
        gate.open()
        found.extend(await asyncio.gather(*answers, return_exceptions=True))

    with pytest.raises(RunError):
        ask_in_graph(lambda stream: stream.map(gate.wait), use)
    assert [type(one) for one in found] == [RunError] * 5


def test_ask_after_the_end_of_the_run_raises() -> None:
    async def main() -> None:
        graph = Graph("ask_in_graph")
        questions: Any = graph.input("questions")
        questions.collect()
        with graph.start() as run:
            assert await run.ask(questions, 1) == 1
        with pytest.raises(RuntimeError, match="the run has ended without an answer to this item"):
            await run.ask(questions, 2)

    asyncio.run(main())


def test_run_rejects_requests_before_it_counts_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    had_ended: list[bool] = []
    usual = requests.Requests.end

    def end(self: requests.Requests) -> None:
        had_ended.append(run._supervisor.ended.is_set())
        usual(self)

    monkeypatch.setattr(requests.Requests, "end", end)
    graph = Graph("ask_in_graph")
    graph.input("questions").collect()
    with graph.start() as run:
        pass
    assert had_ended == [False]


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (
            lambda s: s.flat_map(lambda n: [n]).collect(),
            "must not reach 'flat_map', because flat_map does not return one output",
        ),
        (
            lambda s: s.reduce(max, 0).batch(3).sink(print),
            "must not reach 'max', because reduce does not return one output",
        ),
        (
            lambda s: s.collect().sink(print),
            "must not reach 'collect', because collect does not return one output",
        ),
    ],
)
def test_ask_rejects_streams_that_cannot_return_answers(declare: Any, message: str) -> None:
    async def main() -> None:
        graph = Graph("ask_in_graph")
        questions: Any = graph.input("questions")
        declare(questions)
        with graph.start() as run:
            with pytest.raises(ValueError, match=message):
                await run.ask(questions, 1)
            run.abort()

    asyncio.run(main())

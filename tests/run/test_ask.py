"""Requests a running graph: each answer comes to who asked, however items travel."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from runs import stage_of
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Graph, Run, RunError, Stream, WorkerDied
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


WAYS = [by_threads, by_processes, by_coroutines, in_batches, in_batches_to_the_end, by_branches]


def asked(declare: Callable[[Stream[int]], Stream[Any]], use: Callable[[Run, Any], Awaitable[Any]]) -> Any:
    """What ``use(run, questions)`` gives, of a graph between an input and a collect."""

    async def main() -> Any:
        graph = Graph("asked")
        questions: Any = graph.input("questions")
        declare(questions).collect(name="end")
        with graph.start() as run:
            return await use(run, questions)

    return asyncio.run(main())


@pytest.mark.parametrize("way", WAYS)
def test_200_at_a_time_get_each_its_own_answer_or_failure(way: Any) -> None:
    async def use(run: Run, questions: Any) -> None:
        answers = [run.ask(questions, number) for number in (*range(13), 13, *range(15, 201))]
        found = await asyncio.gather(*answers, return_exceptions=True)
        assert found[:13] + found[14:] == [2 * n for n in (*range(13), *range(15, 201))]
        assert isinstance(found[13], ValueError)
        assert str(found[13]) == "thirteen"

    asked(way, use)


def test_items_that_nobody_asks_go_on_to_the_results() -> None:
    async def main() -> None:
        graph = Graph("asked")
        questions: Any = graph.input("questions")
        result = questions.batch(4, timeout=0.001).map(double_all).unbatch().collect()
        with graph.start() as run:
            for number in range(10):
                await run[questions].aput(number)
                assert await run.ask(questions, 100 + number) == 200 + 2 * number
        assert run.wait()[result] == [2 * number for number in range(10)]

    asyncio.run(main())


def test_an_item_that_kills_its_worker_is_told_to_who_asked() -> None:
    async def use(run: Run, questions: Any) -> None:
        with pytest.raises(WorkerDied, match="exited with code 7"):
            await run.ask(questions, 14)
        assert await run.ask(questions, 4) == 8

    asked(by_processes, use)


class Bomb:
    """Ends the process of a worker that unpickles it."""

    def __reduce__(self) -> Any:
        return explode, (os.getpid(),)


def explode(maker: int) -> Any:
    if os.getpid() != maker:
        os._exit(7)


@pytest.mark.parametrize("in_batches", [False, True])
def test_an_item_that_kills_who_unpickles_it_is_told_to_who_asked(in_batches: bool) -> None:
    """Alone, or together with those who share its batch; and the run goes on."""

    def declare(stream: Stream[Any]) -> Stream[Any]:
        batches = stream.batch(2, timeout=0.001) if in_batches else stream
        return batches.map(lambda item: item, on="process", max_deaths=2)

    async def use(run: Run, questions: Any) -> None:
        asks = [run.ask(questions, Bomb()) for _ in range(2)]
        for error in await asyncio.gather(*asks, return_exceptions=True):
            assert isinstance(error, WorkerDied)
            assert "2 × exited with code 7" in str(error)
        assert await run.ask(questions, 4) == 4

    asked(declare, use)


def test_a_failed_item_that_was_asked_is_counted_and_ends_nothing() -> None:
    async def main() -> str:
        graph = Graph("asked")
        questions: Any = graph.input("questions")
        questions.map(double, name="double").collect(name="end")
        with graph.start() as run:
            for _ in range(3):
                with pytest.raises(ValueError, match="thirteen"):
                    await run.ask(questions, 13)
            await run.ask(questions, 1)
        return run.report()

    assert "double     4 = 1 out + 3 failed" in asyncio.run(main()).splitlines()


def test_a_sink_answers_with_what_its_function_returns() -> None:
    async def main() -> None:
        graph = Graph("asked")
        questions: Any = graph.input("questions")
        questions.sink(double)
        with graph.start() as run:
            assert await run.ask(questions, 4) == 8

    asyncio.run(main())


def test_all_members_of_a_batch_are_answered_wherever_it_ends() -> None:
    """Also by a second function over the batch, a filter that lets it go, and a sink."""

    async def main() -> None:
        graph = Graph("asked")
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
            gone = await asyncio.gather(*(run.ask(sieved, n) for n in range(3)), return_exceptions=True)
            assert [type(error) for error in gone] == [LookupError] * 3

    asyncio.run(main())


def test_an_item_that_a_filter_lets_go_has_no_answer() -> None:
    async def use(run: Run, questions: Any) -> None:
        with pytest.raises(LookupError, match="stage 'sieve' dropped the item, so it has no answer"):
            await run.ask(questions, 3)

    asked(lambda stream: stream.filter(lambda number: number != 3, name="sieve"), use)


@pytest.mark.parametrize("on", ["thread", "process"])
def test_what_nobody_waits_for_any_more_is_dropped_at_the_next_stage(on: Any) -> None:
    gate = Gate()

    def hold(number: int) -> int:
        if number == 0:
            gate.wait()
        return number

    async def main() -> Run:
        graph = Graph("asked")
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


def test_a_question_that_is_forgotten_late_crosses_off_nobody_elses() -> None:
    async def main() -> None:
        seeds.enter(seeds.Worker("stage", 1, 1, 0, 0))
        told: list[int] = []
        questions = requests.Requests(lambda: None, told.append)
        try:
            first, *others, last = [questions.begin(None)[0] for _ in range(cancelled_requests.PLACES + 1)]
            for one in others:
                questions.forget(one.question)
            questions.forget(first.question)
            assert not cancelled_requests.is_crossed_off(last.question, last.board)
            questions.forget(last.question)
            assert cancelled_requests.is_crossed_off(last.question, last.board)
            assert not cancelled_requests.is_crossed_off(first.question, first.board)
            assert told == [one.question for one in (*others, first, last)]
        finally:
            questions.end()

    asyncio.run(main())


def test_an_item_that_goes_nowhere_has_no_answer() -> None:
    """Whoever lets it go: a take that has what it wants, and those before it."""

    async def main() -> None:
        graph = Graph("asked")
        questions: Any = graph.input("questions", capacity=100)
        branches = questions.partition(lambda number: number % 3, 3)
        branches[0].take(1).collect(name="one")
        branches[1].map(double).take(1).collect(name="other")
        branches[2].collect()
        with graph.start() as run:
            for number in (0, 1):
                assert await run.ask(questions, number) == 2 * number
                answers = [run.ask(questions, number + 3, timeout=60) for _ in range(2)]
                gone = await asyncio.gather(*answers, return_exceptions=True)
                assert [type(error) for error in gone] == [LookupError] * 2
            assert await run.ask(questions, 2) == 2
        assert "MISSING" not in run.report()

    asyncio.run(main())


class NeverArrives:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def unreadable(number: int) -> Any:
    return 2 * number if number else NeverArrives()


@pytest.mark.parametrize(
    ("way", "item"),
    [
        (by_processes, NeverArrives()),
        (in_batches, NeverArrives()),
        (lambda stream: stream.map(unreadable, on="process"), 0),
    ],
)
def test_an_item_that_can_not_be_unpickled_is_told_to_who_asked(way: Any, item: Any) -> None:
    """Wherever on its way that happens."""

    async def use(run: Run, questions: Any) -> None:
        answers = [run.ask(questions, one, timeout=60) for one in (1, item, 2)]
        one, failed, two = await asyncio.gather(*answers, return_exceptions=True)
        assert (one, type(failed), two) == (2, ZeroDivisionError, 4)

    asked(way, use)


@pytest.mark.parametrize("item", [5, "five", [5]], ids=str)
def test_who_shares_a_batch_that_can_not_be_unpickled_is_told(item: Any) -> None:
    """Also if nobody asked for what can't be, and the plain item alone would have come."""

    async def main() -> None:
        graph = Graph("asked")
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


def test_a_run_that_ends_by_an_asked_item_names_the_item_alone() -> None:
    async def use(run: Run, questions: Any) -> None:
        with pytest.raises(RunError):
            await run.ask(questions, 3)

    with pytest.raises(RunError) as caught:
        asked(lambda stream: stream.map(exit), use)
    assert caught.value.exceptions[0].item == "3"


def test_what_is_asked_counts_as_failed_once_and_not_when_it_is_let_go() -> None:
    async def main() -> Run:
        graph = Graph("asked")
        sieved, batches = (graph.input(name) for name in ("sieved", "batches"))
        sieved.filter(lambda number: False, name="sieve").collect()
        batches.batch(3).map(fail_all, name="all").collect()
        with graph.start() as run:
            asked = [*(run.ask(batches, number) for number in range(3)), run.ask(sieved, 1)]
            await asyncio.gather(*asked, return_exceptions=True)
        return run

    run = asyncio.run(main())
    found = [stage_of(run, name) for name in ("sieve", "all")]
    assert [(stage.failed, stage.members_failed) for stage in found] == [(0, 0), (1, 0)]


def fail_all(numbers: list[int]) -> list[int]:
    raise ValueError(numbers)


def test_a_batch_in_two_branches_is_not_changed_in_one_by_the_other() -> None:
    """A member that is dropped in one of them is still in the hands of the other's function."""
    here, there = Gate(), Gate()

    def hold(numbers: list[int]) -> list[int]:
        here.wait()
        return numbers

    async def main() -> Run:
        graph = Graph("asked")
        questions: Any = graph.input("questions")
        one, other = questions.batch(2).tee(2)
        one.map(hold, name="hold").sink(id)
        other.filter(lambda numbers: there.wait(True), name="held").sink(len, name="end")
        with graph.start() as run:
            asked = [asyncio.create_task(run.ask(questions, number)) for number in range(2)]
            for gate in (here, there):
                await asyncio.to_thread(gate.wait_held)
            asked[1].cancel()
            await asyncio.gather(asked[1], return_exceptions=True)
            there.open()
            await asyncio.to_thread(wait_until, lambda: stage_of(run, "end").items_out == 1)
            here.open()
            await asked[0]
        return run

    assert stage_of(asyncio.run(main()), "hold").failed == 0


def test_when_the_run_fails_all_who_wait_hear_of_it() -> None:
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
        asked(lambda stream: stream.map(gate.wait), use)
    assert [type(one) for one in found] == [RunError] * 5


def test_a_run_that_has_ended_answers_no_more() -> None:
    async def main() -> None:
        graph = Graph("asked")
        questions: Any = graph.input("questions")
        questions.collect()
        with graph.start() as run:
            assert await run.ask(questions, 1) == 1
        with pytest.raises(RuntimeError, match="the run has ended without an answer to this item"):
            await run.ask(questions, 2)

    asyncio.run(main())


def test_a_run_has_not_ended_before_it_takes_no_more_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    had_ended: list[bool] = []
    usual = requests.Requests.end

    def end(self: requests.Requests) -> None:
        had_ended.append(run._supervisor.ended.is_set())
        usual(self)

    monkeypatch.setattr(requests.Requests, "end", end)
    graph = Graph("asked")
    graph.input("questions").collect()
    with graph.start() as run:
        pass
    assert had_ended == [False]


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (
            lambda s: s.flat_map(lambda n: [n]).collect(),
            "reach 'flat_map', and flat_map does not work item by item",
        ),
        (
            lambda s: s.reduce(max, 0).batch(3).sink(print),
            "reach 'max', and reduce does not work item by item",
        ),
        (lambda s: s.collect().sink(print), "reach 'collect', and collect does not work item by item"),
    ],
)
def test_what_can_not_be_asked_is_told(declare: Any, message: str) -> None:
    async def main() -> None:
        graph = Graph("asked")
        questions: Any = graph.input("questions")
        declare(questions)
        with graph.start() as run:
            with pytest.raises(ValueError, match=message):
                await run.ask(questions, 1)
            run.abort()

    asyncio.run(main())

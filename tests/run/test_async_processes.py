"""Test ``async def`` stages in processes and on hosts.

Each worker has its own event loop. In all other respects, the stages behave like those with synchronous
functions.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
from support.waiting import wait_until

from flowchan import Graph, In, Out, RunError
from flowchan.hosts import local

PLACEMENTS = ["process", local(2)]


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        await asyncio.sleep(0)
        yield number


async def ten_times(number: int) -> int:
    await asyncio.sleep(0)
    if number == 7:
        raise ValueError("seven")
    return 10 * number


async def is_even(number: int) -> bool:
    return number % 20 == 0


async def twice(number: int) -> AsyncIterator[int]:
    yield number
    yield number


async def both(number: int) -> list[int]:
    return [number, number + 1]


async def pass_on(items: In[int], out: Out[int]) -> None:
    async for item in items:
        await out.aput(item)


class Adds:
    """Stage function that checks that it always runs in the same event loop."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, item: int) -> int:
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop()
        return item + 1

    async def close(self) -> None:
        assert self.loop in (None, asyncio.get_running_loop())


class Unclosable:
    async def __call__(self, item: int) -> int:
        return item

    async def close(self) -> None:
        raise ValueError("can't be closed")


@pytest.mark.parametrize("on", PLACEMENTS, ids=str)
def test_async_operators_in_processes_behave_like_those_on_threads(on: object) -> None:
    """The test compares the order of the outputs, the errors and the retries."""
    graph = Graph("async")
    mapped = graph.source(numbers, 10, on=on).map(ten_times, on=on, workers=3, retries=1)
    errors = mapped.errors.map(lambda failed: (failed.item, str(failed.error))).collect()
    poured = mapped.filter(is_even, on=on).flat_map(twice, on=on, workers=2).flat_map(both, on=on)
    moved = graph.stage(pass_on, poured.map(Adds, on=on, workers=2), on=on)
    left, right = moved.tee(2)
    left.sink(pass_by, on=on)
    result = right.collect()
    done = graph.run()
    assert done[errors] == [(7, "seven")]
    assert done[result] == [n + more for n in range(0, 100, 20) for _ in range(2) for more in (1, 2)]


async def pass_by(item: int) -> None: ...


async def lasts(item: int) -> int:
    await asyncio.Event().wait()
    return item


@pytest.mark.parametrize("on", PLACEMENTS, ids=str)
def test_abort_ends_a_worker_that_waits_forever(on: object) -> None:
    graph = Graph("async")
    graph.source(range(3)).map(lasts, on=on).sink(print)
    run = graph.start()
    wait_until(lambda: run.stats().stages[1].items_in > 0)
    run.abort()
    run.wait()
    assert run.stats().state == "aborted"


@pytest.mark.parametrize("on", PLACEMENTS, ids=str)
def test_item_that_exceeds_the_timeout_fails(on: object) -> None:
    graph = Graph("async")
    mapped = graph.source(range(1)).map(lasts, on=on, timeout=0.2, max_deaths=1)
    errors, result = mapped.errors.collect(), mapped.collect()
    done = graph.run()
    assert (len(done[errors]), done[result]) == (1, [])


async def dies_once(item: tuple[int, str]) -> int:
    number, mark = item
    if number == 1 and not os.path.exists(mark):
        open(mark, "w").close()
        os._exit(1)
    return number


def test_dead_worker_of_an_async_stage_is_replaced(tmp_path) -> None:
    graph = Graph("async")
    given = graph.source([(n, str(tmp_path / "mark")) for n in range(5)])
    result = given.map(dies_once, on="process", workers=2).collect()
    assert graph.run()[result] == [0, 1, 2, 3, 4]


def test_requests_to_an_async_process_stage_are_answered() -> None:
    graph = Graph("async")
    questions = graph.input("asked")
    answers = questions.map(Adds, on="process").collect()

    async def ask() -> list[int]:
        with graph.start() as run:
            found = [await run.ask(questions, number) for number in range(3)]
            run[questions].close()
        return found

    del answers
    assert asyncio.run(ask()) == [1, 2, 3]


def test_pool_workers_keep_their_event_loop() -> None:
    graph = Graph("async")
    result = graph.source(range(3)).map(Adds, on="process").collect()
    with graph.pool() as pool:
        assert [pool.run()[result] for _ in range(2)] == [[1, 2, 3]] * 2


@pytest.mark.parametrize("on", PLACEMENTS, ids=str)
def test_error_in_close_of_an_async_callable_is_reported(on: object) -> None:
    graph = Graph("async")
    graph.source(range(3)).map(Unclosable, on=on).sink(print)
    with pytest.raises(RunError) as caught:
        graph.run()
    assert "can't be closed" in str(caught.value.exceptions[0])


def test_source_without_readers_is_cleaned_up(tmp_path) -> None:
    graph = Graph("async")
    first = graph.source(marked, str(tmp_path / "mark"), on="process").map(abs)
    result = graph.stage(take_one, first).collect()
    assert graph.run()[result] == [0]
    assert (tmp_path / "mark").exists()


async def marked(path: str) -> AsyncIterator[int]:
    try:
        while True:
            await asyncio.sleep(0)
            yield 0
    finally:
        await asyncio.sleep(0)
        open(path, "w").close()


def take_one(items: In[int], out: Out[int]) -> None:
    out.put(items.get())

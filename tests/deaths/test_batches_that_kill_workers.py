"""Test R10 for batches: only items that kill their workers fail, and the other items get results."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import threading
from collections import Counter
from typing import Any

import numpy as np
import psutil
import pytest
from kill_points import Deaths, stage_of
from support.waiting import wait_until

from flowchan import Channel, Failed, Graph, Run, RunError, WorkerDied
from flowchan.hosts import local
from flowchan.run.policy import decisions

SIZE = 32


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work(numbers: list[int]) -> list[int]:
    if any(number < 0 for number in numbers):
        kill()
    return [2 * number for number in numbers]


def total(numbers: list[int]) -> int:
    return sum(work(numbers))


def array(numbers: list[int]) -> Any:
    return np.array(work(numbers))


def over(items: list[int], function: Any = work, **options: Any) -> tuple[Run, list[Any], list[Failed[int]]]:
    """Run ``function`` over batches. Return the run, the results and the failures."""
    graph = Graph("deadly")
    options = {"on": "process", "name": "work", **options}
    worked = graph.source(items).batch(SIZE).map(function, **options)
    out, failed = worked.collect(), worked.errors.collect()
    run = graph.start()
    results = run.wait()
    return run, results[out], results[failed]


def with_deadly(*deadly: int, size: int = 2 * SIZE) -> list[int]:
    return [-number if number in deadly else number for number in range(size)]


def without(*deadly: int, size: int = 2 * SIZE) -> list[int]:
    return [2 * number for number in range(size) if number not in deadly]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("on", ["process", "host"])
def test_only_the_batch_item_that_kills_workers_fails(workers: int, on: str) -> None:
    place = local(1) if on == "host" else on
    run, out, failed = over(with_deadly(5), on=place, workers=workers)
    assert [number for batch in out for number in batch] == without(5)
    assert [(failure.item, failure.attempts) for failure in failed] == [(-5, 3)]
    assert isinstance(failed[0].error, WorkerDied)
    text = str(failed[0].error)
    assert "3 workers died one after another while processing this item: each was killed by" in text
    stage = stage_of(run, "work")
    assert (stage.items_in, stage.items_out, stage.failed, stage.members_failed) == (2, 2, 0, 1)
    assert stage.restarts == 3


def test_each_further_item_that_kills_costs_one_worker() -> None:
    run, out, failed = over(with_deadly(1, 2, 30, 31, 40))
    assert [number for batch in out for number in batch] == without(1, 2, 30, 31, 40)
    assert [failure.item for failure in failed] == [-1, -2, -30, -31, -40]
    assert stage_of(run, "work").restarts == 2 + 4 + 2 + 1


def test_batch_has_no_result_if_every_item_kills_workers() -> None:
    run, out, failed = over([-1, -2], max_deaths=2)
    assert (out, sorted(failure.item for failure in failed)) == ([], [-2, -1])
    stage = stage_of(run, "work")
    assert (stage.items_in, stage.items_out, stage.failed) == (1, 0, 1)


@pytest.mark.parametrize(("function", "result"), [(total, sum(without(5, size=SIZE))), (array, None)])
def test_function_without_list_result_gets_the_remaining_items_together(function: Any, result: Any) -> None:
    _, (out,), failed = over(with_deadly(5, size=SIZE), function)
    if result is None:
        assert out.tolist() == without(5, size=SIZE)
    else:
        assert out == result
    assert [failure.item for failure in failed] == [-5]


def test_batch_item_that_kills_ends_run_if_errors_are_unread() -> None:
    graph = Graph("deadly")
    graph.source(with_deadly(5)).batch(SIZE).map(work, on="process", name="work").sink(id)
    with pytest.raises(RunError) as caught:
        graph.run()
    (error,) = caught.value.exceptions
    assert (error.stage, error.item) == ("work", "-5")
    assert "3 workers died one after another while processing this item" in str(error)


def test_batch_that_kills_only_together_succeeds_item_by_item() -> None:
    def fragile(numbers: list[int]) -> list[int]:
        if len(numbers) > 1:
            kill()
        return numbers

    run, out, failed = over(list(range(4)), fragile)
    assert (out, failed) == ([[0, 1, 2, 3]], [])
    assert stage_of(run, "work").restarts == 2


def test_batch_that_kills_only_together_fails_without_list_result() -> None:
    def fragile(numbers: list[int]) -> int:
        if len(numbers) > 1:
            kill()
        return numbers[0]

    _, out, failed = over(list(range(4)), fragile)
    assert out == []
    assert [failure.item for failure in failed] == [[0, 1, 2, 3]]


def test_batch_with_max_deaths_of_1_fails_as_a_whole() -> None:
    begun: Channel[None] = Channel(across="processes")

    def once(numbers: list[int]) -> list[int]:
        if -1 in numbers:
            begun.put(None)
        return work(numbers)

    _, out, failed = over([0, -1, 2], once, max_deaths=1)
    assert out == []
    assert [failure.item for failure in failed] == [[0, -1, 2]]
    assert begun.stats().items_in == 1


def test_later_batch_is_not_suspected_after_an_idle_worker_died() -> None:
    """When a worker dies while it is idle, its death must not be blamed on an earlier batch."""
    deaths = Deaths("first", times=2)

    def fragile(numbers: list[int]) -> list[int]:
        if 0 in numbers:
            deaths.at("first")
        sizes.put(len(numbers))
        return numbers

    sizes: Channel[int] = Channel(across="processes")
    graph = Graph("deadly")
    numbers = graph.input()
    out = numbers.batch(2).map(fragile, on="process", name="work").collect()
    with graph.start() as run:
        run[numbers].put_many([0, 1])
        assert [sizes.get(), sizes.get()] == [1, 1]
        batches = run._ports.channels["batch"]
        wait_until(lambda: stage_of(run, "work").pids and batches.stats().waiting_readers == 1)
        os.kill(stage_of(run, "work").pids[0], signal.SIGKILL)
        run[numbers].put_many([2, 3])
        assert sizes.get() == 2
    assert run.wait()[out] == [[0, 1], [2, 3]]


def test_exception_for_an_item_tried_alone_fails_only_that_item() -> None:
    def picky(numbers: list[int]) -> list[Any]:
        return [ValueError("seven") if number == 14 else number for number in work(numbers)]

    _, out, failed = over(with_deadly(5, size=SIZE), picky)
    assert out == [[number for number in without(5, size=SIZE) if number != 14]]
    assert [(failure.item, type(failure.error)) for failure in failed] == [(-5, WorkerDied), (7, ValueError)]


def test_retry_of_a_suspect_batch_skips_the_item_that_kills() -> None:
    failing: Channel[None] = Channel(2, across="processes")
    failing.put_many([None, None])
    failing.close()

    def picky(numbers: list[int]) -> list[int]:
        result = work(numbers)
        if 14 in result and failing.stats().inside:
            failing.get()
            raise ValueError("try again")
        return result

    _, out, failed = over(with_deadly(5, size=SIZE), picky, retries=2)
    assert out == [without(5, size=SIZE)]
    assert [failure.item for failure in failed] == [-5]


def test_only_the_caller_of_the_killing_request_gets_the_error() -> None:
    async def main(run: Run) -> list[Any]:
        calls = [run.ask(questions, number) for number in with_deadly(5, size=SIZE)]
        return await asyncio.gather(*calls, return_exceptions=True)

    graph = Graph("service")
    questions = graph.input("questions")
    questions.batch(SIZE, timeout=60).map(work, on="process").unbatch().collect()
    with graph.start() as run:
        answers = asyncio.run(main(run))
    assert isinstance(answers.pop(5), WorkerDied)
    assert answers == without(5, size=SIZE)


def test_async_callable_class_gets_suspect_items_one_at_a_time() -> None:
    class Later:
        async def __call__(self, numbers: list[int]) -> list[int]:
            await asyncio.sleep(0)
            return work(numbers)

    run, out, failed = over(with_deadly(5, size=SIZE), Later)
    assert out == [without(5, size=SIZE)]
    assert [failure.item for failure in failed] == [-5]
    assert any("has a new Later" in warning for warning in run.stats().warnings)


@pytest.mark.any_value
@pytest.mark.usefixtures("by_fork")
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", ""])
def test_random_kills_neither_lose_nor_repeat_a_batch_item(
    ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the frequent kills fall between the put of a batch's failures and the put of its result."""
    monkeypatch.setattr(decisions, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(decisions, "LONGEST_PAUSE", 0.002)
    monkeypatch.setattr(decisions, "HOPELESS", 10**6)  # a worker may be killed before it starts working
    graph, items, chance, ended = Graph("kills"), 1_000, random.Random(2), threading.Event()
    worked = (
        graph.source(range(items))
        .batch(8)
        .map(slowly, on="process", workers=2, ordered=ordered, max_deaths=2, restarts=10**6, capacity=4)
    )
    out, failed = worked.unbatch().collect(), worked.errors.collect()

    def kill_often() -> None:
        while not ended.wait(chance.uniform(0.002, 0.02)):
            if workers := psutil.Process().children():
                chance.choice(workers).kill()

    killer = threading.Thread(target=kill_often)
    with graph.start() as run:
        killer.start()
        results = run.wait()
        ended.set()
    killer.join()
    seen = Counter(results[out])
    for failure in results[failed]:
        seen.update(failure.item if isinstance(failure.item, list) else [failure.item])
    assert seen == Counter(range(items))
    if ordered:
        assert results[out] == sorted(results[out])


def slowly(numbers: list[int]) -> list[int]:
    select.select([], [], [], 0.002)
    return list(numbers)

"""Test R10: an item is blamed only for deaths of single workers in user code.

The report names the cause of each death.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
from typing import Any

import psutil
import pytest
from support.waiting import wait_until

from flowchan import Channel, Failed, Graph, Run, RunError, Unreadable, WorkerDied
from flowchan.run.policy import decisions


def same(item: Any) -> Any:
    return item


def kill_worker_at(number: int) -> Any:
    def work(item: int) -> int:
        if item == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    return work


def workers_of(run: Any) -> list[psutil.Process]:
    return psutil.Process().children()


@pytest.mark.usefixtures("by_fork")
def test_random_kills_outside_of_user_code_blame_no_item() -> None:
    """Only a death in user code counts. A death while a finished output waits for room does not.

    The program reads the results slowly, so the workers mostly wait for room.
    """
    kills, items = 15, 500
    graph = Graph("kills")
    options: Any = {"workers": 2, "on": "process", "restarts": 10**6, "capacity": 2, "max_deaths": 2}
    once = graph.source(range(items)).map(same, name="once", **options)
    twice = once.flat_map(lambda item: (item, item), **options)
    result = twice.collect()
    chance, found = random.Random(4), []
    with graph.start() as run:
        for item in run.iter(result):
            found.append(item)
            if len(found) % 50 == 0 and len(found) <= 50 * kills:
                wait_until(lambda: len(workers_of(run)) > 0)
                chance.choice(workers_of(run)).kill()
    assert found == [number for item in range(items) for number in (item, item)]
    assert sum(stage.restarts for stage in run.stats().stages) > kills / 2


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("by_fork")
def test_1_000_random_kills_with_default_options_blame_no_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """All options have defaults, except the limits on restarting a worker that keeps dying."""
    kills, ended = 1_000, threading.Event()
    monkeypatch.setattr(decisions, "LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(decisions, "HOPELESS", kills)  # a worker may be killed before it starts working
    options: Any = {"workers": 2, "on": "process", "restarts": 10**6}
    graph = Graph("kills")
    once = graph.source(lambda: itertools.takewhile(lambda _: not ended.is_set(), itertools.count()))
    result = once.map(same, **options).flat_map(lambda item: (item, item), **options).collect()
    chance = random.Random(4)

    def deaths() -> int:
        return sum(stage.restarts for stage in run.stats().stages)

    def kill() -> None:
        while deaths() < kills and not run._supervisor.ended.wait(chance.uniform(0.02, 0.15)):
            if workers := workers_of(run):
                chance.choice(workers).kill()
        ended.set()

    with graph.start() as run:
        killer = threading.Thread(target=kill)
        killer.start()
        for number, item in enumerate(run.iter(result)):
            assert item == number // 2
        killer.join()
    assert deaths() >= kills


def test_error_for_a_poison_item_reports_every_workers_death() -> None:
    graph = Graph("blame")
    mapped = graph.source(range(10)).map(kill_worker_at(3), on="process", name="work")
    failed, result = mapped.errors.collect(), mapped.collect()
    results = graph.run()
    assert results[result] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    (failure,) = results[failed]
    assert isinstance(failure, Failed)
    assert (failure.item, failure.attempts) == (3, 3)
    assert isinstance(failure.error, WorkerDied)
    assert "3 workers died one after another while processing this item: " in str(failure.error)
    assert "was killed by SIGKILL" in str(failure.error)


def test_service_survives_any_number_of_poison_requests() -> None:
    """A worker has 10 restarts by default, and each poison request kills three workers."""

    async def main(run: Run) -> None:
        for _ in range(2):
            calls = (run.ask(questions, number) for number in (-1, 1, -1, 2, -1))
            answers = await asyncio.gather(*calls, return_exceptions=True)
            assert [answers[1], answers[3]] == [1, 2]
            assert all(isinstance(answer, WorkerDied) for answer in answers[::2])

    graph = Graph("service")
    questions = graph.input("questions")
    questions.map(kill_worker_at(-1), on="process", name="work").collect()
    with graph.start() as run:
        asyncio.run(main(run))
    work = run.stats().stages[1]
    assert (work.failed, work.items_out, work.restarts) == (6, 4, 18)
    assert run.state == "done"


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", ""])
def test_suspect_item_is_retried_by_only_one_worker(ordered: bool) -> None:
    """While the first worker's processes die, the second worker must finish all other items."""
    others: Channel[int] = Channel(100, across="processes")
    graph = Graph("suspects")
    pids: Channel[int] = Channel(100, across="processes")

    def work(item: int) -> int:
        if item == 0:
            pids.put(os.getpid())
            if len(others) < 40:  # wait until the other worker has finished the other items
                wait_until(lambda: len(others) >= 40)
            os.kill(os.getpid(), signal.SIGKILL)
        others.put(item)
        return item

    mapped = graph.source(range(41)).map(work, workers=2, on="process", ordered=ordered, name="work")
    failed, result = mapped.errors.collect(), mapped.collect()
    results = graph.run()
    assert sorted(results[result]) == list(range(1, 41))
    assert [failure.item for failure in results[failed]] == [0]
    assert len({pids.get() for _ in range(3)}) == 3


class Killer:
    """An object that kills any process that unpickles it, except its creator."""

    def __reduce__(self) -> Any:
        return _kill_others, (os.getpid(),)


def _kill_others(maker: int) -> str:
    if os.getpid() != maker:
        os.kill(os.getpid(), signal.SIGKILL)
    return "unpickled"


def test_item_that_kills_its_worker_during_unpickling_is_blamed() -> None:
    graph = Graph("unpickling")
    mapped = graph.source([1, Killer(), 2]).map(same, on="process", name="work")
    failed, result = mapped.errors.collect(), mapped.collect()
    results = graph.run()
    assert results[result] == [1, 2]
    (failure,) = results[failed]
    assert isinstance(failure.item, Unreadable)
    assert "3 workers died" in str(failure.error)


def test_blamed_item_ends_the_run_if_errors_are_unread() -> None:
    graph = Graph("blame")
    graph.source(range(10)).map(kill_worker_at(3), on="process", name="work").collect()
    with pytest.raises(RunError) as caught:
        graph.run()
    assert caught.value.exceptions[0].item == "3"
    assert "3 workers died" in str(caught.value.exceptions[0])

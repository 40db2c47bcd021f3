"""Test C11, R4 and R10 for workers that die inside a run of items."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from typing import Any

import psutil
import pytest
from kill_points import Deaths, stage_of
from support.waiting import wait_until

from flowchan import Graph

MANY: dict[str, Any] = {"on": "process", "capacity": 1024, "restarts": 10**6}
"""Options with which a worker finds many items at once."""


@pytest.mark.parametrize(("workers", "ordered"), [(1, True), (2, True), (3, False)])
def test_worker_killed_inside_a_run_loses_and_repeats_nothing(workers: int, ordered: bool) -> None:
    deaths = Deaths(0, 1, 2, 500, 501, 503, 1_000, 2_003, 3_331, 3_999)

    def work(item: int) -> int:
        deaths.at(item)
        return item

    graph = Graph("killed")
    numbers = graph.source(range(4_000), capacity=1024)
    result = numbers.map(work, name="work", workers=workers, ordered=ordered, **MANY).collect()
    run = graph.start()
    found = run.wait()[result]
    assert (found if ordered else sorted(found)) == list(range(4_000))
    assert stage_of(run, "work").restarts == deaths.total


@pytest.mark.parametrize("workers", [1, 2])
def test_item_that_kills_its_worker_inside_a_run_fails_alone(workers: int) -> None:
    killers = {0, 700, 701, 1_500, 1_999}

    def work(item: int) -> int:
        if item in killers:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    graph = Graph("blame")
    mapped = graph.source(range(2_000), capacity=1024).map(work, workers=workers, max_deaths=2, **MANY)
    result, errors = mapped.collect(), mapped.errors.collect()
    results = graph.run()
    assert results[result] == [item for item in range(2_000) if item not in killers]
    assert sorted((failed.item, failed.attempts) for failed in results[errors]) == [
        (item, 2) for item in sorted(killers)
    ]


@pytest.mark.usefixtures("by_fork")
@pytest.mark.parametrize("ordered", [True, False])
def test_random_kills_inside_runs_lose_and_repeat_nothing(ordered: bool) -> None:
    kills, count = 20, 200_000
    graph = Graph("kills")
    numbers = graph.source(range(count), capacity=1024)
    result = numbers.map(
        lambda item: item, workers=2, ordered=ordered, max_deaths=kills, name="work", **MANY
    ).collect()
    chance, found = random.Random(4), []
    with graph.start() as run:
        for item in run.iter(result):
            found.append(item)
            if len(found) % (count // (2 * kills)) == 0 and len(found) <= count // 2:
                wait_until(lambda: len(psutil.Process().children()) > 0)
                with contextlib.suppress(psutil.NoSuchProcess):  # the supervisor may replace the worker now
                    chance.choice(psutil.Process().children()).kill()
    assert (found if ordered else sorted(found)) == list(range(count))
    assert stage_of(run, "work").restarts > kills / 2

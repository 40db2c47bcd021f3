"""Test R13: when workers die while their stage is scaled, no item is lost, repeated or reordered."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from typing import Any

import pytest
from kill_points import Deaths, stage_of
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Graph, Run

STAGES = ("map", "filter", "flat_map", "partition")


class Feeder(threading.Thread):
    """A thread that puts numbers into an input until it is asked to end."""

    def __init__(self, run: Run, stream: Any) -> None:
        super().__init__()
        self._out, self._over, self.number = run[stream], threading.Event(), 0
        self.start()

    def run(self) -> None:
        while not self._over.is_set():
            self._out.put(self.number)
            self.number += 1
        self._out.close()

    def end(self) -> int:
        self._over.set()
        self.join()
        return self.number


def kill_one(run: Run, rng: random.Random) -> None:
    pids = [pid for stage in run.stats().stages for pid in stage.pids]
    if pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(pids), signal.SIGKILL)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
@pytest.mark.parametrize("ordered", [True, False])
def test_kills_during_random_scaling_lose_nothing(seed: int, ordered: bool) -> None:
    rng = random.Random(seed)
    options: dict[str, Any] = {"on": "process", "ordered": ordered, "restarts": 100, "max_deaths": 100}
    graph = Graph("scaled")
    numbers = graph.input("numbers", capacity=8)
    same = numbers.map(lambda item: item, name="map", **options)
    kept = same.filter(lambda item: item % 3 > 0, name="filter", **options)
    twice = kept.flat_map(lambda item: [item, -item], name="flat_map", **options)
    even, odd = twice.partition(abs, 2, on="process", restarts=100, max_deaths=100, name="partition")
    evens, odds = even.collect(), odd.collect()
    with graph.start() as run:
        feeder = Feeder(run, numbers)
        for _ in range(15):
            run.scale(rng.choice(STAGES), rng.randint(1, 4))
            if rng.random() < 0.4:
                kill_one(run, rng)
            taken = stage_of(run, "partition").items_in
            wait_until(lambda taken=taken: stage_of(run, "partition").items_in > taken, what=run.report)  # type: ignore[misc]
        number = feeder.end()
        results = run.wait()
    expected = [one for item in range(number) if item % 3 for one in (item, -item)]
    for out, rest in ((evens, 0), (odds, 1)):
        wanted = [item for item in expected if item % 2 == rest]
        assert results[out] == wanted if ordered else Counter(results[out]) == Counter(wanted)


@pytest.mark.parametrize("operator", ["map", "filter"])
def test_first_worker_can_die_after_a_second_was_added(operator: str) -> None:
    """The dead worker did not record its turns, so its replacement must find out which turns were
    finished."""
    deaths, gate = Deaths(50), Gate()

    def work(item: int) -> Any:
        if item == 50:
            gate.wait()
            deaths.at(50)
        return item or True

    graph = Graph("scaled")
    out = getattr(graph.source(range(100)), operator)(work, on="process", capacity=200, name="work").collect()
    with graph.start() as run:
        gate.wait_held()
        run.scale("work", 2)
        wait_until(lambda: stage_of(run, "work").items_in == 100, what=run.report)
        gate.open()
        found = run.wait()[out]
    assert found[1:] == list(range(1, 100))
    assert stage_of(run, "work").restarts == 1


@pytest.mark.parametrize("wanted", [1, 2])
def test_worker_killed_while_being_removed_loses_nothing(wanted: int) -> None:
    deaths, gate = Deaths(0, 1), Gate()

    def work(item: int) -> int:
        if item < 3:
            gate.wait()
            deaths.at(item)
        return item

    graph = Graph("scaled")
    out = graph.source(range(60)).map(work, on="process", workers=3, name="work").collect()
    with graph.start() as run:
        gate.wait_held(3)
        run.scale("work", wanted)
        gate.open()
        assert run.wait()[out] == list(range(60))
    assert stage_of(run, "work").restarts == 2

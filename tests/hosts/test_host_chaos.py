"""Test runs on hosts while connections break, and workers and agents are killed, at any moment (C1, R4).

Every output arrives exactly once, and in order where order is guaranteed.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from hosted import agents, workers_of
from support.gangs import in_step

from benchmarks.slow_connections import cut
from flowchan import Graph
from flowchan.hosts import local, worker_ports
from flowchan.run.policy import decisions

pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("no_agent_stays")]


def double(item: int) -> int:
    return 2 * item


def pairs(item: int) -> list[tuple[int, int]]:
    return [(item, k) for k in range(item % 3)]


class Shaking:
    """Context that breaks connections and kills processes throughout a run.

    The source stays at most ``AHEAD`` items ahead of the next break or kill.
    """

    AHEAD = 500

    def __init__(self, items: int, cuts: int, agents: int, workers: int, seed: int) -> None:
        self.items, self.draw = items, random.Random(seed)
        deeds = [("cuts", self.cut)] * cuts + [("agents", self.kill_agent)] * agents
        deeds += [("workers", self.kill_worker)] * workers
        self.draw.shuffle(deeds)
        self.due = sorted(
            ((self.draw.randrange(items * 9 // 10), deed) for deed in deeds), key=lambda pair: -pair[0]
        )
        self.done = {"cuts": 0, "agents": 0, "workers": 0}
        self.turn, self.over = threading.Condition(), threading.Event()
        self.given = 0
        self.thread = threading.Thread(target=self._disturb)

    def __enter__(self) -> Shaking:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        with self.turn:
            self.turn.notify_all()
        self.thread.join()

    def source(self) -> Iterator[int]:
        for item in range(self.items):
            with self.turn:
                self.given = item
                self.turn.notify_all()
                self.turn.wait_for(
                    lambda item=item: self.over.is_set() or not self._is_due(item - self.AHEAD)
                )
            yield item

    def _is_due(self, item: int) -> bool:
        return bool(self.due) and self.due[-1][0] <= item

    def _disturb(self) -> None:
        while True:
            with self.turn:
                self.turn.wait_for(lambda: self.over.is_set() or self._is_due(self.given))
                if self.over.is_set():
                    return
            name, deed = self.due[-1][1]
            while not deed() and not self.over.wait(0.001):
                pass  # no connection or process exists at this moment
            with self.turn:
                self.done[name] += 1
                self.due.pop()
                self.turn.notify_all()

    def cut(self) -> bool:
        return cut() > 0

    def kill_agent(self) -> bool:
        return self.kill(agents())

    def kill_worker(self) -> bool:
        return self.kill([worker for agent in agents() for worker in workers_of(agent)])

    def kill(self, some: list[psutil.Process]) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            self.draw.choice(some).kill()
            return True
        return False


def run_disturbed(
    items: int, function: Any, ordered: bool, cuts: int, killed: int, workers: int
) -> tuple[list[Any], Shaking]:
    disturbance = Shaking(items, cuts, killed, workers, seed=1)
    graph = Graph("run_disturbed")
    source = graph.source(disturbance.source)
    options: dict[str, Any] = {"on": local(3), "workers": 4, "restarts": 10_000, "ordered": ordered}
    remote = source.map(function, **options) if function is double else source.flat_map(function, **options)
    result = remote.collect()
    with graph.start() as run, disturbance:
        found = list(run.iter(result))
    return found, disturbance


@pytest.mark.any_value
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", ""])
@pytest.mark.parametrize("function", [double, pairs], ids=["map", "flat_map"])
def test_outputs_arrive_once_despite_breaks_and_deaths(
    function: Any, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "HOPELESS", 1_000)  # a worker may be killed before it begins
    found, disturbance = run_disturbed(8_000, function, ordered, cuts=20, killed=4, workers=10)
    want = (
        [double(item) for item in range(8_000)]
        if function is double
        else [pair for item in range(8_000) for pair in pairs(item)]
    )
    assert (found if ordered else sorted(found)) == want
    assert disturbance.done == {"cuts": 20, "agents": 4, "workers": 10}


@pytest.mark.any_value
@pytest.mark.parametrize("elastic", [False, True], ids=["", "elastic"])
def test_gang_and_allreduce_outputs_arrive_once_despite_deaths(
    elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R11: the gang is restarted or, if elastic, continues."""
    monkeypatch.setattr(worker_ports, "MOST_AGENTS", 1_000)  # the run does not give up on any host
    monkeypatch.setattr(worker_ports, "MAX_UNCONNECTED", 1_000)
    monkeypatch.setattr(decisions, "HOPELESS", 1_000)  # a worker may be killed before it begins
    disturbance = Shaking(2_000, cuts=5, agents=10, workers=5, seed=2)
    graph, pool = Graph("run_disturbed"), local(2)
    stream = graph.source(disturbance.source).map(
        lambda item: frozenset([item]), on=pool, workers=2, restarts=10_000
    )
    rounds = stream.allreduce("or").map(lambda found: list(found.value)).unbatch()
    gang: Any = {"on": pool, "workers": 2, "restarts": 10_000, "restartable": True, "elastic": elastic}
    result = graph.stage(in_step, rounds, **gang).collect()
    with graph.start() as run, disturbance:
        found = list(run.iter(result))
    assert sorted(found) == list(range(2_000))
    assert disturbance.done == {"cuts": 5, "agents": 10, "workers": 5}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_300_000_items_survive_breaks_and_agent_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_ports, "MOST_AGENTS", 1_000)  # the run does not give up on any host
    monkeypatch.setattr(worker_ports, "MAX_UNCONNECTED", 1_000)
    monkeypatch.setattr(decisions, "HOPELESS", 1_000)  # a worker may be killed before it begins
    found, disturbance = run_disturbed(300_000, double, True, cuts=1_000, killed=200, workers=200)
    assert found == list(range(0, 600_000, 2))
    assert disturbance.done == {"cuts": 1_000, "agents": 200, "workers": 200}

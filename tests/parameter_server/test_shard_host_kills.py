"""Test that no push is lost or repeated on a pool if shard workers, clients, agents or links are killed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from killing import (
    MOST_AGENTS,
    Killer,
    Pusher,
    agents,
    check_end,
    cutting,
    first_tensors,
    killing,
    limited,
    resetting,
    workers_named,
)
from support.network_proxy import Wire, wired

from benchmarks.slow_connections import cut
from flowchan import Graph
from flowchan.pipelines import ParameterServer, SharedDict
from flowchan.run.policy import decisions

ENDLESS = 10**9


@pytest.fixture(autouse=True)
def endless_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow any number of consecutive kills before a worker starts."""
    monkeypatch.setattr(decisions, "HOPELESS", ENDLESS)


def agents_except(spared: list[psutil.Process]) -> Callable[[], list[psutil.Process]]:
    """Return a function that finds the agents that do not keep a shard."""
    return lambda: [agent for agent in agents() if agent not in spared]


def remote_clients(spared: list[psutil.Process]) -> Callable[[], list[psutil.Process]]:
    """Return a function that finds the workers of the agents that do not keep a shard."""
    return lambda: [worker for agent in agents_except(spared)() for worker in agent.children()]


def shard_workers(spared: list[psutil.Process]) -> Callable[[], list[psutil.Process]]:
    """Return a function that finds the workers that apply pushes.

    These workers are children of the keepers.
    """
    return lambda: [
        one for one in workers_named("parameters") if one.parent() is not None and one.parent() not in spared
    ]


class CuttingPusher(Pusher):
    """Pusher that often cuts all connections of its process, including those to the shards."""

    def __call__(self, item: int) -> tuple[int, int]:
        """Push once, and return the client's place and the number of pushes to that place."""
        if self.pushes % 16 == 7:
            cut()
        return super().__call__(item)


def push_until_killed(seed: int, kills: int, shards: int) -> Killer:
    """Push until ``kills`` kills have happened, and check that the shards applied each push once."""
    wires = [Wire() for _ in range(4)]
    places = SharedDict({"used": -1}, across="hosts")
    with (
        wired(2, *wires[:2], peer_timeout=10) as hosts,
        wired(2, *wires[2:], peer_timeout=2) as pool,
        ParameterServer(first_tensors(), shards=shards, on=hosts, name="parameters") as server,
    ):
        spared = agents()
        deeds = {
            "servers": killing(shard_workers(spared)),
            "clients": killing(lambda: workers_named("push")),
            "remote clients": killing(remote_clients(spared)),
            "agents": limited(killing(agents_except(spared)), MOST_AGENTS),
            "connections": cutting,
            "resets": resetting(wires),
        }
        killer = Killer(seed, kills, deeds, pause=0.2)
        graph = Graph("pushing")
        push = CuttingPusher(server.client(), places)
        options: dict[str, Any] = {"restarts": ENDLESS, "max_deaths": ENDLESS, "ordered": False, "workers": 2}
        results = [
            graph.source(numbers_until, killer).map(push, name="push", on="process", **options).collect(),
            graph.source(numbers_until, killer).map(push, name="remote", on=pool, **options).collect(),
        ]
        run = graph.start()
        killer.start()
        try:
            found = run.wait()
        finally:
            killer.over.set()
            killer.join()
        done = [output for result in results for output in found[result]]
        assert check_end(server, done) >= len(done)
    return killer


def numbers_until(killer: Killer) -> Iterator[int]:
    return itertools.takewhile(lambda _: killer.is_active(), itertools.count())


@pytest.mark.parametrize("shards", [1, 2])
def test_s2_shards_on_hosts_apply_each_push_once_despite_kills(shards: int) -> None:
    killer = push_until_killed(seed=shards, kills=20, shards=shards)
    assert killer.counts["servers"]
    assert killer.counts["clients"] + killer.counts["remote clients"] + killer.counts["agents"] > 0


@pytest.mark.long
def test_s2_shards_on_hosts_apply_pushes_once_after_1000_kills() -> None:
    counts: Counter[str] = Counter()
    for seed in range(10):
        counts += push_until_killed(seed, kills=100, shards=1 + seed % 2).counts
    assert counts.total() >= 1000
    assert set(counts) == {"servers", "clients", "remote clients", "agents", "connections", "resets"}

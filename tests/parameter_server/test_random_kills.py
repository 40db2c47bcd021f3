"""Test that random kills of servers, clients, agents and connections neither lose nor repeat a push (S1, S2)."""

from __future__ import annotations

from typing import Any

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
    workers_named,
    workers_on_hosts,
)

from flowchan import Graph, hosts
from flowchan.pipelines import ParameterServer, SharedDict

ENDLESS = 10**9


def run_pushes(seed: int, pushes: int, kills: int, shards: int, on_hosts: bool) -> tuple[int, Killer]:
    """Push while processes are killed, check everything, and return the number of applied pushes."""
    places = SharedDict({"used": -1}, across="hosts")
    with ParameterServer(first_tensors(), shards=shards, name="parameters") as server:
        graph = Graph("pushing")
        options: dict[str, Any] = {"restarts": ENDLESS, "max_deaths": ENDLESS, "ordered": False, "workers": 2}
        numbers = graph.source(range(pushes))
        stage = Pusher(server.client(), places)
        done = numbers.map(stage, name="push", on="process", **options)
        deeds = {
            "servers": killing(lambda: workers_named("parameters")),
            "clients": killing(lambda: workers_named("push")),
        }
        results = [done.collect()]
        if on_hosts:
            pool = hosts.local(2, peer_timeout=2)
            results.append(
                graph.source(range(pushes)).map(stage, name="remote", on=pool, **options).collect()
            )
            deeds |= {
                "remote clients": killing(workers_on_hosts),
                "agents": limited(killing(agents), MOST_AGENTS),
                "connections": cutting,
            }
        run = graph.start()
        killer = Killer(seed, kills, deeds, pause=0.2)
        killer.start()
        try:
            found = run.wait()
        finally:
            killer.over.set()
            killer.join()
        total = check_end(server, [output for result in results for output in found[result]])
        assert total >= len(results) * pushes
        return total, killer


@pytest.mark.parametrize("shards", [1, 2])
def test_s2_random_kills_of_servers_and_clients_lose_and_repeat_nothing(shards: int) -> None:
    total, killer = run_pushes(seed=shards, pushes=600, kills=20, shards=shards, on_hosts=False)
    assert set(killer.counts) == {"servers", "clients"}
    print(total, killer.counts)


@pytest.mark.parametrize("shards", [1, 2])
def test_s2_random_kills_on_hosts_lose_and_repeat_nothing(shards: int) -> None:
    total, killer = run_pushes(seed=shards, pushes=300, kills=20, shards=shards, on_hosts=True)
    assert killer.counts
    print(total, killer.counts)


@pytest.mark.long
def test_s2_thousand_random_kills_lose_and_repeat_nothing() -> None:
    kills = 0
    seed = 0
    while kills < 1000:
        _, killer = run_pushes(seed, pushes=1500, kills=100, shards=1 + seed % 2, on_hosts=True)
        kills, seed = kills + killer.counts.total(), seed + 1

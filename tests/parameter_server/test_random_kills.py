"""Test that no push is lost or repeated if servers, clients, agents or connections are killed (S1, S2)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from killing import (
    MOST_AGENTS,
    Killer,
    Pusher,
    agents,
    check_end,
    check_version,
    cutting,
    first_tensors,
    killing,
    limited,
    resetting,
    workers_named,
    workers_on_hosts,
)
from support.network_proxy import Wire, wired

from flowchan import Graph
from flowchan.pipelines import ParameterServer, SharedDict
from flowchan.run.policy import decisions

ENDLESS = 10**9


@pytest.fixture(autouse=True)
def endless_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow any number of consecutive kills before a worker starts."""
    monkeypatch.setattr(decisions, "HOPELESS", ENDLESS)


def push_until_killed(seed: int, kills: int, shards: int, on_hosts: bool) -> Killer:
    """Push until ``kills`` kills have happened, and check that the server applied each push once."""
    deeds = {
        "servers": killing(lambda: workers_named("parameters")),
        "clients": killing(lambda: workers_named("push")),
    }
    if on_hosts:
        deeds |= {
            "remote clients": killing(workers_on_hosts),
            "agents": limited(killing(agents), MOST_AGENTS),
            "connections": cutting,
        }
    wires = Wire(), Wire()
    if on_hosts:
        deeds["resets"] = resetting(wires)
    killer = Killer(seed, kills, deeds, pause=0.2)
    places = SharedDict({"used": -1}, across="hosts")
    with (
        wired(2, *wires, peer_timeout=2) as pool,
        ParameterServer(first_tensors(), shards=shards, name="parameters") as server,
    ):
        graph = Graph("pushing")
        push = Pusher(server.client(), places)
        options: dict[str, Any] = {"restarts": ENDLESS, "max_deaths": ENDLESS, "ordered": False, "workers": 2}
        results = [graph.source(numbers_until, killer).map(push, name="push", on="process", **options)]
        if on_hosts:
            results.append(graph.source(numbers_until, killer).map(push, name="remote", on=pool, **options))
        collected = [result.collect() for result in results]
        run = graph.start()
        killer.start()
        try:
            found = run.wait()
        finally:
            killer.over.set()
            killer.join()
        done = [output for result in collected for output in found[result]]
        assert check_end(server, done) >= len(done)
    return killer


def numbers_until(killer: Killer) -> Iterator[int]:
    return itertools.takewhile(lambda _: killer.is_active(), itertools.count())


@pytest.mark.parametrize("shards", [1, 2])
def test_s2_no_push_is_lost_or_repeated_despite_local_kills(shards: int, long_walk: bool) -> None:
    killer = push_until_killed(seed=shards, kills=20 if long_walk else 10, shards=shards, on_hosts=False)
    assert set(killer.counts) == {"servers", "clients"}


@pytest.mark.any_value
@pytest.mark.parametrize("shards", [1, 2])
def test_s2_no_push_is_lost_or_repeated_despite_remote_kills(shards: int, long_walk: bool) -> None:
    killer = push_until_killed(seed=shards, kills=20 if long_walk else 10, shards=shards, on_hosts=True)
    assert killer.counts["servers"]
    assert killer.counts["remote clients"] + killer.counts["agents"] + killer.counts["connections"] > 0


@pytest.mark.long
def test_s2_no_push_is_lost_or_repeated_after_1000_kills() -> None:
    for seed in range(10):
        push_until_killed(seed, kills=100, shards=1 + seed % 2, on_hosts=True)


def pushed(places: list[int]) -> dict[str, Any]:
    """Return the tensors after ``places[i]`` pushes to each place i."""
    tensors = first_tensors()
    tensors["left"][: len(places)] = tensors["right"][: len(places)] = [2.0**pushes - 1 for pushes in places]
    tensors["all"] += sum(places)
    return tensors


def lose(tensors: dict[str, Any]) -> None:
    for name in ("left", "right"):
        tensors[name][0] -= 2


def repeat(tensors: dict[str, Any]) -> None:
    for name in ("left", "right"):
        tensors[name][0] += 2


def mix_shards(tensors: dict[str, Any]) -> None:
    tensors["right"][1] += 2


def tear(tensors: dict[str, Any]) -> None:
    tensors["all"][-1] -= 1


@pytest.mark.parametrize("harm", [lose, repeat, mix_shards, tear])
def test_check_version_rejects_wrong_tensors(harm: Callable[[dict[str, Any]], None]) -> None:
    tensors = pushed([3, 1, 5])
    assert check_version(tensors, 9) == 9
    with pytest.raises(AssertionError):
        check_version(tensors, 8)
    harm(tensors)
    with pytest.raises(AssertionError):
        check_version(tensors, 9)


def test_check_version_accepts_the_maximum_number_of_pushes() -> None:
    tensors = pushed([40, 40])
    assert np.isfinite(tensors["left"]).all()
    assert check_version(tensors, 80) == 80

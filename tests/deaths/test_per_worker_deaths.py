"""Test that items for one worker arrive once, even if the worker or the sender is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from kill_points import Deaths, stage_of

from flowchan import Channel, Graph, In, Out, hosts, worker

WORKERS = 3


def pairs(items: int) -> list[tuple[int, int]]:
    return [(1 + item % WORKERS, item) for item in range(items)]


def addressed(graph: Graph, orders: Any, on: Any, function: Any, **options: Any) -> Any:
    return graph.stage(
        function, orders, on=on, workers=WORKERS, per_worker="orders", name="work", **options
    ).collect()


@pytest.mark.parametrize("payload", [0, 100_000])
def test_item_for_a_worker_that_died_goes_to_its_replacement(payload: int) -> None:
    deaths = Deaths(0, 7, 8, 59)

    def dies(orders: In[tuple[int, bytes]], out: Out[tuple[int, int]]) -> None:
        for order, _ in orders:
            deaths.at(order)
            out.put((worker().number, order))

    graph = Graph("addressed")
    orders = graph.source([(to, (item, bytes(payload))) for to, item in pairs(60)])
    out = addressed(graph, orders, "process", dies, restartable=True)
    run = graph.start()
    assert sorted(run.wait()[out]) == sorted(pairs(60))
    assert stage_of(run, "work").restarts == deaths.total


@pytest.mark.parametrize("workers", [1, 3])
def test_each_item_reaches_its_addressed_worker_once_despite_sender_deaths(workers: int) -> None:
    deaths = Deaths((0, 0), (7, 1), (8, 2), (29, 3))

    def send(item: int) -> Iterator[tuple[int, tuple[int, int]]]:
        for number in range(3):
            deaths.at((item, number))
            yield 1 + (item + number) % WORKERS, (item, number)
        deaths.at((item, 3))

    def take(orders: In[tuple[int, int]], out: Out[Any]) -> None:
        for item, number in orders:
            assert worker().number == 1 + (item + number) % WORKERS
            out.put((item, number))

    graph = Graph("addressed")
    orders = graph.source(range(30)).flat_map(send, on="process", workers=workers, name="send")
    out = addressed(graph, orders, "process", take)
    run = graph.start()
    assert sorted(run.wait()[out]) == [(item, number) for item in range(30) for number in range(3)]
    assert stage_of(run, "send").restarts == deaths.total


def test_item_for_a_remote_worker_goes_to_its_replacement() -> None:
    deaths = Deaths(0, 7, 29)

    def dies(orders: In[int], out: Out[tuple[int, int]]) -> None:
        for order in orders:
            deaths.at(order)
            out.put((worker().number, order))

    graph = Graph("addressed")
    out = addressed(graph, graph.source(pairs(30)), hosts.local(2), dies, restartable=True)
    run = graph.start()
    assert sorted(run.wait()[out]) == sorted(pairs(30))
    assert stage_of(run, "work").restarts == deaths.total


def test_worker_does_not_skip_outputs_that_another_worker_has_put() -> None:
    """Each of two workers puts an output for its second item. The first worker dies right after its put."""
    restarted: Channel[None] = Channel(1, across="processes")
    put: Channel[None] = Channel(1, across="processes")

    def dies(orders: In[int], out: Out[tuple[int, int]]) -> None:
        first = worker().number == 1
        if first and worker().incarnation == 1:
            restarted.put(None)
            put.get()
        for order in orders:
            if not first and order == 1:
                restarted.get()
            out.put((worker().number, order))
            if first and order == 1 and worker().incarnation == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if not first and order == 1:
                put.put(None)

    graph = Graph("addressed")
    orders = graph.source([(to, order) for order in range(3) for to in (1, 2)])
    out = graph.stage(dies, orders, on="process", workers=2, per_worker="orders", restartable=True).collect()
    assert sorted(graph.run()[out]) == [(to, order) for to in (1, 2) for order in range(3)]

"""Test graphs with many stages in a row and with many branches."""

from __future__ import annotations

import pytest

from flowchan import Graph, Stream


def plus_one(item: int) -> int:
    return item + 1


def chain(graph: Graph, stages: int) -> Stream:
    stream = graph.source(range(50))
    for _ in range(stages):
        stream = stream.map(plus_one, capacity=2)
    return stream


def test_chain_of_a_hundred_thread_stages_runs() -> None:
    graph = Graph("long")
    items = chain(graph, 100).collect()
    assert graph.run()[items] == [100 + item for item in range(50)]


def test_hundred_branches_run() -> None:
    graph = Graph("wide")
    branches = graph.source(range(50)).tee(100)
    total = graph.merge(*(branch.map(plus_one) for branch in branches)).reduce(int.__add__, 0)
    assert graph.run()[total] == 100 * sum(range(1, 51))


def test_graph_of_a_thousand_stages_is_checked() -> None:
    graph = Graph("long")
    chain(graph, 998).sink(id)
    assert len(graph.stages) == 1000
    assert graph.check() == ()


def test_chain_of_process_stages_runs() -> None:
    graph = Graph("long")
    stream = graph.source(range(50))
    for place in ("process", "thread") * 4:
        stream = stream.map(plus_one, on=place, capacity=2)
    items = stream.collect()
    assert graph.run()[items] == [8 + item for item in range(50)]


@pytest.mark.parametrize("workers", [50, 300])
def test_ordered_map_with_many_workers_is_not_slow(workers: int) -> None:
    """Test C8: outputs are put in order quickly even if many workers are waiting.

    The test would time out if an item took 0.1 s.
    """
    graph = Graph("many")
    items = graph.source(range(20_000)).map(plus_one, workers=workers).collect()
    assert graph.run()[items] == list(range(1, 20_001))


def test_ordered_map_with_many_worker_processes_is_not_slow() -> None:
    graph = Graph("many")
    items = graph.source(range(5_000)).map(plus_one, workers=12, on="process", capacity=4).collect()
    assert graph.run()[items] == list(range(1, 5_001))


def test_thousand_branches_run() -> None:
    graph = Graph("very wide")
    branches = graph.source(range(20)).tee(1_000)
    total = graph.merge(*(branch.map(plus_one) for branch in branches)).reduce(int.__add__, 0)
    assert graph.run()[total] == 1_000 * sum(range(1, 21))

"""Test pools of hosts as placements: a pool is a value and contacts no host."""

from __future__ import annotations

import pickle

import pytest
from hosted import agents

from flowchan import Graph, GraphError
from flowchan.hosts import local
from flowchan.run.policy.plan import plan


def test_pool_is_compared_pickled_and_printed_by_value() -> None:
    pool = local(2)
    assert pool == local(2)
    assert pool != local(3)
    assert pickle.loads(pickle.dumps(pool)) == pool
    assert repr(pool) == str(pool) == "local(2)"
    assert pool.hosts == ("local-1", "local-2")
    assert not agents()


def test_pool_indexed_by_names_has_only_those_hosts() -> None:
    pool = local(3)
    assert pool["local-2"].hosts == ("local-2",)
    assert pool["local-1", "local-3"].hosts == ("local-1", "local-3")
    assert pool["local-2"].has_same_host(pool)


def test_hosts_get_workers_in_proportion_to_their_shares() -> None:
    """Workers that other pools have on these hosts do not count."""
    pool = local(3)
    uneven = pool[{"local-3": 1, "local-1": 3}]
    assert (uneven.hosts, uneven.shares) == (("local-3", "local-1"), (1, 3))
    assert uneven.has_same_host(pool)
    assert pickle.loads(pickle.dumps(uneven)) == uneven != pool["local-3", "local-1"]
    for workers, on_first in ((1, 1), (2, 2), (4, 3), (8, 6), (9, 7)):
        graph = Graph("uneven")
        graph.source(range(3), on=pool["local-1"]).map(abs, on=uneven, workers=workers, name="far").sink(abs)
        planned = [worker.host for worker in plan(graph, 0, 0).workers if worker.id.stage == "far"]
        assert (len(planned), planned.count("local-1")) == (workers, on_first)


def test_workers_of_all_stages_are_spread_by_host_shares() -> None:
    pool = local(2)[{"local-1": 1, "local-2": 2}]
    graph = Graph("chain")
    stream = graph.source(range(3))
    for number in range(6):
        stream = stream.map(abs, on=pool, name=f"far {number}")
    stream.sink(abs)
    hosts = [worker.host for worker in plan(graph, 0, 0).workers if worker.host]
    assert (len(hosts), hosts.count("local-2")) == (6, 4)


@pytest.mark.parametrize(
    ("shares", "error", "message"),
    [
        ({"local-1": 0}, ValueError, r"local\(2\): the share of local-1 must be at least 1, got 0"),
        ({"local-1": 0.5}, TypeError, "the share of local-1 must be an int"),
        ({"gpu1": 1}, KeyError, "has no host 'gpu1'"),
        ({}, KeyError, "must name at least one host"),
    ],
)
def test_invalid_share_is_refused(shares: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        local(2)[shares]  # type: ignore[index]


@pytest.mark.parametrize("wrong", ["gpu1", (), ("local-1", "gpu1"), 1])
def test_unknown_host_of_a_pool_is_refused(wrong: object) -> None:
    with pytest.raises((KeyError, TypeError), match=r"local-1|int"):
        local(1)[wrong]  # type: ignore[index]


@pytest.mark.parametrize(
    ("peer_timeout", "error"), [(0, ValueError), (-1, ValueError), (None, TypeError), ("10", TypeError)]
)
def test_peer_timeout_must_be_a_number_of_seconds(peer_timeout: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="local: peer_timeout must be") as raised:
        local(1, peer_timeout=peer_timeout)  # type: ignore[arg-type]
    assert "None:" not in str(raised.value)


def test_declaring_and_checking_a_graph_does_not_start_agents() -> None:
    graph = Graph("declared")
    graph.source(range(3)).map(abs, on=local(2), workers=4).sink(abs)
    assert graph.check() == ()
    assert not agents()


def test_function_that_cannot_be_sent_is_reported_before_the_run() -> None:
    import threading

    lock = threading.Lock()
    graph = Graph("refused")
    graph.source([1]).map(lambda item: (item, lock), on=local(2), name="locked").sink(abs)
    with pytest.raises(GraphError, match=r"captured variable 'lock'"):
        graph.run()
    assert not agents()


def test_stage_without_any_named_host_is_reported_before_the_run() -> None:
    graph = Graph("homeless")
    graph.source([1]).map(abs, on="hosts", name="far").sink(abs)
    (problem,) = graph.check()
    assert (problem.rule, problem.stage) == ("hosts", "far")
    assert "--hosts" in problem.message

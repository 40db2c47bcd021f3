"""A pool of hosts as a place: a value, which contacts nobody."""

from __future__ import annotations

import pickle

import pytest
from hosted import agents

from flowchan import Graph, GraphError
from flowchan.hosts import local


def test_a_pool_compares_pickles_and_prints_as_what_was_written() -> None:
    pool = local(2)
    assert pool == local(2)
    assert pool != local(3)
    assert pickle.loads(pickle.dumps(pool)) == pool
    assert repr(pool) == str(pool) == "local(2)"
    assert pool.hosts == ("local-1", "local-2")
    assert not agents()


def test_a_part_of_a_pool_has_the_hosts_that_were_named() -> None:
    pool = local(3)
    assert pool["local-2"].hosts == ("local-2",)
    assert pool["local-1", "local-3"].hosts == ("local-1", "local-3")
    assert pool["local-2"].is_beside(pool)


@pytest.mark.parametrize("wrong", ["gpu1", (), ("local-1", "gpu1"), 1])
def test_a_host_that_the_pool_does_not_have_is_refused(wrong: object) -> None:
    with pytest.raises((KeyError, TypeError), match=r"local-1|int"):
        local(1)[wrong]  # type: ignore[index]


@pytest.mark.parametrize(
    ("patience", "error"), [(0, ValueError), (-1, ValueError), (None, ValueError), ("10", TypeError)]
)
def test_patience_is_a_number_of_seconds(patience: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="local: patience must be"):
        local(1, patience=patience)  # type: ignore[arg-type]


def test_declaring_and_checking_a_graph_on_a_pool_starts_nothing() -> None:
    graph = Graph("declared")
    graph.source(range(3)).map(abs, on=local(2), workers=4).sink(abs)
    assert graph.check() == ()
    assert not agents()


def test_what_can_not_be_sent_to_a_host_is_found_before_the_run() -> None:
    import threading

    lock = threading.Lock()
    graph = Graph("refused")
    graph.source([1]).map(lambda item: (item, lock), on=local(2), name="locked").sink(abs)
    with pytest.raises(GraphError, match=r"captured variable 'lock'"):
        graph.run()
    assert not agents()


def test_a_stage_on_hosts_that_nobody_has_named_is_found_before_the_run() -> None:
    graph = Graph("homeless")
    graph.source([1]).map(abs, on="hosts", name="far").sink(abs)
    (problem,) = graph.check()
    assert (problem.rule, problem.stage) == ("hosts", "far")
    assert "--hosts" in problem.message

"""Test a server that runs on a pool's hosts and is a stage of the user's graph."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import numpy as np
import psutil
import pytest
from killing import workers_named
from support.local_agents import agents_of
from support.waiting import WAIT_LIMIT_S, wait_until

from flowchan import Broken, Closed, Graph, RunError
from flowchan.hosts import local
from flowchan.pipelines import ParameterServer
from flowchan.viz import to_dot

SIZE = 200_000


def state() -> dict[str, Any]:
    return {"a": np.zeros(SIZE), "b": np.zeros(SIZE)}


def one() -> dict[str, Any]:
    return {"a": np.ones(SIZE), "b": np.ones(SIZE)}


def is_gone() -> bool:
    """Return whether this program has no agents and no shards any more."""
    return not agents_of(psutil.Process()) and not workers_named("parameters")


@pytest.mark.parametrize("on", ["thread", "process", "the same hosts", "other hosts"])
def test_server_applies_all_pushes_of_the_last_stage(on: str) -> None:
    graph, pool = Graph(), local(2)
    places: dict[str, Any] = {"the same hosts": pool, "other hosts": local(2)}
    server = ParameterServer(state(), graph=graph, on=pool, shards=2)
    client = server.client()
    graph.source(range(30)).sink(lambda _: client.push(one()), on=places.get(on, on))
    run = graph.start()
    run.wait()
    assert run.state == "done"
    assert (server.stats().pushes, server.stats().version) == (30, 30)
    with pytest.raises(Closed):
        client.push(one()).wait(WAIT_LIMIT_S)
    assert is_gone()


def test_server_is_pulled_by_stages_while_the_graph_runs() -> None:
    graph = Graph()
    with ParameterServer(state(), graph=graph, on=local(2), shards=2) as server:
        client = server.client()

        def work(number: int) -> float:
            version = client.push(one()).wait(WAIT_LIMIT_S)
            found = client.pull(at_least=version)
            assert (found["a"] == client.version).all()
            assert (found["b"] == client.version).all()
            return float(found["a"][0])

        results = graph.source(range(10)).map(work, on="process", workers=2).collect()
    assert max(graph.run()[results]) == 10  # the end of the with block has not closed the server


def test_server_shuts_down_if_another_stage_fails() -> None:
    graph = Graph()
    client = ParameterServer(state(), graph=graph, on=local(2), shards=2).client()

    def fail(number: int) -> None:
        client.push(one()).wait(WAIT_LIMIT_S)
        raise ZeroDivisionError

    graph.source(range(5)).sink(fail, on="process")
    with pytest.raises(RunError) as caught:
        graph.run()
    assert [type(error.__cause__) for error in caught.value.exceptions] == [ZeroDivisionError]
    with pytest.raises(Closed, match="the parameter server has shut down"):
        client.pull(at_least=2)
    assert is_gone()


@pytest.mark.parametrize("end", ["stop", "abort"])
def test_server_shuts_down_if_the_run_is_stopped_or_aborted(end: str) -> None:
    graph = Graph()
    server = ParameterServer(state(), graph=graph, on=local(2), shards=2)
    graph.input().sink(print)
    run = graph.start()
    client = server.client()
    assert client.push(one()).wait(WAIT_LIMIT_S) == 1
    getattr(run, end)()
    run.wait()
    with pytest.raises(Closed):
        client.pull(at_least=1)
    assert is_gone()


def test_lost_shard_fails_the_run() -> None:
    graph = Graph()
    server = ParameterServer(state(), graph=graph, on=local(2, peer_timeout=2), shards=2)
    client, numbers = server.client(), graph.input()
    numbers.sink(lambda _: client.push(one()).wait(WAIT_LIMIT_S))
    run = graph.start()
    run[numbers].put(0)
    wait_until(lambda: server.stats().pushes == 1)
    os.kill(agents_of(psutil.Process())[0].pid, signal.SIGKILL)
    with pytest.raises(RunError) as caught:
        run.wait()
    causes = [error.__cause__ for error in caught.value.exceptions]
    assert causes
    assert all(isinstance(cause, Broken) and "with its tensors" in str(cause) for cause in causes)
    wait_until(is_gone)


def test_server_ends_if_its_graph_is_dropped_before_a_run() -> None:
    graph = Graph()
    ParameterServer(state(), graph=graph, on=local(2))
    assert agents_of(psutil.Process())
    del graph
    gc.collect()
    wait_until(is_gone)


def test_server_is_drawn_as_one_cylinder_with_its_hosts() -> None:
    graph = Graph("training")
    server = ParameterServer(state(), graph=graph, on=local(2), shards=2, name="weights")
    client = server.client()
    graph.source([1]).sink(lambda _: client.push(one()), name="train")
    dot = to_dot(graph)
    (line,) = [line for line in dot.splitlines() if "<B>weights</B>" in line]
    assert "shape=cylinder" in line
    assert "on local-1, local-2" in line
    assert "weights pushes" not in dot
    with pytest.raises(RuntimeError, match="the graph ends the server"):
        server.close()
    graph.run()
    with pytest.raises(RuntimeError, match="graph 'training' runs only once, because 'weights' ended"):
        graph.run()

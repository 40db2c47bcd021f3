"""Test a parameter server that runs as a stage of the user's graph."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.local_agents import agents_of
from support.waiting import WAIT_LIMIT_S, wait_until

from flowchan import Closed, Graph, Run, RunError
from flowchan.hosts import local
from flowchan.pipelines import ParameterServer

everywhere = pytest.mark.parametrize("on", ["thread", "process"])


def state() -> dict[str, Any]:
    return {"a": np.zeros(1), "b": np.zeros(1)}


def one() -> dict[str, Any]:
    return {"a": np.ones(1), "b": np.ones(1)}


def pids_of(run: Run, stage: str) -> tuple[int, ...]:
    return next(tuple(one.pids) for one in run.stats().stages if one.name == stage)


def has_ended(run: Run, stage: str, items: int) -> bool:
    (found,) = [one for one in run.stats().stages if one.name == stage]
    return (found.items_in, found.state) == (items, "ended")


@pytest.mark.parametrize("shards", [1, 2])
@everywhere
def test_server_shuts_down_after_all_other_stages(on: str, shards: int) -> None:
    graph = Graph()
    server = ParameterServer(state(), graph=graph, on=on, shards=shards)
    client = server.client()

    def work(number: int) -> int:
        client.push(one())
        return number

    out = graph.source(range(20)).map(work, on="process", workers=2).collect()
    run = graph.start()
    assert run.wait()[out] == list(range(20))
    assert client.pull() == {"a": 20, "b": 20}
    assert client.version == 20
    assert run.state == "done"
    with pytest.raises(Closed):
        client.push(one())


@everywhere
def test_server_runs_after_the_program_drops_the_server_object(on: str) -> None:
    """The program keeps only the graph and a client."""
    graph = Graph()
    client = ParameterServer(state(), graph=graph, on=on).client()
    gc.collect()
    graph.source(range(5)).sink(lambda _: client.push(one()).wait(WAIT_LIMIT_S))
    graph.run()
    assert client.pull() == {"a": 5, "b": 5}


@everywhere
def test_server_applies_all_pushes_of_the_last_stage(on: str) -> None:
    graph = Graph()
    server = ParameterServer(state(), graph=graph, on=on)
    client = server.client()
    graph.source(range(50)).sink(lambda _: client.push(one()), on="process")
    graph.run()
    assert client.pull() == {"a": 50, "b": 50}


@pytest.mark.any_value
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("killed", [False, True])
@everywhere
def test_server_applies_calls_of_hosts_after_their_stage_ended(
    on: str, killed: bool, shards: int, tmp_path: Path
) -> None:
    """The workers on hosts do not wait for their pushes. The server applies none before the workers end."""
    graph = Graph()
    server = ParameterServer(state(), graph=graph, on=on, shards=shards)
    client = server.client()

    def add_late(current: Any, given: Any) -> Any:
        wait_until((tmp_path / "ended").exists)
        return current + given

    graph.source(range(20)).sink(
        lambda _: client.push(one(), rule=add_late), name="push", on=local(2), workers=2
    )
    run = graph.start()
    wait_until(lambda: has_ended(run, "push", items=20))
    if killed:
        for agent in agents_of(psutil.Process()):
            agent.kill()
    assert server.stats().version == 0
    (tmp_path / "ended").touch()
    run.wait()
    assert run.state == "done"
    assert client.pull() == {"a": 20, "b": 20}
    assert client.version == 20


def test_killed_server_is_replaced_within_the_graph() -> None:
    graph = Graph()
    server = ParameterServer(state(), graph=graph)
    client = server.client()
    numbers = graph.input()
    numbers.sink(lambda _: client.push(one()).wait(WAIT_LIMIT_S), on="process")
    with graph.start() as run:
        for number in range(5):
            run[numbers].put(number)
            wait_until(lambda: server.stats().pushes > number and bool(pids_of(run, "parameters")))  # noqa: B023
            os.kill(pids_of(run, "parameters")[0], signal.SIGKILL)
    assert client.pull() == {"a": 5, "b": 5}


@everywhere
def test_server_shuts_down_if_another_stage_fails(on: str) -> None:
    graph = Graph()
    server = ParameterServer(state(), graph=graph, on=on)
    client = server.client()

    def fail(number: int) -> None:
        client.push(one()).wait(WAIT_LIMIT_S)
        raise ZeroDivisionError

    graph.source(range(5)).sink(fail, on="process")
    with pytest.raises(RunError) as caught:
        graph.run()
    assert [type(error.__cause__) for error in caught.value.exceptions] == [ZeroDivisionError]
    with pytest.raises(Closed, match="the parameter server has shut down"):
        client.pull(at_least=2)


@everywhere
def test_source_that_pushes_stops_without_error_after_take(on: str) -> None:
    graph = Graph()
    server = ParameterServer(state(), graph=graph, on=on)
    client = server.client()

    def numbers() -> Iterator[int]:
        for number in itertools.count():
            client.push(one()).wait(WAIT_LIMIT_S)
            yield number

    taken = graph.source(numbers).take(5).collect()
    assert graph.run()[taken] == [0, 1, 2, 3, 4]
    assert client.pull()["a"] >= 5


@everywhere
def test_server_shuts_down_if_the_run_is_stopped(on: str) -> None:
    graph = Graph()
    server = ParameterServer(state(), graph=graph, on=on)
    numbers = graph.input()
    numbers.sink(print)
    run = graph.start()
    client = server.client()
    client.push(one()).wait(WAIT_LIMIT_S)
    run.stop()
    assert run.wait(WAIT_LIMIT_S) is not None
    assert client.pull() == {"a": 1, "b": 1}


@everywhere
def test_server_shuts_down_if_the_run_is_aborted(on: str) -> None:
    graph = Graph()
    server = ParameterServer(state(), graph=graph, on=on)
    graph.input().sink(print)
    run = graph.start()
    run.abort()
    run.wait(WAIT_LIMIT_S)
    with pytest.raises(Closed):
        server.client().pull(at_least=1)


def test_close_raises_for_a_server_in_a_graph() -> None:
    graph = Graph()
    server = ParameterServer(state(), graph=graph)
    with pytest.raises(RuntimeError, match="the graph ends the server"):
        server.close()
    assert graph.check() == ()


def test_second_run_of_a_graph_with_a_server_is_refused() -> None:
    graph = Graph("once")
    client = ParameterServer(state(), graph=graph, on="thread").client()
    graph.source(range(3)).sink(lambda number: client.push(one()))
    graph.run()
    with pytest.raises(RuntimeError, match="graph 'once' runs only once, because 'parameters' ended"):
        graph.run()

"""Test what clients see if the host of a shard is lost, and that a killed shard worker loses nothing."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.local_agents import agents_of
from support.waiting import WAIT_LIMIT_S, wait_until

from flowchan import Broken, ChannelError, pipelines
from flowchan.hosts import local
from flowchan.pipelines import ParameterServer
from flowchan.pipelines.parameter_server.remote_calls import MOST_OPEN

LOST = r"shard 1 of parameter server 'parameters' on host 'local-2' is lost, .*ParameterServer\.load"


def tensors() -> dict[str, Any]:
    return {"a": np.zeros(10), "b": np.zeros(10)}


def ones() -> dict[str, Any]:
    return {name: np.ones(10) for name in tensors()}


def keeper_of(server: ParameterServer, shard: int) -> int:
    """Return the process id of a shard's keeper."""
    assert server._pool_shards is not None
    pid: int = server._pool_shards._kids[shard + 1].pid
    return pid


@pytest.mark.parametrize("victim", ["agent", "keeper"])
def test_lost_shard_is_named_and_the_saved_state_continues(victim: str, tmp_path: Path) -> None:
    path = tmp_path / "server.safetensors"
    server = ParameterServer(tensors(), shards=2, on=local(2))
    client, late = server.client(), server.client()
    client.push(ones()).wait(WAIT_LIMIT_S)
    server.save(path)
    keeper = psutil.Process(keeper_of(server, 1))
    agent = keeper.parent()
    assert agent is not None
    assert agent.pid in [one.pid for one in agents_of(psutil.Process())]
    (agent if victim == "agent" else keeper).kill()
    keeper.wait(WAIT_LIMIT_S)  # the shard ends soon after its agent, but may still apply a push before that
    for call in (
        lambda: client.push(ones()).wait(WAIT_LIMIT_S),
        lambda: client.pull(timeout=WAIT_LIMIT_S),
        lambda: late.push(ones()).wait(WAIT_LIMIT_S),
        server.stats,
        server.close,
    ):
        with pytest.raises(Broken, match=LOST):
            call()
    with ParameterServer.load(path, shards=2, on=local(2)) as again:
        assert again.client().push(ones()).wait(WAIT_LIMIT_S) == 2
        assert (again.client().pull()["b"] == 2).all()


def push_until_broken(client: Any, folder: Path, worker: int) -> str:
    try:
        while True:
            client.push(ones()).wait(WAIT_LIMIT_S)
            (folder / str(worker)).touch()
    except Broken as error:
        return str(error)


def wait_for_version(client: Any, folder: Path, worker: int) -> str:
    client.pull()
    (folder / str(worker)).touch()
    try:
        client.pull(at_least=1)
    except Broken as error:
        return str(error)
    return "the pull returned"


@pytest.mark.parametrize("use", [push_until_broken, wait_for_version])
def test_clients_on_hosts_raise_the_name_of_the_lost_shard(use: Any, tmp_path: Path) -> None:
    """One of the clients is on the host of the other shard, and waits for a version in shared memory."""
    server = ParameterServer(tensors(), shards=2, on=local(2))
    workers = pipelines.map(2, use, server.client(), tmp_path, on=local(2))
    wait_until(lambda: len([*tmp_path.iterdir()]) == 2)
    os.kill(keeper_of(server, 1), signal.SIGKILL)
    texts = workers.join(WAIT_LIMIT_S)
    with pytest.raises(Broken, match=LOST):
        server.close()
    assert ["shard 1 of parameter server" in text and "'local-2'" in text for text in texts] == [True, True]


def push_after_kill(client: Any, folder: Path, worker: int) -> str:
    client.push(ones()).wait(WAIT_LIMIT_S)
    (folder / str(worker)).touch()
    wait_until((folder / "killed").exists)
    connection = client._connected()
    if 1 in connection._here:  # the channel loses its only reader
        wait_until(lambda: connection._sessions[1]._calls.channel.closed)
    try:
        client.push(ones()).wait(WAIT_LIMIT_S)
    except ChannelError as error:
        return f"{type(error).__name__}: {error}"
    return "the push was applied"


def test_push_to_a_dead_keeper_names_the_shard(tmp_path: Path) -> None:
    """The client finds a channel in shared memory without a reader, which is closed and not broken."""
    server = ParameterServer(tensors(), shards=2, on=local(2))
    workers = pipelines.map(2, push_after_kill, server.client(), tmp_path, on=local(2))
    wait_until(lambda: len([*tmp_path.iterdir()]) == 2)
    keeper = psutil.Process(keeper_of(server, 1))
    keeper.kill()
    keeper.wait(WAIT_LIMIT_S)
    (tmp_path / "killed").touch()
    texts = workers.join(WAIT_LIMIT_S)
    with pytest.raises(Broken, match=LOST):
        server.close()
    assert [re.match(f"Broken: .*{LOST}", text) is not None for text in texts] == [True, True], texts


def test_calls_name_the_lost_shard_after_the_other_keepers_end() -> None:
    server = ParameterServer(tensors(), shards=2, on=local(2))
    client = server.client()
    client.push(ones()).wait(WAIT_LIMIT_S)
    os.kill(keeper_of(server, 1), signal.SIGKILL)
    with pytest.raises(Broken, match=LOST):
        server.close()
    for call in (lambda: client.push(ones()).wait(WAIT_LIMIT_S), lambda: client.pull(timeout=WAIT_LIMIT_S)):
        with pytest.raises(Broken, match=LOST):
            call()


@pytest.mark.parametrize(("shard", "pulls"), [(0, 1), (1, 1), (1, MOST_OPEN + 1)])
def test_waiting_pull_raises_if_a_shard_is_lost(shard: int, pulls: int) -> None:
    """The other shard's keeper never answers such a pull. The last of many pulls also waits to be sent."""
    server = ParameterServer(tensors(), shards=2, on=local(2))
    client = server.client()
    client.pull()
    sessions = client._connected()._sessions
    with ThreadPoolExecutor(pulls) as threads:
        waiting = [threads.submit(client.pull, at_least=1, timeout=WAIT_LIMIT_S) for _ in range(pulls)]
        wait_until(lambda: all(len(one._waiting) == min(pulls, MOST_OPEN) for one in sessions))
        os.kill(keeper_of(server, shard), signal.SIGKILL)
        for pull in waiting:
            with pytest.raises(Broken, match=f"shard {shard} of parameter server .* is lost"):
                pull.result()
    with pytest.raises(Broken):
        server.close()


def test_close_can_be_repeated_after_a_timeout() -> None:
    """At the second call, one keeper has already ended."""
    server = ParameterServer(tensors(), shards=2, on=local(2))
    server.client().push(ones()).wait(WAIT_LIMIT_S)
    assert server._pool_shards is not None
    kids, keeper = server._pool_shards._kids, psutil.Process(keeper_of(server, 1))
    keeper.suspend()
    try:
        with pytest.raises(TimeoutError, match="call close again"):
            server.close(timeout=0.5)
        wait_until(lambda: [kid.number for kid in kids.alive] == [2])
    finally:
        keeper.resume()
    server.close(WAIT_LIMIT_S)
    assert server.stats().pushes == 1


def test_push_is_applied_once_if_its_shard_worker_dies(tmp_path: Path) -> None:
    """The rule kills the worker of each shard in the middle of the push, but not the worker's replacement."""

    def die_once(current: Any, given: Any) -> Any:
        current += given  # half of the push
        mark = tmp_path / f"{given[0]}"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return current

    given = {"a": np.full(10, 1.0), "b": np.full(10, 2.0)}
    with ParameterServer(tensors(), shards=2, on=local(2)) as server:
        client = server.client()
        assert client.push(given, rule=die_once).wait(WAIT_LIMIT_S) == 1
        assert len([*tmp_path.iterdir()]) == 2
        found = client.pull()
        assert (found["a"] == 1).all()
        assert (found["b"] == 2).all()
        assert server.stats().pushes == 1

"""Test that a pull returns one version of all tensors while the server applies pushes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.waiting import WAIT_LIMIT_S

from flowchan.pipelines import ParameterClient, ParameterServer
from flowchan.pipelines import map as start
from flowchan.pipelines.parameter_server import server_connection, shard_memory
from flowchan.pipelines.parameter_server.shard_memory import OPTIMISTIC_READS


def state() -> dict[str, Any]:
    return {"a": np.zeros(10), "b": np.zeros(10)}


def ones() -> dict[str, Any]:
    return {name: np.ones(10) for name in state()}


class Interrupted:
    """A copy function that makes another client push in the middle of a pull."""

    def __init__(self, client: ParameterClient, times: int, pushes: int) -> None:
        self.client, self.times, self.pushes = client, times, pushes
        self.copies = 0
        self.copy = server_connection.copy_of

    def __call__(self, source: Any, into: Any, name: str) -> Any:
        self.copies += 1
        found = self.copy(source, into, name)
        if name == "a" and self.times:
            self.times -= 1
            for _ in range(self.pushes):
                self.client.push(ones()).wait(WAIT_LIMIT_S)
        return found


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("pushes", [1, 2, 3])
def test_pull_overtaken_by_pushes_returns_one_version(
    shards: int, pushes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ParameterServer(state(), shards=shards) as server:
        client = server.client()
        interrupted = Interrupted(server.client(), OPTIMISTIC_READS, pushes)
        monkeypatch.setattr(server_connection, "copy_of", interrupted)
        found = client.pull()
        assert set(found["a"]) | set(found["b"]) == {float(client.version or 0)}
        assert interrupted.copies == (2 if pushes == 1 else OPTIMISTIC_READS + 2)


def test_reader_locks_the_block_if_pushes_keep_overtaking_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server delays the second push until the reader has copied its block."""
    monkeypatch.setattr(shard_memory, "MOST_LOCKED_S", WAIT_LIMIT_S)
    with ParameterServer(state(), on="thread") as server:
        client, other = server.client(), server.client()
        handles = []

        class Overtaken(Interrupted):
            def __call__(self, source: Any, into: Any, name: str) -> Any:
                locked = not self.times
                found = super().__call__(source, into, name)
                if name == "a" and locked and not handles:
                    handles.extend([other.push(ones()), other.push(ones())])
                    handles[0].wait(WAIT_LIMIT_S)
                return found

        monkeypatch.setattr(server_connection, "copy_of", Overtaken(other, OPTIMISTIC_READS, 2))
        found = client.pull()
        assert set(found["a"]) | set(found["b"]) == {float(client.version or 0)}
        assert client.version == 2 * OPTIMISTIC_READS
        assert handles[1].wait(WAIT_LIMIT_S) == client.version + 2


def test_inconsistent_pull_reads_once_and_may_mix_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    with ParameterServer(state()) as server:
        client = server.client()
        monkeypatch.setattr(server_connection, "copy_of", Interrupted(server.client(), 1, 2))
        found = client.pull(consistent=False)
        assert (found["a"][0], found["b"][0]) == (0, 2)


@pytest.mark.any_value
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("on", ["thread", "process"])
def test_reader_processes_see_whole_versions_in_ascending_order(on: str, shards: int) -> None:
    def push(client: ParameterClient, worker: int) -> None:
        for _ in range(500):
            client.push({"a": np.ones(20_000), "b": np.ones(20_000)})

    def read(client: ParameterClient, worker: int) -> int:
        last = 0
        while last < 1000:
            found = client.pull()
            values = set(found["a"]) | set(found["b"])
            assert values == {float(client.version or 0)}
            assert client.version is not None
            assert client.version >= last
            last = client.version
        return last

    big = {"a": np.zeros(20_000), "b": np.zeros(20_000)}
    with ParameterServer(big, on=on, shards=shards) as server:
        readers = start(2, read, server.client(), on="process")
        start(2, push, server.client(), on="process").join()
        assert readers.join() == [1000, 1000]

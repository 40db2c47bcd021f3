"""Test servers whose shards are on the hosts of a pool."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.optional_packages import optional
from support.waiting import WAIT_LIMIT_S, wait_until

from flowchan import Channel, Closed, Graph, RunError, pipelines, worker
from flowchan.hosts import local
from flowchan.pipelines import ParameterServer, RowOptimizer
from flowchan.pipelines.parameter_server.pool_client import PoolConnection
from flowchan.pipelines.parameter_server.shard_keeper import DISCARDED

torch = optional("torch")
SIZE = 1000
LARGE = 1 << 20


def tensors() -> dict[str, Any]:
    return {"left": np.zeros(SIZE), "right": np.zeros((10, SIZE // 10), "float32"), "small": np.zeros(2, int)}


def ones() -> dict[str, Any]:
    return {name: np.ones_like(value) for name, value in tensors().items()}


@pytest.fixture
def server() -> Iterator[ParameterServer]:
    """Yield a server with a shard on each of two hosts."""
    with ParameterServer(tensors(), shards=2, on=local(2)) as server:
        yield server


def push_and_check(client: Any, worker: int) -> list[int]:
    """Push 20 times. After each push, check that a pull returns one version that includes the push."""
    versions = []
    for number in range(1, 21):
        handle = client.push(ones())
        versions.append(handle.wait(WAIT_LIMIT_S))
        assert handle.done
        assert not handle.dropped
        assert handle.version == versions[-1]
        found = client.pull(at_least=versions[-1], timeout=WAIT_LIMIT_S)
        assert client.version >= versions[-1] >= number
        for name, value in tensors().items():
            assert (found[name] == client.version).all()
            assert found[name].dtype == value.dtype
    return versions


@pytest.mark.parametrize("on", ["process", "the same hosts", "other hosts"])
def test_s1_clients_push_and_pull_whole_versions(on: str) -> None:
    pool = local(2)
    places: dict[str, Any] = {"the same hosts": pool, "other hosts": local(3)[("local-3",)]}
    with ParameterServer(tensors(), shards=2, on=pool) as server:
        versions = pipelines.map(3, push_and_check, server.client(), on=places.get(on, on)).join()
        assert sorted(version for found in versions for version in found) == [*range(1, 61)]
        assert (server.client().pull()["left"] == 60).all()
        stats = server.stats()
        assert (stats.version, stats.pushes, stats.dropped, stats.failed) == (60, 60, 0, 0)
        assert stats.pulls == 61
        assert stats.bytes_in == 60 * sum(value.nbytes for value in tensors().values())
    assert server.stats().pushes == 60  # still available after the server's end


def shards_here(client: Any, number: int) -> tuple[str, list[str], list[str]]:
    """Return this worker's host, the hosts of the shards in shared memory, and those of the other shards."""
    client.push(ones()).wait(WAIT_LIMIT_S)
    client.pull()
    connection: PoolConnection = client._connected()
    here = [place.host for place in connection._places if place.number in connection._here]
    away = [place.host for place in connection._places if place.number not in connection._here]
    return worker().host, here, away


def test_client_uses_shared_memory_for_shards_on_its_host() -> None:
    pool = local(2)
    with ParameterServer(tensors(), shards=3, on=pool) as server:
        found = pipelines.map(2, shards_here, server.client(), on=pool).join()
    assert sorted(found) == [
        ("local-1", ["local-1", "local-1"], ["local-2"]),
        ("local-2", ["local-2"], ["local-1", "local-1"]),
    ]


def test_push_options_work_on_a_pool(server: ParameterServer) -> None:
    client = server.client()
    client.push({"left": np.full(SIZE, 2.0)}, rule="copy").wait(WAIT_LIMIT_S)
    client.push({"left": np.full(SIZE, 4.0)}, scale=0.5).wait(WAIT_LIMIT_S)
    client.push({"left": np.full(SIZE, 3.0)}, rule=lambda current, given: np.maximum(current, given)).wait(60)
    assert client.pull(names=["left"])["left"][:2].tolist() == [4, 4]
    out = {"left": np.zeros(SIZE)}
    assert client.prefetch(["left"]).wait(out, timeout=WAIT_LIMIT_S) is out
    assert out["left"][0] == 4
    client.push({"left": np.zeros(SIZE)}, rule="zero").wait(WAIT_LIMIT_S)
    out = tensors()
    assert client.pull(out, consistent=False) is out
    old = client.push({"left": np.ones(SIZE)}, at=0, max_staleness=1)
    assert old.wait(WAIT_LIMIT_S) == 4
    assert old.dropped
    with pytest.raises(KeyError, match="middle"):
        client.push({"middle": np.ones(SIZE)})
    with pytest.raises(TimeoutError):
        client.pull(at_least=10**6, timeout=0.1)
    with pytest.raises(ZeroDivisionError):
        client.push({"left": np.ones(SIZE)}, rule=lambda current, given: 1 / 0).wait(WAIT_LIMIT_S)
    assert client.pull(timeout=WAIT_LIMIT_S)["left"][:2].tolist() == [0, 0]
    assert server.stats().version == 5


@pytest.mark.parametrize("given", [np.zeros(3), [0]])
def test_array_or_object_lives_on_a_host(given: Any) -> None:
    with ParameterServer(given, on=local(1)) as server:
        client = server.client()
        assert client.push(type(given)([1, 2, 3]) if isinstance(given, list) else np.ones(3)).wait(60) == 1
        assert [*client.pull()] == ([0, 1, 2, 3] if isinstance(given, list) else [1, 1, 1])


def test_optimizers_and_rows_run_on_hosts() -> None:
    given = {"w": torch.zeros(4), "users": torch.zeros(5, 2)}
    options: Any = {
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
        "rows": {"users": RowOptimizer.sgd(lr=0.25)},
    }
    with ParameterServer(given, shards=2, on=local(2), **options) as server:
        client = server.client()
        client.push({"w": torch.ones(4)}, rule="gradient").wait(60)
        client.push({"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}, codes="fp16").wait(60)
        version = client.push_rows("users", [2, 0, 2], torch.ones(3, 2), rule="gradient").wait(60)
        rows = client.pull_rows("users", [0, 2], at_least=version, timeout=60)
        assert client.version == version == 3
        assert rows.tolist() == [[-0.25, -0.25], [-0.5, -0.5]]
        assert client.pull()["w"].tolist() == [0.5, 1.5, 2.5, 3.5]


def test_saved_state_continues_on_any_number_of_shards(tmp_path: Path) -> None:
    def optimizer(params: Any) -> Any:
        return torch.optim.SGD(params, lr=1.0, momentum=0.5)

    given = {"a": torch.zeros(4), "b": torch.zeros(2)}
    gradient = {"a": torch.ones(4), "b": torch.ones(2)}
    path = tmp_path / "server.safetensors"
    with ParameterServer(given, shards=2, on=local(2), optimizer=optimizer) as server:
        server.client().push(gradient, rule="gradient").wait(60)
        server.save(path)
    for on, shards in ((local(2), 2), ("process", 1)):
        with ParameterServer.load(path, shards=shards, on=on, optimizer=optimizer) as server:
            client = server.client()
            assert client.push(gradient, rule="gradient").wait(60) == 2
            assert client.pull()["b"].tolist() == [-2.5, -2.5]  # -1, and then 0.5 * -1 - 1


def test_remote_push_waits_for_a_slow_client(server: ParameterServer) -> None:
    slow, quick = server.client(), server.client()
    slow.pull()
    sent = []
    for _ in range(4):
        try:
            quick.push(ones(), max_staleness=2, stale="wait", timeout=0.5).wait(60)
            sent.append(True)
        except TimeoutError:
            sent.append(False)
    assert sent == [True, True, False, False]


def test_reads_stay_consistent_while_clients_push(server: ParameterServer) -> None:
    over = threading.Event()

    def push_often() -> None:
        client = server.client()
        while not over.is_set():
            client.push(ones())
        client.close()

    pushing = [threading.Thread(target=push_often) for _ in range(2)]
    for thread in pushing:
        thread.start()
    try:
        client, last = server.client(), 0
        for _ in range(100):
            found = client.pull(timeout=WAIT_LIMIT_S)
            values = {value for one in found.values() for value in one.ravel().tolist()}
            assert values == {client.version}
            assert client.version >= last
            last = client.version
    finally:
        over.set()
        for thread in pushing:
            thread.join()


def push_and_close(client: Any, worker: int) -> None:
    for _ in range(40):
        client.push(ones())
    client.close()


def test_pushes_sent_before_close_are_applied(server: ParameterServer) -> None:
    pipelines.map(2, push_and_close, server.client(), on=local(2)).join()
    wait_until(lambda: server.stats().pushes == 80)
    assert (server.client().pull()["left"] == 80).all()


def test_client_raises_closed_after_the_server_is_closed() -> None:
    server = ParameterServer(tensors(), shards=2, on=local(2))
    client = server.client()
    client.push(ones())
    server.close()
    assert server.stats().pushes == 1
    for call in (client.pull, lambda: client.push(ones()).wait(60)):
        with pytest.raises(Closed):
            call()


class LatePusher:
    """Stage function that pushes without waiting, and then returns the outcomes.

    Args:
        client: Client of the parameter server.
        outcomes: Channel for the outcomes.
    """

    def __init__(self, client: Any, outcomes: Channel[Any]) -> None:
        self.client, self.outcomes = client, outcomes
        self.handles: list[Any] = []

    def __call__(self, item: str) -> None:
        """Push ten times for the item ``"push"``. Otherwise, wait for the outcomes."""
        found: list[Any] = []
        if item == "push":
            values = {name: np.ones(LARGE) for name in ("left", "right")}
            self.handles = [self.client.push(values) for _ in range(10)]
        for handle in self.handles if item == "wait" else ():
            try:
                found.append(handle.wait(WAIT_LIMIT_S))
            except Closed as error:
                found.append(str(error))
        self.outcomes.put(found)
        self.outcomes.flush()


def test_close_applies_or_reports_each_push_in_transit() -> None:
    server = ParameterServer({"left": np.zeros(LARGE), "right": np.zeros(LARGE)}, shards=2, on=local(2))
    graph, outcomes = Graph("late"), Channel[Any](across="hosts")
    items = graph.input()
    items.sink(LatePusher(server.client(), outcomes), on=local(1))
    with graph.start() as run:
        run[items].put("push")
        assert outcomes.get(WAIT_LIMIT_S) == []
        server.close()
        run[items].put("wait")
        found = outcomes.get(WAIT_LIMIT_S)
    versions = [one for one in found if isinstance(one, int)]
    unknown = [one for one in found if "may have applied" in str(one)]
    assert versions == [*range(1, len(versions) + 1)]
    assert len(versions) <= server.stats().pushes <= len(versions) + len(unknown)
    assert set(found) - {*versions, *unknown} <= {DISCARDED}


def push_until_killed(client: Any, folder: Path, worker: int) -> None:
    while True:
        client.push(ones())
        (folder / str(os.getpid())).touch()


@pytest.mark.parametrize("same", [True, False])
def test_killed_client_leaves_whole_pushes(tmp_path: Path, same: bool) -> None:
    pool = local(2)
    clients = pool if same else local(2)
    with ParameterServer(tensors(), shards=2, on=pool) as server:
        workers = pipelines.map(2, push_until_killed, server.client(), tmp_path, on=clients)
        wait_until(lambda: len([*tmp_path.iterdir()]) == 2)
        for path in tmp_path.iterdir():
            os.kill(int(path.name), signal.SIGKILL)
        with pytest.raises(RunError):
            workers.join(60)
        client = server.client()
        version = client.push(ones()).wait(60)
        found = client.pull(at_least=version)
        assert {value for one in found.values() for value in one.ravel().tolist()} == {version}

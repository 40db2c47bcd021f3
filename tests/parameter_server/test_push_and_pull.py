"""Test pushes to and pulls from one parameter server: rules, forms of state, errors and statistics."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from support.peers import ThreadPeer
from support.waiting import WAIT_LIMIT_S, wait_until

from flowchan import Channel, Closed
from flowchan.pipelines import ParameterClient, ParameterServer
from flowchan.pipelines import map as start
from flowchan.pipelines.parameter_server.shard_memory import PENDING, OpenShard
from flowchan.pipelines.parameter_server.wakeup import Wakeup

everywhere = pytest.mark.parametrize("on", ["thread", "process"])


def state() -> dict[str, Any]:
    return {"w": np.arange(6.0).reshape(2, 3), "b": np.zeros(3, np.float32), "steps": np.array(7)}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


@everywhere
def test_pull_returns_a_copy_of_the_initial_state(on: str) -> None:
    given = state()
    with ParameterServer(given, on=on) as server:
        client = server.client()
        given["w"][:] = 100
        found = client.pull()
        assert_equal(found, state())
        found["w"][:] = 50
        assert_equal(client.pull(), state())
        assert client.version == 0


@everywhere
def test_each_rule_changes_only_the_pushed_tensors(on: str) -> None:
    with ParameterServer(state(), on=on) as server:
        client, expected = server.client(), state()
        ones = np.ones((2, 3))
        client.push({"w": ones})
        client.push({"w": ones, "b": np.ones(3, np.float32)}, scale=-0.5)
        client.push({"b": np.full(3, 9, np.float32)}, rule="copy")
        client.push({"w": 2 * ones}, rule=lambda current, given: np.maximum(current, given))
        handle = client.push({"steps": np.array(0)}, rule="zero")
        assert handle.wait(WAIT_LIMIT_S) == 5
        expected["w"] = np.maximum(expected["w"] + 0.5, 2)
        expected["b"][:] = 9
        expected["steps"] = np.array(0)
        assert_equal(client.pull(), expected)
        assert client.version == 5


@everywhere
def test_state_may_be_one_array_or_any_object(on: str) -> None:
    with ParameterServer(np.zeros(3), on=on) as server:
        client = server.client()
        client.push(np.ones(3)).wait(WAIT_LIMIT_S)
        np.testing.assert_array_equal(client.pull(), np.ones(3))
        out = np.zeros(3)
        assert client.pull(out=out) is out
        np.testing.assert_array_equal(out, np.ones(3))
    with ParameterServer({"notes": ["a"], 3: None}, on=on) as server:
        client = server.client()
        assert client.pull() == {"notes": ["a"], 3: None}
        client.push("x" * 100_000, rule="copy")
        client.push("y", rule="add")
        client.push(2, rule=lambda current, given: current * given).wait(WAIT_LIMIT_S)
        assert client.pull() == ("x" * 100_000 + "y") * 2
        client.push("short", rule="copy").wait(WAIT_LIMIT_S)
        assert client.pull() == "short"


def test_pull_fills_arrays_in_place_and_selects_tensors_by_name() -> None:
    with ParameterServer(state(), on="thread") as server:
        client = server.client()
        out = {name: np.full_like(value, -1) for name, value in state().items()}
        assert client.pull(out=out) is out
        assert_equal(out, state())
        assert list(client.pull(names=["b", "w"])) == ["b", "w"]
        out["w"][:] = -1
        client.pull(out={"w": out["w"]}, names=["w"])
        assert_equal(out, state())
        with pytest.raises(KeyError, match="pull: names must be names of the server's tensors"):
            client.pull(names=["x"])
        with pytest.raises(KeyError, match="pull: out must have a tensor 'b'"):
            client.pull(out={"w": out["w"]})
        with pytest.raises(ValueError, match=r"pull: out\['b'\] must have the shape \(3,\), got \(2,\)"):
            client.pull(out={**out, "b": np.zeros(2)})


@everywhere
def test_client_rejects_invalid_pushes(on: str) -> None:
    with ParameterServer(state(), on=on) as server:
        client = server.client()
        with pytest.raises(KeyError, match="'x'"):
            client.push({"x": np.zeros(1)})
        with pytest.raises(ValueError, match=r"values\['b'\] must have the shape \(3,\), got \(4,\)"):
            client.push({"b": np.zeros(4, np.float32)})
        with pytest.raises(TypeError, match=r"values\['b'\] must be float32"):
            client.push({"b": np.zeros(3)})
        with pytest.raises(TypeError, match="push: values must be a mapping"):
            client.push(np.zeros(3))
        with pytest.raises(ValueError, match="push: rule must be"):
            client.push({"b": np.zeros(3, np.float32)}, rule="subtract")
        with pytest.raises(ValueError, match="push: stale must be"):
            client.push({}, stale="skip")  # type: ignore[arg-type]
        assert client.push({}).wait(WAIT_LIMIT_S) == 1
        assert_equal(client.pull(), state())


@everywhere
def test_failed_rule_raises_at_the_client_and_changes_nothing(on: str) -> None:
    def divide(current: Any, given: Any) -> Any:
        current += 5
        raise ZeroDivisionError("no")

    with ParameterServer(state(), on=on) as server:
        client = server.client()
        client.push({"b": np.ones(3, np.float32)})
        handle = client.push({"w": np.ones((2, 3)), "b": np.ones(3, np.float32)}, rule=divide)
        with pytest.raises(ZeroDivisionError, match="no"):
            handle.wait(WAIT_LIMIT_S)
        assert handle.done
        client.push({"b": np.ones(3, np.float32)}).wait(WAIT_LIMIT_S)
        assert_equal(client.pull(), {**state(), "b": np.full(3, 2, np.float32)})
        assert server.stats().failed == 1
    with ParameterServer([1], on=on) as server:
        client = server.client()
        with pytest.raises(TypeError):
            client.push(3, rule="add").wait(WAIT_LIMIT_S)
        assert client.pull() == [1]


def add_each(client: ParameterClient, count: int, worker: int) -> list[int]:
    handles = [client.push({"w": np.full((2, 3), float(worker))}) for _ in range(count)]
    return [handle.wait(WAIT_LIMIT_S) for handle in handles]


@pytest.mark.parametrize("shards", [1, 2])
@everywhere
def test_each_push_from_several_processes_is_applied_once(on: str, shards: int) -> None:
    with ParameterServer(state(), on=on, shards=shards) as server:
        versions = start(3, add_each, server.client(), 2 * PENDING, on="process").join()
        assert sorted(version for own in versions for version in own) == list(range(1, 6 * PENDING + 1))
        assert all(own == sorted(own) for own in versions)
        found = server.client().pull(at_least=6 * PENDING, timeout=WAIT_LIMIT_S)
        np.testing.assert_array_equal(found["w"], state()["w"] + 6 * 2 * PENDING)


def test_client_can_be_sent_through_a_channel() -> None:
    clients: Channel[ParameterClient] = Channel(across="processes")

    def work(clients: Channel[ParameterClient], worker: int) -> float:
        client = clients.get()
        client.push(np.ones(2)).wait(WAIT_LIMIT_S)
        return float(client.pull()[0])

    with ParameterServer(np.zeros(2)) as server:
        clients.put(server.client())
        assert start(1, work, clients, on="process").join() == [1.0]


@everywhere
def test_pull_waits_for_the_requested_version(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps, wait = threading.Event(), Wakeup.wait

    def noted(wakeup: Wakeup, seen: int, seconds: float) -> None:
        sleeps.set()
        wait(wakeup, seen, seconds)

    with ParameterServer(np.zeros(1), on=on) as server:
        reader, writer = server.client(), server.client()
        with pytest.raises(TimeoutError):
            reader.pull(at_least=1, timeout=0.01)
        monkeypatch.setattr(Wakeup, "wait", noted)
        pulling = ThreadPeer(lambda: reader.pull(at_least=1, timeout=WAIT_LIMIT_S))
        wait_until(sleeps.is_set)
        writer.push(np.ones(1))
        assert pulling.result() == 1.0


@everywhere
def test_close_applies_pending_pushes_and_closes_clients(on: str) -> None:
    server = ParameterServer(np.zeros(1), on=on)
    client = server.client()
    handles = [client.push(np.ones(1)) for _ in range(10)]
    server.close()
    assert [handle.version for handle in handles] == list(range(1, 11))
    assert client.pull() == 10.0
    with pytest.raises(Closed):
        client.push(np.ones(1))
    with pytest.raises(Closed, match="the parameter server has shut down"):
        client.pull(at_least=11)
    server.close()


def test_server_shuts_down_when_its_last_reference_is_dropped() -> None:
    server = ParameterServer(np.zeros(1))
    client, ends = server.client(), (server._inbox, server._ended)
    assert client.push(np.ones(1)).wait(WAIT_LIMIT_S) == 1
    del server
    gc.collect()
    wait_until(lambda: all(channel.closed for channel in ends))


def test_prefetch_copies_in_the_background() -> None:
    with ParameterServer(state(), on="thread") as server:
        client = server.client()
        assert_equal(client.prefetch().wait(timeout=WAIT_LIMIT_S), state())
        out = {"b": np.ones(3, np.float32)}
        assert client.prefetch(["b"]).wait(out, WAIT_LIMIT_S) is out
        assert_equal(out, {"b": state()["b"]})
        with pytest.raises(KeyError):
            client.prefetch(["x"])


def test_stats_count_pushes_pulls_and_bytes() -> None:
    with ParameterServer(state(), on="thread") as server:
        first, second = server.client(), server.client()
        first.pull()
        second.pull(names=["b"])
        first.push({"b": np.ones(3, np.float32)}).wait(WAIT_LIMIT_S)
        second.push({"w": np.ones((2, 3))}).wait(WAIT_LIMIT_S)
        second.push({"w": np.ones((2, 3))}, at=2).wait(WAIT_LIMIT_S)
        stats = server.stats()
        size = sum(value.nbytes for value in state().values())
        assert (stats.version, stats.pushes, stats.pulls, stats.queued) == (3, 3, 2, 0)
        assert (stats.bytes_in, stats.bytes_out) == (12 + 48 + 48, size + 12)
        assert (stats.mean_staleness, stats.max_staleness) == (1 / 3, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shards": 0}, "shards must be"),
        ({"shards": 4}, "shards must be at most the number of tensors"),
        ({"on": "hosts"}, "on must be"),
        ({"name": ""}, "name must"),
    ],
)
def test_server_rejects_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ParameterServer(state(), **options)


def test_pull_into_integers_is_refused_for_floating_point_tensors() -> None:
    with ParameterServer({"w": np.array([0.5, 1.7])}, on="thread") as server:
        with pytest.raises(ValueError, match=r"out\['w'\] must have a floating-point type"):
            server.client().pull(out={"w": np.zeros(2, np.int64)})
        found = server.client().pull(out={"w": np.zeros(2, np.float32)})
        assert found["w"].tolist() == pytest.approx([0.5, 1.7])


def test_topk_codes_are_refused_for_the_copy_rule() -> None:
    with (
        ParameterServer({"w": np.zeros(200)}, on="thread") as server,
        pytest.raises(ValueError, match='with codes="topk", got "copy"'),
    ):
        server.client().push({"w": np.ones(200)}, rule="copy", codes="topk")


def test_prefetch_changes_the_version_when_the_caller_takes_it() -> None:
    with ParameterServer({"w": np.zeros(2)}, on="thread") as server:
        client, other = server.client(), server.client()
        client.pull()
        other.push({"w": np.ones(2)}).wait(WAIT_LIMIT_S)
        handle = client.prefetch()
        wait_until(lambda: not any(thread.name == "flowchan pull" for thread in threading.enumerate()))
        assert client.version == 0
        assert client.push({"w": np.ones(2)}, max_staleness=0).wait(WAIT_LIMIT_S) == 1
        assert handle.wait()["w"].tolist() == [1, 1]
        assert client.version == 1


def test_pull_raises_timeout_error_if_pushes_overwrite_every_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenShard, "is_version", lambda shard, version: False)
    with (
        ParameterServer({"w": np.zeros(2)}, on="thread") as server,
        pytest.raises(TimeoutError, match="pushes overwrote each of"),
    ):
        server.client().pull(timeout=0.01)


def test_wait_after_close_raises_if_later_pushes_overwrote_the_outcome() -> None:
    with ParameterServer({"w": np.zeros(2)}, on="thread") as server:
        client = server.client()
        handle = client.push({"w": np.ones(2)})
        connection = client._connection
        client.close()
        assert connection is not None
        other = server.client()
        for _ in range(PENDING + 1):
            last = other.push({"w": np.ones(2)})
        last.wait(WAIT_LIMIT_S)
        with pytest.raises(RuntimeError, match="the outcome of the push was overwritten"):
            handle.wait(WAIT_LIMIT_S)

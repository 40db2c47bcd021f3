"""Test that pushes computed from old values are dropped or wait."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.waiting import WAIT_LIMIT_S, wait_until

from flowchan.pipelines import ParameterClient, ParameterServer


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("on", ["thread", "process"])
def test_stale_push_is_dropped_and_counted(on: str, shards: int) -> None:
    with ParameterServer({"a": np.zeros(1), "b": np.zeros(1)}, on=on, shards=shards) as server:
        client = server.client()
        client.pull()
        one = {"a": np.ones(1), "b": np.ones(1)}
        assert [client.push(one, max_staleness=1).wait(WAIT_LIMIT_S) for _ in range(4)] == [1, 2, 2, 2]
        dropped = client.push(one, max_staleness=1)
        dropped.wait(WAIT_LIMIT_S)
        assert dropped.dropped
        client.pull()
        fresh = client.push(one, max_staleness=1)
        assert fresh.wait(WAIT_LIMIT_S) == 3
        assert not fresh.dropped
        stats = server.stats()
        assert (stats.dropped, stats.pushes, stats.max_staleness) == (3, 3, 2)
        assert client.pull()["a"] == client.pull()["b"] == 3


def test_push_waits_until_slower_clients_have_pulled() -> None:
    with ParameterServer(np.zeros(1), on="thread") as server:
        fast, slow = server.client(), server.client()
        fast.pull()
        slow.pull()

        def push(client: ParameterClient, timeout: float) -> int:
            return client.push(np.ones(1), max_staleness=2, stale="wait", timeout=timeout).wait(WAIT_LIMIT_S)

        assert [push(fast, WAIT_LIMIT_S) for _ in range(2)] == [1, 2]
        with pytest.raises(TimeoutError):
            push(fast, 0.01)
        assert server.stats().pushes == 2
        pushing = threading.Thread(target=push, args=(fast, WAIT_LIMIT_S))
        pushing.start()
        slow.pull()
        pushing.join()
        wait_until(lambda: server.stats().pushes == 3)
        assert push(fast, WAIT_LIMIT_S) == 4
        with pytest.raises(TimeoutError):
            push(fast, 0.01)
        slow.close()  # a closed client does not delay other clients
        assert push(fast, WAIT_LIMIT_S) == 5
        assert server.stats().dropped == 0

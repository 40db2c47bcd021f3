"""Test that a broken connection is reestablished without lost or repeated items."""

from __future__ import annotations

from typing import Any

import pytest
from support.waiting import wait_until

from benchmarks.slow_connections import cut
from flowchan import Graph, Run
from flowchan.hosts import local
from flowchan.hosts.agent_handle import AgentHandle
from flowchan.run.policy import decisions
from tests.link.linked import kill_tls_proxies

ITEMS = 3000


pytestmark = pytest.mark.usefixtures("no_agent_stays")


def breaks(run: Run) -> list[int]:
    return [host.breaks for host in run.stats().hosts]


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_items_arrive_once_and_in_order_despite_broken_connections(tls: bool) -> None:
    if tls:
        pytest.importorskip("cryptography")

    def both(item: int) -> tuple[int, bytes]:
        return item, bytes(item % 500)

    graph = Graph("breaking")
    numbers = graph.source(range(ITEMS)).map(both, on=local(2, tls=tls), workers=4, name="far")
    result = numbers.collect()
    found: list[Any] = []
    with graph.start() as run:
        for item in run.iter(result):
            found.append(item[0])
            assert len(item[1]) == item[0] % 500
            if len(found) % 500 == 100:
                kill_tls_proxies() if tls else cut()
    assert sum(breaks(run)) >= 1
    assert found == list(range(ITEMS))
    assert [host.agents for host in run.stats().hosts] == [1, 1]


def test_worker_continues_when_the_link_of_its_agent_breaks() -> None:
    from support.worker_latch import Gate

    gate = Gate()
    graph = Graph("held")
    result = graph.source(range(5)).map(gate.wait, on=local(1), workers=2).collect()
    run = graph.start()
    gate.wait_held(2)
    assert cut() == 1
    wait_until(lambda: breaks(run) == [1] and run.stats().hosts[0].state == "connected")
    gate.open()
    assert run.wait()[result] == [0, 1, 2, 3, 4]


def test_agent_with_a_broken_link_learns_that_the_run_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent connects once more and learns that the run is over. The run therefore does not wait for its
    whole grace period."""
    monkeypatch.setattr(decisions, "GRACE", 60.0)
    ended: list[bool] = []
    leave, join = AgentHandle.leave, AgentHandle.join

    def break_and_leave(agent: AgentHandle) -> None:
        with agent._lock:  # the agent must not reconnect before the run has ended
            assert cut() == 1
            wait_until(lambda: not agent.link.state()["connected"])
            agent._closed = True
        leave(agent)

    def join_ended(agent: AgentHandle) -> None:
        ended.append(agent._has_ended())
        join(agent)

    monkeypatch.setattr(AgentHandle, "leave", break_and_leave)
    monkeypatch.setattr(AgentHandle, "join", join_ended)
    graph = Graph("leaving")
    result = graph.source(range(5)).map(abs, on=local(1)).collect()
    assert graph.run()[result] == [0, 1, 2, 3, 4]
    assert ended == [True]

"""Test runs whose connections keep breaking, and agents that misbehave (R5)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hosted import agents, wait_ended, workers_of
from support.network_proxy import Wire, wired
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Graph, RunError
from flowchan.hosts import local
from flowchan.hosts.agent_handle import AgentHandle
from flowchan.hosts.agent_messages import Command
from flowchan.hosts.agent_reports import AgentReports
from flowchan.hosts.worker_ports import MAX_UNCONNECTED
from flowchan.run.policy.actions import Terminate
from flowchan.run.policy.events import Began, WorkerId

pytestmark = pytest.mark.usefixtures("no_agent_stays")


def doubled(item: bytes) -> bytes:
    return item + item


def test_large_item_arrives_over_several_short_connections() -> None:
    wire = Wire(limit=1_000_000)
    given = [bytes([number]) * 2_500_000 for number in range(3)]
    with wired(1, wire) as pool:
        graph = Graph("limited")
        result = graph.source(given).map(doubled, on=pool).collect()
        assert graph.run()[result] == [item + item for item in given]
    # 7.5 MB of items and 15 MB of outputs; each connection breaks after 1 MB in one of the two directions
    assert 15 <= wire.connections <= 40


@pytest.mark.parametrize("to_the_host", [True, False], ids=["inputs", "outputs"])
def test_run_abandons_host_that_loses_connections_before_an_item(
    to_the_host: bool, caplog: pytest.LogCaptureFixture
) -> None:
    size = 60_000
    wire = Wire(limit=30_000)
    with wired(1, wire, peer_timeout=1.0) as pool, caplog.at_level(logging.WARNING, "flowchan.hosts"):
        graph = Graph("stuck")
        if to_the_host:
            graph.source([bytes(size)]).map(len, on=pool).collect()
        else:
            graph.source([size]).map(bytes, on=pool).collect()
        with pytest.raises(RunError) as failed:
            graph.run()
    text = str(failed.value) + "".join(str(error) for error in failed.value.exceptions)
    assert "its connections broke for" in text
    assert "before any item arrived" in text
    logged = [record for record in caplog.records if "broke before any item arrived" in record.message]
    assert len(logged) == MAX_UNCONNECTED  # one message for each agent
    # the pauses double, so an agent connects about ten times in its peer timeout
    assert wire.connections < 30 * MAX_UNCONNECTED


def test_abort_ends_a_run_with_stuck_connections() -> None:
    wire = Wire(limit=30_000)
    with wired(1, wire) as pool:
        graph = Graph("stuck")
        graph.source([bytes(60_000)]).map(len, on=pool).collect()
        run = graph.start()
        wait_until(lambda: wire.connections > 5)
        run.abort()
        run.wait()
        assert run.stats().state == "aborted"
    assert not agents()


def test_abort_ends_a_run_if_the_agent_ignores_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an agent does not kill its workers after an abort, the driver kills the agent (R5)."""
    hint = AgentHandle.hint

    def hint_without_ends(agent: AgentHandle, command: Command) -> None:
        if not isinstance(command, Terminate):
            hint(agent, command)

    monkeypatch.setattr(AgentHandle, "hint", hint_without_ends)
    gate = Gate()
    graph = Graph("deaf")
    graph.source([1]).map(gate.wait, on=local(1, peer_timeout=1.0)).collect()
    run = graph.start()
    gate.wait_held(1)
    processes = [one for agent in agents() for one in (agent, *workers_of(agent))]
    run.abort()
    run.wait()
    wait_ended(*processes)
    (host,) = run.stats().hosts
    assert any("it did not kill a worker within" in why for why in host.deaths)


def fail_to_unpickle() -> None:
    raise ValueError("this report can't be unpickled")


class Unreadable:
    def __reduce__(self) -> Any:
        return fail_to_unpickle, ()


@pytest.mark.parametrize(
    "report",
    [Began(WorkerId("nowhere", 7)), "no report", Unreadable()],
    ids=["unknown worker", "not a report", "unreadable"],
)
def test_invalid_report_ends_the_agent_and_not_the_run(
    report: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    received, handles = AgentReports.receive, []

    def receive(reports: AgentReports, agent: AgentHandle, message: Any) -> None:
        if not handles:
            handles.append(agent)
            agent._reports_writer.put(report)
        received(reports, agent, message)

    monkeypatch.setattr(AgentReports, "receive", receive)
    graph = Graph("invalid")
    result = graph.source(range(5)).map(abs, on=local(1)).collect()
    run = graph.start()
    assert run.wait()[result] == [0, 1, 2, 3, 4]
    # on a busy machine, the agent may finish all items before it is ended, and is then not replaced
    assert "it sent " in handles[0].why


def test_end_of_a_run_kills_a_stopped_agent_and_workers() -> None:
    gate = Gate()
    graph = Graph("paused")
    graph.source([1]).map(gate.wait, on=local(1)).collect()
    run = graph.start()
    gate.wait_held(1)
    (agent,) = agents()
    workers = workers_of(agent)
    for process in (*workers, agent):
        process.suspend()
    run.abort()
    run.wait()
    wait_ended(agent, *workers)

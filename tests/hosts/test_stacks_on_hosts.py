"""Test ``run.stacks`` for workers on hosts, including hosts that do not answer."""

from __future__ import annotations

from typing import Any

import pytest
from hosted import agents
from support.waiting import wait_until

from flowchan import Channel, Graph, Run, hosts
from flowchan.hosts import stack_requests


def take(go_on: Channel[int]) -> int:
    return go_on.get()


def started(workers: int) -> tuple[Run, Any, Channel[int]]:
    """Start a run with one worker per host, each of which waits for an item from the channel."""
    go_on: Channel[int] = Channel(workers, across="hosts")
    graph = Graph("hosted")
    items = graph.source([go_on] * workers)
    out = items.map(take, on=hosts.local(workers), workers=workers, name="work").collect()
    run = graph.start()
    wait_until(
        lambda: sum("in take" in text for text in run.stacks("work").values()) == workers, what=run.stacks
    )
    return run, out, go_on


def test_stacks_of_workers_on_two_hosts_show_source_lines() -> None:
    run, out, go_on = started(2)
    found = run.stacks("work")
    assert list(found) == ["work 1", "work 2"]
    assert all("    return go_on.get()" in text for text in found.values())
    go_on.put_many([1, 2])
    assert sorted(run.wait()[out]) == [1, 2]
    assert run.stacks() == {}


def test_unresponsive_host_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    run, out, go_on = started(2)
    silent = agents()[0]
    monkeypatch.setattr(stack_requests, "ANSWER_WITHIN_S", 0.5)
    silent.suspend()
    found = run.stacks("work")
    silent.resume()
    # either worker may run on the suspended host
    no_answer, stack = sorted(found.values(), key=lambda text: "in take" in text)
    assert no_answer == "no stack: host 'local-1' did not answer within 0.5 s\n"
    assert "in take" in stack
    go_on.put_many([1, 2])
    assert sorted(run.wait()[out]) == [1, 2]


def test_stacks_omit_workers_on_dead_host(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        host, why = "away", "killed"

        def hint(self, command: Any) -> None:
            asked.append(command)

    asked: list[Any] = []
    dead: Any = Dead()
    requests = stack_requests.StackRequests()
    id = stack_requests.WorkerId("work", 1)
    assert requests.ask({id: dead}) == {}
    (command,) = asked
    assert command.workers == (id,)
    requests.receive(stack_requests.WrittenStack(command.number, id, "too late"))
    assert requests.ask({id: dead}) == {}

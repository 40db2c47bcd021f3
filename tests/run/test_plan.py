"""Test plans: a plan describes a run before anything is opened, and each machine opens its part of it."""

from __future__ import annotations

import os
from typing import Any

from support.waiting import wait_until

from flowchan import Graph
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.plan import Plan, plan
from flowchan.run.worker.opening import open_plan, open_ports

SOURCE, WORK, SINK = (WorkerId(name, 1) for name in ("source", "work", "sink"))


def same(item: Any) -> Any:
    return item


def planned() -> Plan:
    graph = Graph("planned")
    graph.source(range(3)).map(same, on="process", workers=2, name="work").sink(same, name="sink")
    return plan(graph, seed=1, memory=1 << 20)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_planning_does_not_open_channels() -> None:
    before = descriptors()
    made = planned()
    assert descriptors() == before
    assert {worker.id for worker in made.workers} == {SOURCE, WORK, WorkerId("work", 2), SINK}


def test_plan_maps_ports_to_channels() -> None:
    source, work, _, sink = planned().workers
    assert (source.inputs, source.outputs) == ({}, {"out": "source"})
    assert (work.inputs, work.outputs) == ({"items": "source"}, {"out": "work"})
    assert (sink.inputs, sink.outputs) == ({"items": "work"}, {})


def test_plan_includes_the_channel_of_an_input() -> None:
    graph = Graph("planned")
    graph.input(name="mine").sink(same, name="sink")
    made = plan(graph, seed=1, memory=1 << 20)
    assert made.inputs == {"mine": ("mine",)}
    assert [worker.id.stage for worker in made.workers] == ["sink"]
    opened = open_plan(made, made.workers)
    opened.inputs["mine"].put(1)
    assert opened.ports[SINK].inputs["items"].get() == 1


def test_only_ports_of_workers_on_this_machine_are_opened() -> None:
    """Another machine opens the ports of the other workers. Only the local workers are writers here."""
    made = planned()
    here = [worker for worker in made.workers if worker.stage.name != "sink"]
    opened = open_plan(made, here)
    assert set(opened.ports) == {worker.id for worker in here}
    for id in (WORK, WorkerId("work", 2)):
        opened.ports[id].outputs["out"].close()
    wait_until(lambda: opened.channels["work"].closed)
    assert not opened.channels["source"].closed


def test_ports_of_a_replacement_keep_a_channel_open() -> None:
    made = planned()
    opened = open_plan(made, made.workers)
    (source,) = (worker for worker in made.workers if worker.id == SOURCE)
    again = open_ports(source, opened.channels)
    opened.ports[SOURCE].outputs["out"].close()
    assert not opened.channels["source"].closed
    again.outputs["out"].close()
    assert opened.channels["source"].closed

"""Test that declared stages and placements are values, which can be pickled."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import threading
from typing import Any

import cloudpickle
import pytest

from flowchan import Graph
from flowchan.channel.transports import PROCESSES, THREADS
from flowchan.declare.placements import PLACEMENTS, PROCESS, THREAD, Placement
from flowchan.declare.values import Origin


def test_every_stage_can_be_pickled() -> None:
    graph = Graph("sent")
    numbers = graph.source(range(3), name="numbers")
    left, _ = numbers.map(lambda number: -number, name="negative", on="process", workers=2).tee(2)
    left.batch(2, timeout=1.5).reduce(lambda so_far, batch: so_far + sum(batch), 0)
    for stage in graph.stages:
        sent = pickle.loads(cloudpickle.dumps(stage))
        assert (sent.name, sent.operator, sent.inputs, sent.placement, sent.workers, dict(sent.options)) == (
            (stage.name, stage.operator, stage.inputs, stage.placement, stage.workers, dict(stage.options))
        )
    assert graph.stage_named("negative").inputs == (Origin("numbers", "out"),)


def test_stage_with_unpicklable_item_type_can_be_pickled() -> None:
    class Unsendable:
        lock = threading.Lock()

    def made() -> Any:
        return []

    made.__annotations__["return"] = list[Unsendable]
    graph = Graph("annotated")
    items = graph.source(made, name="made")
    items.partition(id, 2, on="process", name="spread")
    assert graph.stage_named("spread").outputs[0].item is Unsendable
    assert pickle.loads(cloudpickle.dumps(graph.stage_named("spread"))).outputs[0].item is None


@pytest.mark.parametrize(
    ("one", "other", "transport"),
    [
        (THREAD, THREAD, THREADS),
        (THREAD, PROCESS, PROCESSES),
        (PROCESS, THREAD, PROCESSES),
        (PROCESS, PROCESS, PROCESSES),
    ],
)
def test_transport_of_an_edge_depends_on_both_placements(
    one: Placement, other: Placement, transport: Any
) -> None:
    assert one.transport_to(other) is transport


def test_only_process_and_hosts_placements_use_separate_processes() -> None:
    assert [place.name for place in PLACEMENTS.values() if place.own_process] == ["process", "hosts"]


@pytest.mark.parametrize(
    "module", ["annotations", "auto_workers", "keyed", "operators", "options", "placements", "values"]
)
def test_value_of_a_declared_graph_cannot_be_changed(module: str) -> None:
    """Several runs may share a graph, and each run sends its stages to other processes."""
    found = vars(importlib.import_module(f"flowchan.declare.{module}")).values()
    kinds = [one for one in found if isinstance(one, type) and dataclasses.is_dataclass(one)]
    assert kinds
    for kind in kinds:
        value = object.__new__(kind)
        for field in dataclasses.fields(kind):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field.name, None)

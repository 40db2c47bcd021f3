"""Test that declared stages and placements are values that can be pickled."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import threading
from typing import Any

import cloudpickle
import pytest

from flowchan import Graph, In, auto
from flowchan.channel.transports import PROCESSES, THREADS
from flowchan.collective import Group
from flowchan.declare.placements import PLACEMENTS, PROCESS, THREAD, Placement
from flowchan.declare.values import Gang, Origin


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


def training(items: In[int], group: Group) -> None: ...


@pytest.mark.parametrize("elastic", [False, True])
def test_stage_with_a_group_parameter_is_a_gang(elastic: bool) -> None:
    graph = Graph("gang")
    graph.stage(training, graph.source(range(3)), workers=2, elastic=elastic, name="train")
    graph.source(range(3)).sink(abs, name="plain")
    assert graph.stage_named("train").gang == Gang("group", Group, elastic)
    assert graph.stage_named("plain").gang is None


@pytest.mark.parametrize(("value", "most"), [("auto", None), (auto(), None), (auto(most=4), 4)])
def test_stage_with_automatic_workers_starts_with_one(value: Any, most: int | None) -> None:
    graph = Graph("auto")
    graph.source(range(3)).sink(abs, workers=value, name="auto")
    stage = graph.stage_named("auto")
    assert stage.workers == 1
    assert stage.auto is not None
    assert stage.auto.most == most


def test_only_outputs_for_a_batch_may_be_made_by_member() -> None:
    graph = Graph("members")
    first, second, third = graph.source(range(3)).tee(3)
    first.batch(2).map(len, name="map")
    second.batch(2).sink(len, name="sink")
    third.map(abs, name="single")
    members = [graph.stage_named(name).options.get("members") for name in ("map", "sink", "single")]
    assert members == [True, None, None]

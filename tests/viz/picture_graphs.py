"""Graphs for the picture tests, built by hand from declared values.

The picture tests therefore do not depend on operators.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from flowchan.channel.transports import TRANSPORTS, Across
from flowchan.declare.blueprint import Blueprint
from flowchan.declare.operators import OPERATORS
from flowchan.declare.placements import PLACEMENTS, Placement
from flowchan.declare.values import Edge, Stage
from flowchan.errors import Where

HERE = Where(__file__, 1)


@dataclass(frozen=True)
class Declared:
    """Attributes of a graph that a picture may read."""

    name: str
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    _drawn: dict[str, str | None] = field(default_factory=dict)


def declared(name: str, stages: list[Stage], edges: list[Edge]) -> Blueprint:
    return cast(Blueprint, Declared(name, tuple(stages), tuple(edges)))


def explode(*_: object) -> None:
    raise AssertionError("a picture called a function of the graph")


def stage(
    name: str, kind: str = "map", on: Placement = "thread", workers: int = 1, function: Any = explode
) -> Stage:
    return Stage(name, OPERATORS[kind], HERE, function=function, placement=PLACEMENTS[on], workers=workers)


def edge(
    writer: str, reader: str | None, item: Any = None, transport: Across = "threads", errors: bool = False
) -> Edge:
    name = f"{writer}.errors" if errors else writer
    port = None if reader is None else "items"
    return Edge(name, writer, "out", reader, port, item, 64, TRANSPORTS[transport], errors, HERE)


def wordcount() -> Blueprint:
    stages = [
        stage("files", "source"),
        stage("counts", on="process", workers=2),
        stage("total", "reduce"),
        stage("report", "sink"),
        stage("save", "sink"),
    ]
    edges = [
        edge("files", "counts", Path, "processes"),
        edge("counts", "total", dict[str, int], "processes"),
        edge("counts", "report", None, "processes", errors=True),
        edge("total", None, dict[str, int]),
        edge("total", "save"),
    ]
    return declared("wordcount", stages, edges)


def leading_back() -> Blueprint:
    """Return a loop of two stages: ``worker`` returns each item that it has received from ``steer``."""
    stages = [
        stage("numbers", "source"),
        stage("steer", "stage"),
        stage("worker", on="process"),
        stage("save", "sink"),
    ]
    back = replace(edge("worker", "steer", int, "processes"), feedback=True)
    edges = [edge("numbers", "steer"), edge("steer", "worker", int, "processes"), edge("steer", "save"), back]
    return declared("leading back", stages, edges)


def chain(length: int, every_process: int) -> Blueprint:
    """Return a chain of ``length`` stages; every ``every_process``-th stage runs in a process."""
    stages = [stage(f"s{i}", on="thread" if i % every_process else "process") for i in range(length)]
    edges = [
        edge(a.name, b.name, int, a.placement.transport_to(b.placement).name)
        for a, b in itertools.pairwise(stages)
    ]
    return declared("chain", stages, edges)

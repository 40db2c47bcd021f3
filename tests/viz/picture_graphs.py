"""Graphs for the tests of pictures, made of declared values by hand, so that pictures are tested apart from
verbs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from flowchan.channel.media import MEDIA, Across
from flowchan.declare.blueprint import Blueprint
from flowchan.declare.places import PLACES, Placement
from flowchan.declare.values import Link, Stage
from flowchan.declare.verbs import VERBS
from flowchan.errors import Where

HERE = Where(__file__, 1)


@dataclass(frozen=True)
class Declared:
    """All that a picture may read of a graph."""

    name: str
    stages: tuple[Stage, ...]
    links: tuple[Link, ...]
    _drawn: dict[str, str | None] = field(default_factory=dict)


def declared(name: str, stages: list[Stage], links: list[Link]) -> Blueprint:
    return cast(Blueprint, Declared(name, tuple(stages), tuple(links)))


def explode(*_: object) -> None:
    raise AssertionError("a picture called a function of the graph")


def stage(
    name: str, kind: str = "map", on: Placement = "thread", workers: int = 1, function: Any = explode
) -> Stage:
    return Stage(name, VERBS[kind], HERE, function=function, place=PLACES[on], workers=workers)


def link(
    writer: str, reader: str | None, item: Any = None, medium: Across = "threads", errors: bool = False
) -> Link:
    name = f"{writer}.errors" if errors else writer
    port = None if reader is None else "items"
    return Link(name, writer, "out", reader, port, item, 64, MEDIA[medium], errors, HERE)


def wordcount() -> Blueprint:
    stages = [
        stage("files", "source"),
        stage("counts", on="process", workers=2),
        stage("total", "reduce"),
        stage("report", "sink"),
        stage("save", "sink"),
    ]
    links = [
        link("files", "counts", Path, "processes"),
        link("counts", "total", dict[str, int], "processes"),
        link("counts", "report", None, "processes", errors=True),
        link("total", None, dict[str, int]),
        link("total", "save"),
    ]
    return declared("wordcount", stages, links)


def leading_back() -> Blueprint:
    """A loop of two stages: ``worker`` gives back what ``steer`` sent it."""
    stages = [
        stage("numbers", "source"),
        stage("steer", "stage"),
        stage("worker", on="process"),
        stage("save", "sink"),
    ]
    back = replace(link("worker", "steer", int, "processes"), feedback=True)
    links = [link("numbers", "steer"), link("steer", "worker", int, "processes"), link("steer", "save"), back]
    return declared("leading back", stages, links)


def chain(length: int, every_process: int) -> Blueprint:
    """``length`` stages in a row, each ``every_process``-th of them a process."""
    stages = [stage(f"s{i}", on="thread" if i % every_process else "process") for i in range(length)]
    links = [
        link(a.name, b.name, int, a.place.medium_to(b.place).name) for a, b in itertools.pairwise(stages)
    ]
    return declared("chain", stages, links)

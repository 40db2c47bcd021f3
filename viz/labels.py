"""What the pictures say and how they group it, for every picture format: words, places, roles, pools."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flowchan.declare.annotations import type_name
from flowchan.declare.callables import bare
from flowchan.declare.places import Place
from flowchan.declare.values import Link, Stage

if TYPE_CHECKING:
    from flowchan.declare.blueprint import Blueprint

Role = Literal["source", "stage", "sink", "errors", "result", "unread"]

MEANING: Mapping[Role, str] = {
    "source": "source",
    "stage": "stage",
    "sink": "sink",
    "errors": "takes failed items",
    "result": "result",
    "unread": "read by nobody",
}


@dataclass(frozen=True, slots=True)
class Pool:
    """Stages that are drawn in one box: all threads of the run's own process, or the processes of one
    stage."""

    title: str
    place: Place
    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A graph as a picture needs it. Stages are numbered in declaration order, because names need not be
    unique in a graph that is still wrong. ``arrows`` are (writer, reader, link), with the reader ``None``
    where the channel leaves the graph."""

    name: str
    stages: tuple[Stage, ...]
    roles: tuple[Role, ...]
    pools: tuple[Pool, ...]
    arrows: tuple[tuple[int, int | None, Link], ...]


def picture(blueprint: Blueprint) -> Picture:
    """Read a graph's frozen values into what is drawn. Runs nothing."""
    stages, links = tuple(blueprint.stages), tuple(blueprint.links)
    number: dict[str, int] = {}
    for index, stage in enumerate(stages):
        number.setdefault(stage.name, index)
    arrows = tuple(
        (number[link.writer], None if link.reader is None else number.get(link.reader), link)
        for link in links
        if link.writer in number and link.worker <= 1  # one arrow for the channels of all workers
    )
    error_readers = {reader for _, reader, link in arrows if link.errors and reader is not None}
    roles = tuple(_role(index, stage, error_readers) for index, stage in enumerate(stages))
    return Picture(blueprint.name, stages, roles, _pools(stages), arrows)


def _role(index: int, stage: Stage, error_readers: set[int]) -> Role:
    if index in error_readers:
        return "errors"
    return stage.verb.role


def _pools(stages: Sequence[Stage]) -> tuple[Pool, ...]:
    threads = tuple(index for index, stage in enumerate(stages) if not stage.place.apart)
    pools = [Pool("threads", stages[threads[0]].place, threads)] if threads else []
    for index, stage in enumerate(stages):
        if stage.place.apart:
            count = "1 process" if stage.workers == 1 else f"{stage.workers} processes"
            where = _hosts_text(stage.place)
            pools.append(Pool(f"{count} on {where}" if where else count, stage.place, (index,)))
    return tuple(pools)


def _hosts_text(place: Place) -> str:
    """Which hosts a place has; of many the first and the last."""
    if place.nowhere:
        return "hosts still to be given"
    if place.missing:
        return f"hosts of {place.name}"
    if not place.hosts:
        return ""
    hosts = ", ".join(place.hosts)
    if len(place.hosts) > 4:
        hosts = f"{place.hosts[0]} … {place.hosts[-1]}"
    return f"host {hosts}" if len(place.hosts) == 1 else f"{len(place.hosts)} hosts: {hosts}"


def looks(place: Place) -> str:
    """Which of the three looks of boxes a place has: threads, processes, or processes on hosts."""
    return "hosts" if place.is_far else "processes" if place.apart else "threads"


def end_role(stage: Stage) -> Role:
    """How the loose end of a channel that nobody in the graph reads is drawn."""
    return "result" if stage.verb.result else "unread"


def workers_text(stage: Stage) -> str:
    """``x4`` with a real multiplication sign, or nothing for a single worker."""
    return f"\N{MULTIPLICATION SIGN}{stage.workers}" if stage.workers > 1 else ""


def channel_text(link: Link) -> tuple[str, str]:
    """The two lines beside a channel: its item type (may be empty), and its capacity and medium."""
    each = " · each worker" if link.worker else ""
    return type_text(link.item), f"{link.capacity} · {link.medium}{each}"


def type_text(item: Any) -> str:
    """An item type in the words of its annotation; empty when it is not known."""
    return "" if item is None or item is Any else type_name(item)


def detail_text(stage: Stage) -> str:
    """The verb, unless it is the name too, and the place of the function."""
    kind = "" if stage.kind == stage.name else f"{stage.kind} · "
    return kind + place_text(stage)


def place_text(stage: Stage) -> str:
    """Where the stage's function begins, as ``file:line``; where the stage was declared if the function is
    not written in Python or there is none."""
    file, line = place(stage)
    return f"{_short(file)}:{line}"


def place(stage: Stage) -> tuple[str, int]:
    """Like :func:`place_text`, with the whole path."""
    code = _code(stage.function)
    if code is None or code.co_filename.startswith("<"):
        return stage.where.file, stage.where.line
    return code.co_filename, code.co_firstlineno


def _code(function: Any) -> types.CodeType | None:
    function = bare(function)
    if inspect.isclass(function):
        function = vars(function).get("__init__") or getattr(function, "__call__", None)  # noqa: B004
    elif not inspect.isroutine(function):
        function = getattr(type(function), "__call__", None)  # noqa: B004
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def relative(file: str) -> str:
    """The path from the working directory if the file lies below it, else the path as it is."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _short(file: str) -> str:
    """Of a far place only the end, so that a box stays a box."""
    path = Path(relative(file))
    return f"…/{'/'.join(path.parts[-2:])}" if path.is_absolute() and len(path.parts) > 4 else str(path)

"""What the pictures say and where they put it, for every picture format: words, roles, places, rows.

Only what is not the default is said: of a channel its item type, and a capacity that is not the usual one;
of a stage how many items it takes, whether it tries again, keeps the order, and on which hosts it runs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sysconfig
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flowchan.declare.annotations import type_name
from flowchan.declare.callables import bare, is_async
from flowchan.declare.placements import Placement
from flowchan.declare.values import DEFAULT_CAPACITY, Edge, Stage
from flowchan.errors import Where

if TYPE_CHECKING:
    from flowchan.declare.blueprint import Blueprint

Role = Literal["source", "stage", "sink", "errors", "result", "unread"]
Ground = Literal["threads", "processes", "hosts"]

MEANING: Mapping[Role, str] = {
    "source": "source",
    "stage": "stage",
    "sink": "sink",
    "errors": "takes failed items",
    "result": "result",
    "unread": "read by nobody",
}

PER_ROW = 6
"""So many stages one behind the other fit the width of a page."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A graph as a picture needs it. Stages are numbered in declaration order, because names need not be
    unique in a graph that is still wrong. ``arrows`` are (writer, reader, edge), with the reader ``None``
    where the channel leaves the graph. ``rows`` has the row of each stage, from the top. ``said`` is what a
    graph says of a stage itself, in place of its operator and line."""

    name: str
    stages: tuple[Stage, ...]
    roles: tuple[Role, ...]
    arrows: tuple[tuple[int, int | None, Edge], ...]
    rows: tuple[int, ...]
    said: Mapping[str, str]

    @property
    def grounds(self) -> set[Ground]:
        """Which kinds of places there are."""
        return {ground(stage.placement) for stage in self.stages}


def picture(blueprint: Blueprint) -> Picture:
    """Read a graph's frozen values into what is drawn. Runs nothing."""
    drawn = blueprint._drawn
    stages = tuple(stage for stage in blueprint.stages if drawn.get(stage.name, "") is not None)
    number: dict[str, int] = {}
    for index, stage in enumerate(stages):
        number.setdefault(stage.name, index)
    arrows = tuple(
        (number[edge.writer], None if edge.reader is None else number.get(edge.reader), edge)
        for edge in blueprint.edges
        if edge.writer in number
        and max(edge.worker, edge.to_worker) <= 1  # one arrow for the channels of all workers
        and drawn.get(edge.reader or "", "") is not None
    )
    error_readers = {reader for _, reader, edge in arrows if edge.errors and reader is not None}
    roles = tuple(_role(index, stage, error_readers) for index, stage in enumerate(stages))
    said = {name: text for name, text in drawn.items() if text}
    return Picture(blueprint.name, stages, roles, arrows, _rows(stages, arrows), said)


def _role(index: int, stage: Stage, error_readers: set[int]) -> Role:
    if index in error_readers:
        return "errors"
    return stage.operator.role


def _rows(stages: Sequence[Stage], arrows: Sequence[tuple[int, int | None, Edge]]) -> tuple[int, ...]:
    """The row of each stage: as a text into lines, a long graph is broken into rows of one length."""
    depth = [0] * len(stages)
    for writer, reader, edge in sorted(arrows, key=lambda arrow: arrow[0]):
        if reader is not None and reader > writer and not edge.feedback:
            depth[reader] = max(depth[reader], depth[writer] + 1)
    length = max(depth, default=0) + 1
    rows = -(-length // PER_ROW)
    each = -(-length // rows)
    return tuple(place // each for place in depth)


def hosts_text(placement: Placement) -> str:
    """Which hosts a place has; of many the first and the last."""
    if placement.nowhere:
        return "hosts still to be given"
    if placement.missing:
        return f"hosts of {placement.name}"
    if not placement.hosts:
        return ""
    hosts = ", ".join(placement.hosts)
    if len(placement.hosts) > 4:
        hosts = f"{placement.hosts[0]} … {placement.hosts[-1]}"
    return f"host {hosts}" if len(placement.hosts) == 1 else f"{len(placement.hosts)} hosts: {hosts}"


def ground(placement: Placement) -> Ground:
    """Which of the three colours a place has: threads, processes, or processes on hosts."""
    return "hosts" if placement.is_remote else "processes" if placement.apart else "threads"


def end_role(stage: Stage) -> Role:
    """How the loose end of a channel that nobody in the graph reads is drawn."""
    return "result" if stage.operator.result else "unread"


def workers_text(stage: Stage) -> str:
    """``x4`` with a real multiplication sign, or nothing for a single worker."""
    return f"\N{MULTIPLICATION SIGN}{stage.workers}" if stage.workers > 1 else ""


def channel_text(edge: Edge, said: Mapping[str, str]) -> tuple[str, str]:
    """The two lines beside a channel, each of which may be empty: its item type, and what else is unusual.
    Where the graph says itself what a stage is, both: what such stages pass on is their own."""
    if edge.writer in said or edge.reader in said:
        return "", ""
    unusual = [f"capacity {edge.capacity:,}"] if edge.capacity != DEFAULT_CAPACITY else []
    unusual += ["one for each worker"] if edge.worker else []
    unusual += ["to the worker named"] if edge.to_worker else []
    return type_text(edge.item), " · ".join(unusual)


def channel_tooltip(edge: Edge) -> str:
    """Everything of a channel, for whoever points at it."""
    return f"{edge.name}: capacity {edge.capacity:,}, {edge.transport}"


def type_text(item: Any) -> str:
    """An item type in the words of its annotation; empty when it is not known."""
    return "" if item is None or item is Any else type_name(item)


def option_text(stage: Stage) -> str:
    """What its declaration says beyond operator and function, where it is not the default."""
    return " · ".join(_options(stage))


def _options(stage: Stage) -> Iterator[str]:
    if stage.operator.says is not None:
        yield stage.operator.says(stage.options)
    if stage.function is not None and is_async(stage.function):
        yield "async"
    if stage.workers > 1 and stage.operator.ordered and not stage.ordered:
        yield "unordered"
    if stage.retries:
        yield "1 retry" if stage.retries == 1 else f"{stage.retries} retries"
    if stage.timeout is not None:
        yield f"{stage.timeout:g} s each"
    if stage.gpus:
        yield f"{stage.gpus} GPU{'s' * (stage.gpus > 1)} each"
    if where := hosts_text(stage.placement):
        yield where


def detail_text(stage: Stage, said: Mapping[str, str]) -> str:
    """The operator, unless it is the name too, and the place of the function; or what the graph says
    itself."""
    if stage.name in said:
        return said[stage.name]
    kind = "" if stage.kind == stage.name else f"{stage.kind} · "
    return kind + place_text(stage)


def result_name(stage: Stage) -> str:
    """What the program calls the result of a stage: the variable that it is assigned to, else the
    name of the stage."""
    return _assigned(stage.where) or stage.name


@functools.lru_cache
def _statements(file: str) -> tuple[ast.Assign, ...]:
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Assign))


def _assigned(where: Where) -> str:
    for statement in _statements(where.file):
        if statement.lineno <= where.line <= (statement.end_lineno or statement.lineno):
            target, value = statement.targets[0], statement.value
            if isinstance(target, ast.Name) and isinstance(value, ast.Call):
                return target.id
    return ""


def place_text(stage: Stage) -> str:
    """Where the function begins, as ``file:line``; where the stage was declared if the function is not
    the user's own."""
    file, line = place(stage)
    return f"{_short(file)}:{line}"


def place(stage: Stage) -> tuple[str, int]:
    """Like :func:`place_text`, with the whole path."""
    code = _code(stage.function)
    if code is None or code.co_filename.startswith(_NOT_THE_USERS):
        return stage.where.file, stage.where.line
    return code.co_filename, code.co_firstlineno


_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_THE_USERS = ("<", *(f"{folder}/" for folder in _LIBRARIES))
"""How the files of functions begin that nobody looks for here."""


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
    """Of a place elsewhere only the file's name, so that a box stays a box."""
    path = Path(relative(file))
    return path.name if path.is_absolute() else str(path)

"""Choose the texts, roles, colours and positions in a graph's picture, for all picture formats.

A picture shows only settings that differ from their defaults. A channel's label may show the item type and
the capacity. A stage's label may show its number of items, retries, order and hosts.
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
from flowchan.viz.text_widths import width_of
from flowchan.viz.wrapping import columns_that_fit, wrapped

if TYPE_CHECKING:
    from flowchan.declare.blueprint import Blueprint

Role = Literal["source", "stage", "sink", "errors", "server", "result", "unread"]
Ground = Literal["threads", "processes", "hosts"]

MEANING: Mapping[Role, str] = {
    "source": "source",
    "stage": "stage",
    "sink": "sink",
    "errors": "takes failed items",
    "server": "parameter server",
    "result": "result",
    "unread": "not read",
}


def encodable(text: str) -> str:
    """Replace lone surrogates, which a name may contain but a picture cannot show."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


ARROW = 55.0
"""Width of an arrow between two stages plus the padding around their texts, in points."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Content of a graph's picture: its stages, arrows, texts and positions.

    Stages are numbered in declaration order, because names may not be unique in an invalid graph.

    Attributes:
        name: Name of the graph.
        stages: Stages that are drawn.
        roles: Role of each stage.
        arrows: Triples (writer, reader, edge); the reader is ``None`` if the channel leaves the graph.
        places: Row and column of each stage, counted from the top left.
        captions: Labels that the graph sets for stages; they replace the operator and the source line.
    """

    name: str
    stages: tuple[Stage, ...]
    roles: tuple[Role, ...]
    arrows: tuple[tuple[int, int | None, Edge], ...]
    places: tuple[tuple[int, int], ...]
    captions: Mapping[str, str]

    @property
    def wraps(self) -> bool:
        """Return whether the picture has more than one row."""
        return any(row for row, _ in self.places)

    @property
    def grounds(self) -> set[Ground]:
        """Kinds of placements that occur in the picture."""
        return {ground(stage.placement) for stage in self.stages}


def picture(blueprint: Blueprint) -> Picture:
    """Return the content of a graph's picture, without running anything."""
    drawn = blueprint._drawn
    stages = tuple(stage for stage in blueprint.stages if drawn.get(stage.name, "") is not None)
    number: dict[str, int] = {}
    for index, stage in enumerate(stages):
        number.setdefault(stage.name, index)
    arrows = tuple(
        (number[edge.writer], None if edge.reader is None else number.get(edge.reader), edge)
        for edge in blueprint.edges
        if edge.writer in number
        and max(edge.worker, edge.to_worker) <= 1  # one arrow represents the channels of all workers
        and drawn.get(edge.reader or "", "") is not None
    )
    error_readers = {reader for _, reader, edge in arrows if edge.errors and reader is not None}
    roles = tuple(_role(index, stage, error_readers) for index, stage in enumerate(stages))
    captions = {name: text for name, text in drawn.items() if text}
    return Picture(blueprint.name, stages, roles, arrows, _places(stages, arrows, captions), captions)


def _role(index: int, stage: Stage, error_readers: set[int]) -> Role:
    if index in error_readers:
        return "errors"
    return "server" if stage.service else stage.operator.role


def _places(
    stages: Sequence[Stage], arrows: Sequence[tuple[int, int | None, Edge]], captions: Mapping[str, str]
) -> tuple[tuple[int, int], ...]:
    joined = [(writer, reader) for writer, reader, edge in arrows if reader is not None and not edge.feedback]
    widest = max((_width(stage, captions) for stage in stages), default=1.0)
    return wrapped(len(stages), joined, columns_that_fit(widest + ARROW))


def _width(stage: Stage, captions: Mapping[str, str]) -> float:
    """Return the width of a stage's text in points."""
    details = detail_text(stage, captions).splitlines()
    return max(
        text_width(f"{stage.name} {workers_text(stage)}", 12.0, bold=True),
        text_width(option_text(stage), 10.0),
        *(text_width(line, 9.0) for line in details),
    )


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Return the width of a text in points, or an estimate if the text has unusual characters."""
    width = width_of(text, size, bold=bold)
    return 0.6 * size * len(text) if width is None else width


def hosts_text(placement: Placement) -> str:
    """Return the hosts of a placement. If there are more than four, return only the first and the last."""
    if placement.nowhere:
        return "hosts not given yet"
    if placement.missing:
        return f"hosts of {placement.name}"
    if not placement.hosts:
        return ""
    hosts = ", ".join(placement.hosts)
    if len(placement.hosts) > 4:
        hosts = f"{placement.hosts[0]} … {placement.hosts[-1]}"
    return f"host {hosts}" if len(placement.hosts) == 1 else f"{len(placement.hosts)} hosts: {hosts}"


def ground(placement: Placement) -> Ground:
    """Return the colour group of a placement: threads, processes, or processes on other hosts."""
    return "hosts" if placement.is_remote else "processes" if placement.own_process else "threads"


def end_role(stage: Stage) -> Role:
    """Return the role of the open end of a channel that has no reading stage."""
    return "result" if stage.operator.result else "unread"


def workers_text(stage: Stage) -> str:
    """Return the number of workers as ``x4`` with a multiplication sign; empty for a single worker.

    If the run chooses the number, return ``auto``, followed by the limit if the user has set one.
    """
    if stage.auto is not None:
        return "auto" if stage.auto.most is None else f"auto \N{LESS-THAN OR EQUAL TO} {stage.auto.most}"
    return f"\N{MULTIPLICATION SIGN}{stage.workers}" if stage.workers > 1 else ""


def channel_text(edge: Edge, captions: Mapping[str, str]) -> tuple[str, str]:
    """Return the two lines of a channel's label: its item type and its unusual settings.

    Either line may be empty. If the graph sets the label of a stage, both lines are empty for the stage's
    channels, because their items are internal.
    """
    if edge.writer in captions or edge.reader in captions:
        return "", ""
    unusual = [f"capacity {edge.capacity:,}"] if edge.capacity != DEFAULT_CAPACITY else []
    unusual += ["one for each worker"] if edge.worker else []
    unusual += ["to the named worker"] if edge.to_worker else []
    return type_text(edge.item), " · ".join(unusual)


def channel_tooltip(edge: Edge) -> str:
    """Return all settings of a channel, for its tooltip."""
    return f"{edge.name}: capacity {edge.capacity:,}, {edge.transport}"


def type_text(item: Any) -> str:
    """Return an item type as written in its annotation, or an empty string if the type is unknown."""
    return "" if item is None or item is Any else type_name(item)


def option_text(stage: Stage) -> str:
    """Return the options of a stage that differ from their defaults."""
    return " · ".join(_options(stage))


def _options(stage: Stage) -> Iterator[str]:
    if stage.operator.describe is not None:
        yield stage.operator.describe(stage.options)
    if stage.function is not None and is_async(stage.function):
        yield "async"
    if stage.may_have_several_workers and stage.operator.ordered and not stage.ordered:
        yield "unordered"
    if stage.retries:
        yield "1 retry" if stage.retries == 1 else f"{stage.retries} retries"
    if stage.timeout is not None:
        yield f"{stage.timeout:g} s each"
    if stage.rate is not None:
        yield f"at most {stage.rate:g}/s"
    if stage.gpus:
        yield f"{stage.gpus:g} GPU{'s' * (stage.gpus > 1)} each"
    if where := hosts_text(stage.placement):
        yield where


def detail_text(stage: Stage, captions: Mapping[str, str]) -> str:
    """Return the label that the graph sets or else the operator and the function's source line.

    The operator is omitted if it is also the stage's name.
    """
    if stage.name in captions:
        return captions[stage.name]
    kind = "" if stage.kind == stage.name else f"{stage.kind} · "
    return kind + place_text(stage)


def result_name(stage: Stage) -> str:
    """Return the name of the variable that holds a stage's result, or the stage's name if there is none."""
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
    """Return the source line where the function begins, as ``file:line``.

    If the function is not from the user's code, return the line that declares the stage.
    """
    file, line = place(stage)
    return f"{_short(file)}:{line}"


def place(stage: Stage) -> tuple[str, int]:
    """Return the file and line that :func:`place_text` shows, but with the file's whole path."""
    code = _code(stage.function)
    if code is None or code.co_filename.startswith(_NOT_THE_USERS):
        return stage.where.file, stage.where.line
    return code.co_filename, code.co_firstlineno


_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_THE_USERS = ("<", *(f"{folder}/" for folder in _LIBRARIES))
"""Prefixes of the paths of functions that are not the user's."""


def _code(function: Any) -> types.CodeType | None:
    function = bare(function)
    if inspect.isclass(function):
        function = vars(function).get("__init__") or getattr(function, "__call__", None)  # noqa: B004
    elif not inspect.isroutine(function):
        function = getattr(type(function), "__call__", None)  # noqa: B004
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def relative(file: str) -> str:
    """Return the relative path of a file below the working directory, or the whole path of any other file."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _short(file: str) -> str:
    """Return the relative path of a file below the working directory, or only the name of any other file."""
    path = Path(relative(file))
    return path.name if path.is_absolute() else str(path)

"""The frozen values that a declared graph consists of. Nothing here runs, and nothing here changes.

A ``Blueprint`` is a list of :class:`Stage` values; :class:`Link` values are
derived from them and name every channel of the graph. The checks, the pictures and the supervisor all read
these.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from flowchan.declare.stream import Stream

Placement = Literal["thread", "process"]
Medium = Literal["threads", "processes"]

DEFAULT_CAPACITY = 64
DEFAULT_RESTARTS = 10
DEFAULT_MAX_DEATHS = 3


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the user's source text."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Output:
    """One output port of a stage, and what its channel shall be like.

    ``name`` is the channel's name, unique in the graph: the stage's name when it has one output, else
    ``stage.port``; ``stage.errors`` for the error stream. ``item`` is the annotated item type, ``None`` if
    unknown.
    """

    name: str
    port: str
    item: Any = None
    capacity: int = DEFAULT_CAPACITY


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A node of the graph. ``kind`` is the verb that declared it ("map", "source", …, "stage" for the general
    one); ``options`` holds what only that verb takes (``size`` of batch, ``n`` of take, …)."""

    name: str
    kind: str
    where: Where
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    inputs: tuple[Stream, ...] = ()
    input_ports: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    errors: Output | None = None
    on: Placement = "thread"
    workers: int = 1
    ordered: bool = True
    retries: int = 0
    restarts: int = DEFAULT_RESTARTS
    max_deaths: int = DEFAULT_MAX_DEATHS
    restartable: bool = False
    feedback: frozenset[str] = frozenset()
    """The input ports that read what a stage further on puts."""

    @property
    def begins(self) -> bool:
        """Whether the graph begins here: no stage before it gives it items."""
        return len(self.inputs) == len(self.feedback)


@dataclass(frozen=True, slots=True)
class Link:
    """A channel of the graph: which port writes it, which stage's port reads it (``reader`` is ``None`` for a
    result that leaves the graph, or when nobody reads it), and the medium that the placements of both ends
    ask for. ``feedback``: it leads back to a stage that its writer depends on."""

    name: str
    writer: str
    writer_port: str
    reader: str | None
    reader_port: str | None
    item: Any
    capacity: int
    medium: Medium
    errors: bool
    where: Where
    feedback: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a graph: ``rule`` is a short stable word ("cycle", "unread", "pickle", …).
    ``stage`` is empty where the graph as a whole is wrong."""

    rule: str
    stage: str
    where: Where
    message: str

    def __str__(self) -> str:
        subject = f"stage {self.stage!r}: " if self.stage else ""
        return f"{self.where}: {subject}{self.message}"


ASYNC_KINDS = frozenset({"source", "map", "filter", "flat_map", "sink", "stage"})
"""The verbs that take an ``async def`` function."""


def is_async(function: Any) -> bool:
    """Whether calling ``function`` gives something to await: an ``async def``, an async generator, a partial
    or an instance or class whose ``__call__`` is one."""
    while isinstance(function, functools.partial):
        function = function.func
    if is_callable_class(function) or not (inspect.isroutine(function) or inspect.isclass(function)):
        function = getattr(function, "__call__", function)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def is_callable_class(function: Any) -> bool:
    """Whether ``function`` is a class whose *instances* are called per item (built once per worker), not a
    class such as ``int`` that is itself applied to each item. ``functools.partial`` of such a class counts
    too."""
    if isinstance(function, functools.partial):
        return is_callable_class(function.func)
    # ``type`` and metaclasses make classes of items
    if not inspect.isclass(function) or issubclass(function, type):
        return False
    return any("__call__" in vars(base) for base in function.__mro__)

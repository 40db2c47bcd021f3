"""The frozen values that a declared graph consists of. Nothing here runs, and nothing here changes.

A declared graph is a list of :class:`Stage` values; :class:`Link` values are derived from them and name every
channel of the graph. The checks, the pictures and the supervisor all read these. A stage can be sent to
another process as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from flowchan.channel.media import Medium
from flowchan.declare.places import THREAD, Place
from flowchan.declare.verbs import Verb
from flowchan.errors import Where

DEFAULT_CAPACITY = 64
DEFAULT_RESTARTS = 10
DEFAULT_MAX_DEATHS = 3


class Origin(NamedTuple):
    """Where the items of an input come from: an output port of a stage. Without a stage (``""``) the port is
    the number of one of the graph's ``loops`` or ``strangers``, which say what is known of it."""

    stage: str
    port: str

    def __str__(self) -> str:
        return f"{self.stage}.{self.port}"


@dataclass(frozen=True, slots=True)
class Loop:
    """A feedback: an input whose origin is declared later, and is ``None`` until then. ``name`` and ``where``
    are those of its declaration."""

    name: str
    where: Where
    fed_by: Origin | None = None


@dataclass(frozen=True, slots=True)
class Stranger:
    """A stream of another graph that a stage of this one reads: its name, and that graph."""

    name: str
    graph: str
    where: Where


@dataclass(frozen=True, slots=True)
class Output:
    """One output port of a stage, and what its channel shall be like.

    ``name`` is the channel's name, unique in the graph: the stage's name when it has one output, else
    ``stage.port``; ``stage.errors`` for the error stream. ``item`` is the annotated item type, ``None`` if
    unknown; it is for checks and pictures, and stays behind where the stage is sent to another process, for
    it may be nothing that can be sent.
    """

    name: str
    port: str
    item: Any = None
    capacity: int = DEFAULT_CAPACITY

    def __reduce__(self) -> tuple[Any, ...]:
        return Output, (self.name, self.port, None, self.capacity)


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A node of the graph. ``options`` holds what only its verb takes (``size`` of batch, ``n`` of take,
    …)."""

    name: str
    verb: Verb
    where: Where
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    inputs: tuple[Origin, ...] = ()
    input_ports: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    errors: Output | None = None
    place: Place = THREAD
    workers: int = 1
    ordered: bool = True
    retries: int = 0
    restarts: int = DEFAULT_RESTARTS
    max_deaths: int = DEFAULT_MAX_DEATHS
    restartable: bool = False
    gpus: int = 0
    """That each worker has for itself."""
    feedback: frozenset[str] = frozenset()
    """The input ports that read what a stage further on puts."""

    @property
    def kind(self) -> str:
        """The name of its verb."""
        return self.verb.name

    @property
    def begins(self) -> bool:
        """Whether the graph begins here: no stage before it gives it items."""
        return len(self.inputs) == len(self.feedback)

    @property
    def all_outputs(self) -> tuple[Output, ...]:
        """The outputs, and the error stream if it has one."""
        return self.outputs if self.errors is None else (*self.outputs, self.errors)

    @property
    def read(self) -> tuple[tuple[str, Origin], ...]:
        """Each input port with what it reads."""
        return tuple(zip(self.input_ports, self.inputs, strict=False))


@dataclass(frozen=True, slots=True)
class Link:
    """A channel of the graph: which port writes it, which stage's port reads it (``reader`` is ``None`` for a
    result that leaves the graph, or when nobody reads it), and the medium that the places of both ends
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

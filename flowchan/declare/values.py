"""The frozen values that a declared graph consists of. Nothing here runs, and nothing here changes.

A declared graph is a list of :class:`Stage` values; :class:`Edge` values are derived from them and name every
channel of the graph. The checks, the pictures and the supervisor all read these. A stage can be sent to
another process as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from flowchan.channel.transports import Transport
from flowchan.declare.operators import Operator
from flowchan.declare.placements import THREAD, Placement
from flowchan.errors import Where


class DefaultNumber(int):
    """A default, which can be told from the same number given by the user."""


DEFAULT_CAPACITY = 64
DEFAULT_RESTARTS: int = DefaultNumber(10)
UNLIMITED_RESTARTS = 10**9
"""From this number on a stage has no limit of restarts."""
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
    it may be nothing that can be sent. ``apart``: its reader tells the workers apart, so each of them has a
    channel of its own, ``name worker``.
    """

    name: str
    port: str
    item: Any = None
    capacity: int = DEFAULT_CAPACITY
    apart: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Output, (self.name, self.port, None, self.capacity, self.apart)


@dataclass(frozen=True, slots=True)
class Gang:
    """That the workers of a stage form a group: ``parameter`` of its function takes a worker's member.
    ``group`` is the class that makes such groups, as ``flowchan.collective.Group``: ``_make_all(size, name)``
    gives the members of one on this machine, ``_seat(…)`` a place in one over hosts, as ``hosts.crew`` calls
    it. ``elastic``: while one of them is replaced the others go on."""

    parameter: str
    group: Any
    elastic: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A node of the graph. ``options`` holds what only its operator takes (``size`` of batch, ``n`` of take,
    …)."""

    name: str
    operator: Operator
    where: Where
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    inputs: tuple[Origin, ...] = ()
    input_ports: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    errors: Output | None = None
    placement: Placement = THREAD
    workers: int = 1
    ordered: bool = True
    retries: int = 0
    retry_delay: float | None = None
    retry_on: tuple[type[Exception], ...] = (Exception,)
    timeout: float | None = None
    """Seconds that its function may take for an item."""
    restarts: int = DEFAULT_RESTARTS
    max_deaths: int = DEFAULT_MAX_DEATHS
    restartable: bool = False
    gpus: int = 0
    """That each worker has for itself."""
    feedback: frozenset[str] = frozenset()
    """The input ports that read what a stage further on puts."""
    gang: Gang | None = None
    per_worker: frozenset[str] = frozenset()
    """The input ports whose items go to the worker that the sender names."""
    asked: bool = False
    """Whether the program may ask its items: it stands behind an input."""

    @property
    def kind(self) -> str:
        """The name of its operator."""
        return self.operator.name

    @property
    def begins(self) -> bool:
        """Whether the graph begins here: no stage before it gives it items."""
        return len(self.inputs) == len(self.feedback)

    @property
    def all_outputs(self) -> tuple[Output, ...]:
        """The outputs, and the error stream if it has one."""
        return self.outputs if self.errors is None else (*self.outputs, self.errors)

    @property
    def worker_count(self) -> int:
        """How many workers it has."""
        return len(self.inputs) if self.operator.worker_per_input else self.workers

    @property
    def output_per_worker(self) -> bool:
        """Whether an output's reader tells the workers apart."""
        return any(output.apart for output in self.all_outputs)

    @property
    def told_apart(self) -> bool:
        """Whether somebody tells its workers apart by their outputs."""
        return self.worker_count > 1 and self.output_per_worker

    @property
    def keeps_its_own(self) -> bool:
        """Whether what a worker had in hand when it died is its successor's alone: where workers are told
        apart by outputs, of which some may be out, and where all begin again together."""
        return self.told_apart or self.gang is not None

    def channels(self, output: Output) -> tuple[tuple[int, str], ...]:
        """The names of an output's channels, each with the number of the worker that writes it; 0: all do."""
        if not output.apart or self.worker_count == 1:
            return ((0, output.name),)
        return tuple((worker, f"{output.name} {worker}") for worker in range(1, self.worker_count + 1))

    @property
    def read(self) -> tuple[tuple[str, Origin], ...]:
        """Each input port with what it reads."""
        return tuple(zip(self.input_ports, self.inputs, strict=False))


@dataclass(frozen=True, slots=True)
class Edge:
    """A channel of the graph: which port writes it, which stage's port reads it (``reader`` is ``None`` for a
    result that leaves the graph, or when nobody reads it), and the transport that the places of both ends
    ask for. ``feedback``: it leads back to a stage that its writer depends on. ``worker``: the number of the
    only worker that writes it; 0: all of the stage do. ``to_worker``: the number of the only worker that
    reads it; 0: all of the stage do."""

    name: str
    writer: str
    writer_port: str
    reader: str | None
    reader_port: str | None
    item: Any
    capacity: int
    transport: Transport
    errors: bool
    where: Where
    feedback: bool = False
    worker: int = 0
    to_worker: int = 0

    @property
    def writing_end(self) -> str:
        """The name of the port at which it is written."""
        return f"{self.writer_port}.{self.to_worker}" if self.to_worker else self.writer_port

    @property
    def reading_end(self) -> str:
        """The name of the port at which it is read."""
        assert self.reader_port is not None
        return f"{self.reader_port}.{self.worker}" if self.worker else self.reader_port

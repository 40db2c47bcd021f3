"""Define the frozen values of a declared graph.

A declared graph is a list of :class:`Stage` values. The :class:`Edge` values, one per channel, are derived
from them. The checks, the pictures and the supervisor read both. A stage can be sent to another process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from flowchan.channel.transports import Transport
from flowchan.declare.auto_workers import AutoWorkers
from flowchan.declare.operators import Operator
from flowchan.declare.placements import THREAD, Placement
from flowchan.errors import Where


class DefaultNumber(int):
    """Default value. Its type distinguishes it from the same number passed by the user."""


DEFAULT_CAPACITY = 64
DEFAULT_RESTARTS: int = DefaultNumber(10)
UNLIMITED_RESTARTS = 10**9
"""A stage with at least this many restarts has no limit."""
DEFAULT_MAX_DEATHS = 3


class Origin(NamedTuple):
    """Output port that an input reads.

    If ``stage`` is empty, ``port`` is an index into the graph's tables of loops and foreign streams.
    """

    stage: str
    port: str

    def __str__(self) -> str:
        return f"{self.stage}.{self.port}"


@dataclass(frozen=True, slots=True)
class Loop:
    """Feedback: an input whose origin is declared later. Until then, ``fed_by`` is ``None``.

    ``name`` and ``where`` describe the declaration of the feedback.
    """

    name: str
    where: Where
    fed_by: Origin | None = None


@dataclass(frozen=True, slots=True)
class ForeignStream:
    """Names of a stream and of its graph, if a stage of another graph reads the stream."""

    name: str
    graph: str
    where: Where


@dataclass(frozen=True, slots=True)
class Output:
    """Output port of one stage, with the settings of its channel.

    Attributes:
        name: Name of the channel, unique in the graph. It is the stage's name if the stage has only one
            output, otherwise ``stage.port``. The error stream is ``stage.errors``.
        port: Name of the port.
        item: Annotated item type, or ``None`` if unknown. Only checks and pictures use it. It is not sent to
            other processes, because it may not be picklable.
        capacity: Capacity of the channel in items.
        channel_per_worker: True if each worker has its own channel, ``name worker``, so the reader can tell
            the workers apart.
    """

    name: str
    port: str
    item: Any = None
    capacity: int = DEFAULT_CAPACITY
    channel_per_worker: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Output, (self.name, self.port, None, self.capacity, self.channel_per_worker)


@dataclass(frozen=True, slots=True)
class Gang:
    """Marks a stage whose workers form a group.

    Attributes:
        parameter: Function parameter that receives the worker's membership.
        group: Class of the group, for example ``flowchan.collective.Group``. ``_make_all(size, name)``
            returns all memberships in a group on this machine. ``_membership(…)`` returns one membership in a
            group that spans hosts.
        elastic: True if the other workers continue while a dead one is replaced.
    """

    parameter: str
    group: Any
    elastic: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Node of the graph.

    ``options`` contains the options that no other operator has, such as the ``size`` of a batch.
    """

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
    """Number of workers at the start of a run."""
    ordered: bool = True
    retries: int = 0
    retry_delay: float | None = None
    retry_on: tuple[type[Exception], ...] = (Exception,)
    timeout: float | None = None
    """Seconds allowed for one item."""
    rate: float | None = None
    """Maximum number of items that start per second."""
    share_instance: bool = False
    """Whether all coroutines of an async stage share one instance of its class."""
    restarts: int = DEFAULT_RESTARTS
    max_deaths: int = DEFAULT_MAX_DEATHS
    restartable: bool = False
    gpus: float = 0
    """GPUs reserved for each worker."""
    feedback: frozenset[str] = frozenset()
    """Input ports that read the output of a stage declared later."""
    gang: Gang | None = None
    per_worker: frozenset[str] = frozenset()
    """Input ports whose writers choose a worker for each item."""
    may_get_requests: bool = False
    """Whether ``ask()`` requests may reach this stage, because it is downstream of an input."""
    auto: AutoWorkers | None = None
    """Limit for the number of workers if the run chooses it; ``None`` if the number is fixed."""
    service: bool = False
    """Whether the stage is a service, which serves other stages without a graph channel and so ends last."""

    @property
    def kind(self) -> str:
        """Return the name of the operator."""
        return self.operator.name

    @property
    def begins(self) -> bool:
        """Return whether the graph begins at this stage, because no earlier stage feeds it."""
        return len(self.inputs) == len(self.feedback)

    @property
    def all_outputs(self) -> tuple[Output, ...]:
        """Return the outputs, including the error stream if the stage has one."""
        return self.outputs if self.errors is None else (*self.outputs, self.errors)

    @property
    def worker_count(self) -> int:
        """Return the number of workers at the start of a run."""
        return len(self.inputs) if self.operator.worker_per_input else self.workers

    @property
    def may_have_several_workers(self) -> bool:
        """Return whether the stage has several workers, or may get more during the run."""
        return self.worker_count > 1 if self.auto is None else self.auto.most != 1

    @property
    def output_per_worker(self) -> bool:
        """Return whether the reader of an output tells the workers apart."""
        return any(output.channel_per_worker for output in self.all_outputs)

    @property
    def has_ports_per_worker(self) -> bool:
        """Return whether the stage has several workers and a reader tells them apart."""
        return self.worker_count > 1 and self.output_per_worker

    @property
    def keeps_its_own(self) -> bool:
        """Return whether a dead worker's items may go only to its replacement.

        This holds if a reader tells the workers apart, because outputs of the dead worker may already exist.
        It also holds for gangs, because a gang restarts as a whole.
        """
        return self.has_ports_per_worker or self.gang is not None

    def channels(self, output: Output) -> tuple[tuple[int, str], ...]:
        """Return an output's channels as pairs: number of the only writing worker (0 for all), and name.

        The core stores names as UTF-8, so lone surrogates in them are escaped.
        """
        name = output.name.encode(errors="backslashreplace").decode()
        if not output.channel_per_worker or self.worker_count == 1:
            return ((0, name),)
        return tuple((worker, f"{name} {worker}") for worker in range(1, self.worker_count + 1))

    @property
    def read(self) -> tuple[tuple[str, Origin], ...]:
        """Return each input port with the output that it reads."""
        return tuple(zip(self.input_ports, self.inputs, strict=False))


@dataclass(frozen=True, slots=True)
class Edge:
    """Channel of a graph: its writer, its reader and its settings.

    Attributes:
        name: Name of the channel.
        writer: Name of the stage that writes to it.
        writer_port: Output port of the writer.
        reader: Name of the stage that reads from it; ``None`` for a result of the run or an unread output.
        reader_port: Input port of the reader, or ``None``.
        item: Type of the items, or ``None`` if unknown.
        capacity: Capacity in items.
        transport: Transport required by the placements of both stages.
        errors: True if this is an error stream.
        where: Line that declares the writer.
        feedback: True if the channel leads back to an earlier stage of a loop.
        worker: Number of the only worker that writes to it; 0 for all workers of the stage.
        to_worker: Number of the only worker that reads from it; 0 for all workers of the stage.
        routed: Whether a ``route`` stage writes to it, so that items keep that stage's numbers.
    """

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
    routed: bool = False

    @property
    def writing_end(self) -> str:
        """Return the name of the port that writes to the channel."""
        return f"{self.writer_port}.{self.to_worker}" if self.to_worker else self.writer_port

    @property
    def reading_end(self) -> str:
        """Return the name of the port that reads from the channel."""
        assert self.reader_port is not None
        return f"{self.reader_port}.{self.worker}" if self.worker else self.reader_port

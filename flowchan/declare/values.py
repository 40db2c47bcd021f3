"""Define the frozen values of a declared graph.

A declared graph is a list of :class:`Stage` values. The :class:`Edge` values, one per channel, are derived
from this list. Checks, pictures and the supervisor read stages and edges. A stage can be sent to another
process.
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
    """Default number of an option, distinguished by its type from an equal number that the user passed."""


DEFAULT_CAPACITY = 64
DEFAULT_RESTARTS: int = DefaultNumber(10)
UNLIMITED_RESTARTS = 10**9
"""From this number on, the restarts of a stage are not limited."""
DEFAULT_MAX_DEATHS = 3


class Origin(NamedTuple):
    """Identifies the output port that an input reads.

    If ``stage`` is empty, no stage of the graph writes the stream (yet), and ``port`` is just a number.
    """

    stage: str
    port: str

    def __str__(self) -> str:
        return f"{self.stage}.{self.port}"


@dataclass(frozen=True, slots=True)
class Loop:
    """Feedback loop. Before the user closes the loop, ``fed_by`` is ``None``.

    ``name`` and ``where`` come from the declaration of the feedback.
    """

    name: str
    where: Where
    fed_by: Origin | None = None


@dataclass(frozen=True, slots=True)
class ForeignStream:
    """Names a stream and its graph. A stage of another graph reads the stream, which is an error."""

    name: str
    graph: str
    where: Where


@dataclass(frozen=True, slots=True)
class Output:
    """Output port of one stage, with the settings of its channel.

    Attributes:
        name: Name of the channel, unique in the graph. The name is the stage's name if the stage has only one
            output, and ``stage.port`` otherwise. The error stream is called ``stage.errors``.
        port: Name of the port.
        item: Annotated item type, or ``None`` if unknown. Only checks and pictures use the type. The type is
            not sent to other processes, because it may not be picklable.
        capacity: Capacity of the channel in items.
        channel_per_worker: True if each worker has its own channel, named ``name worker``, because the reader
            distinguishes the workers.
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
        group: Class of the group, for example ``flowchan.collective.Group``. The method ``_make_all(size,
            name)`` returns all memberships in a group on this machine. The method ``_membership(…)`` returns
            one membership in a group that spans hosts.
        elastic: True if the other workers continue while a dead worker is replaced.
    """

    parameter: str
    group: Any
    elastic: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Declaration of one stage.

    ``options`` contains the options that only its operator has, such as the ``size`` of a batch.
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
    """Time limit for one item in seconds."""
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
    """Limit up to which the run chooses the number of workers; ``None`` if the number is fixed."""
    service: bool = False
    """Whether the stage serves other stages without a graph channel. Such a service ends last."""

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
        """Return whether the stage has several workers or may get several during the run."""
        return self.worker_count > 1 if self.auto is None else self.auto.most != 1

    @property
    def output_per_worker(self) -> bool:
        """Return whether each worker writes its own channel, because a reader distinguishes the workers."""
        return any(output.channel_per_worker for output in self.all_outputs)

    @property
    def has_ports_per_worker(self) -> bool:
        """Return whether the stage has several workers and a reader distinguishes them."""
        return self.worker_count > 1 and self.output_per_worker

    @property
    def keeps_its_own(self) -> bool:
        """Return whether only the replacement of a dead worker may process that worker's items.

        This is true if a reader distinguishes the workers, because the dead worker may already have emitted
        outputs. The property is also true for gangs, because a gang restarts as a whole.
        """
        return self.has_ports_per_worker or self.gang is not None

    def channels(self, output: Output) -> tuple[tuple[int, str], ...]:
        """Return a pair for each channel of an output: its writing worker (0 for all workers), and its name.

        The core stores names as UTF-8, so lone surrogates in names are escaped.
        """
        name = output.name.encode(errors="backslashreplace").decode()
        if not output.channel_per_worker or self.worker_count == 1:
            return ((0, name),)
        return tuple((worker, f"{name} {worker}") for worker in range(1, self.worker_count + 1))

    @property
    def read(self) -> tuple[tuple[str, Origin], ...]:
        """Return each input port together with the output that it reads."""
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
        routed: Whether a ``route`` stage writes to it. Items then keep the numbers from that stage.
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

"""Define the messages between the driver and an agent, as values.

The link's control stream (stream 0) carries these messages.

Both sides have authenticated each other, so messages are pickled like items. Events of the host's workers use
the same stream, but the agent does not read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from flowchan.run.crew.process_exit import ProcessExit
from flowchan.run.policy import seeds
from flowchan.run.policy.actions import Terminate
from flowchan.run.policy.events import Event, RequestCancelled, WorkerId
from flowchan.run.policy.failures import Suspicion
from flowchan.run.worker.logs import Logged


@dataclass(frozen=True, slots=True)
class Start:
    """Command to start a worker.

    Attributes:
        stream: Number of the worker's stream on the link.
        info: Description of the worker, which its code can query.
        stage: Pickled stage of the worker.
        modules: Modules that the pickle refers to and that the host may lack.
        suspicion: Earlier deaths that may be due to the worker's first item.
        inputs: Channels of its input ports. The rings behind the ports outlive the worker's process.
        outputs: Channels of its output ports.
        errors: Channel for its errors, if the stage has one.
        most: Maximum size of each of the driver's channels, in bytes.
        share: Number of these bytes that a channel may use when it has more than one item.
        gpus: Number of GPUs reserved for the worker.
        membership: The worker's membership in its gang's group, if that group exists already.
        elastic: True if the worker's gang is elastic. Later memberships then follow in ``NewMembership``.
        sampled: Position of its stage in the graph if the run follows sampled items, otherwise None.
        keeps_outputs: True if large outputs stay on the host until another host fetches them.
    """

    stream: int
    info: seeds.Worker
    stage: bytes
    modules: tuple[str, ...]
    suspicion: Suspicion
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    errors: str | None
    most: int
    share: int
    gpus: float
    membership: Any = None
    elastic: bool = False
    sampled: int | None = None
    keeps_outputs: bool = False

    @property
    def id(self) -> WorkerId:
        return WorkerId(self.info.stage, self.info.number)


@dataclass(frozen=True, slots=True)
class Recover:
    """Command to recover the items of a worker whose process died.

    ``blame`` is true if the worker's item may have killed the process.
    """

    worker: WorkerId
    blame: bool


@dataclass(frozen=True, slots=True)
class NewMembership:
    """Command to give a waiting worker of an elastic gang its ``membership`` in the gang's next group."""

    worker: WorkerId
    membership: Any


@dataclass(frozen=True, slots=True)
class Close:
    """Command to close the ports of a worker whose process died after the worker had reported its end."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Release:
    """Command to release all resources of a worker."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Echo:
    """Command to send this message back.

    The returned message shows the driver that all earlier reports from workers have arrived.
    """

    number: int


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Command to return this message, with ``at`` set to the agent's monotonic clock in nanoseconds.

    ``asked`` is the time at which the driver sent it, on the driver's clock.
    """

    asked: int
    at: int = 0


@dataclass(frozen=True, slots=True)
class AskWaits:
    """Command to report which workers wait, and for which channels."""

    number: int


@dataclass(frozen=True, slots=True)
class AskStacks:
    """Command to send the Python stack of each of these workers in a ``WrittenStack``."""

    number: int
    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """Command to end all remaining workers and the agent, because the run is over."""


Command = (
    Start
    | NewMembership
    | Recover
    | Terminate
    | Close
    | Release
    | RequestCancelled
    | Echo
    | ClockReading
    | AskWaits
    | AskStacks
    | Leave
)


@dataclass(frozen=True, slots=True)
class Lacking:
    """Reports that a worker was not started, because the host lacks these modules."""

    worker: WorkerId
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PeerEnded:
    """Reports that a worker's process has ended, after all reports of the worker itself."""

    worker: WorkerId
    exit: ProcessExit


@dataclass(frozen=True, slots=True)
class WorkerWaits:
    """Waiting threads of a worker.

    Attributes:
        reading: Number of threads that wait for an item, by channel.
        writing: Number of threads that wait to put an item, by channel.
        counts: Numbers of items that entered and left each of the worker's rings.
        moves: True if the worker may continue without an item, or its process has ended.
    """

    reading: Mapping[str, int]
    writing: Mapping[str, int]
    counts: tuple[int, ...]
    moves: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """Answer to ``AskWaits``."""

    number: int
    workers: Mapping[WorkerId, WorkerWaits]


@dataclass(frozen=True, slots=True)
class WrittenStack:
    """Answer to ``AskStacks`` for one worker. ``text`` is empty if the worker has no running process."""

    number: int
    worker: WorkerId
    text: str


AgentReport = Event | Lacking | PeerEnded | Echo | ClockReading | Waiting | WrittenStack | Logged
REPORT_TYPES = tuple(kind for kind in get_args(AgentReport) if isinstance(kind, type))
"""Types of an agent's reports. Reports of resumable runs are missing, because hosts do not support them."""


def refusal(channel: str, destination: str) -> TypeError:
    """Return the error that breaks a channel whose next item cannot leave its machine."""
    return TypeError(
        f"an item in channel {channel!r} can't be sent {destination}, because it contains a channel or "
        "shared tensor that exists on one machine only; create the channel with across='hosts', or "
        "send tensor.clone()"
    )


def not_remade(channel: str) -> RuntimeError:
    """Return the error that breaks a channel if an item was lost and could not be produced again."""
    return RuntimeError(
        f"an item in channel {channel!r} was lost with the host that made it, and processing its input again "
        "gave fewer items; the function of the stage must return the same number of items each time"
    )


def too_large(channel: str, host: str, size: int, most: int) -> MemoryError:
    """Return the error that breaks a channel whose next item does not fit into a host's memory."""
    return MemoryError(
        f"an item in channel {channel!r} must have at most {most} bytes, half of the memory "
        f"of host {host!r}, got {size}; send smaller items, or use hosts with more memory"
    )

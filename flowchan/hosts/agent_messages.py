"""The messages that the driver and an agent exchange, as values.

They are sent on the link's control stream (stream 0).

The two sides have already authenticated each other, so the messages are pickled like items. Events of the
host's workers use the same stream, and the agent does not read them.
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
    """Start this worker.

    Attributes:
        stream: The number of the worker's stream on the link.
        info: The worker as its own code sees it.
        stage: Its stage, pickled.
        modules: Modules that the pickle refers to and that the host may lack.
        suspicion: Earlier deaths that the worker's first item may have caused.
        inputs: The channels of its input ports. The rings behind the ports outlive a worker's process.
        outputs: The channels of its output ports.
        errors: The channel for its errors, if the stage has one.
        most: Maximum size of the driver's channels, in bytes.
        share: Number of these bytes that a channel may hold when it has more than one item.
        gpus: Number of GPUs that are reserved for the worker.
        membership: Its membership in its gang's group, if it already has one.
        elastic: True if its gang is elastic, so that later memberships follow in ``NewMembership``.
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
    """Recover the items of this worker, whose process has died. ``blame``: its item may have killed it."""

    worker: WorkerId
    blame: bool


@dataclass(frozen=True, slots=True)
class NewMembership:
    """Pass ``membership``, for the gang's next group, to this waiting worker of an elastic gang."""

    worker: WorkerId
    membership: Any


@dataclass(frozen=True, slots=True)
class Close:
    """Close the ports of this worker, whose process died after it had reported that it was done."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Release:
    """Release all resources of this worker."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Echo:
    """Send this message back. Its return shows that all earlier reports from workers have arrived."""

    number: int


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Return this message with ``at`` set to the time on the agent's monotonic clock, in nanoseconds.

    ``asked`` is the time on the driver's clock when the driver sent the message.
    """

    asked: int
    at: int = 0


@dataclass(frozen=True, slots=True)
class AskWaits:
    """Report what all workers are waiting for."""

    number: int


@dataclass(frozen=True, slots=True)
class AskStacks:
    """Send the Python stack of each of these workers in a separate ``WrittenStack``."""

    number: int
    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """The run is over: end all remaining workers and the agent."""


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
    """The host lacks these modules, so the worker was not started."""

    worker: WorkerId
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PeerEnded:
    """The process of this worker has ended, and all its reports have been sent."""

    worker: WorkerId
    exit: ProcessExit


@dataclass(frozen=True, slots=True)
class WorkerWaits:
    """The waiting threads of a worker.

    Attributes:
        reading: Number of threads that are waiting for an item, by channel.
        writing: Number of threads that are waiting to put an item, by channel.
        counts: Numbers of items that entered and left each of the worker's rings.
        moves: True if the worker may continue without an item, or its process has ended.
    """

    reading: Mapping[str, int]
    writing: Mapping[str, int]
    counts: tuple[int, ...]
    moves: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """The answer to ``AskWaits``."""

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
"""Types of the reports; items of a run that can be resumed are left out, because hosts cannot run it."""


def refusal(channel: str, destination: str) -> TypeError:
    """Return the error that breaks a channel whose next item can't leave its machine."""
    return TypeError(
        f"an item in channel {channel!r} can't be sent {destination}, because it contains a channel or "
        "shared tensor that exists on one machine only; create the channel with across='hosts', or "
        "send tensor.clone()"
    )


def not_remade(channel: str) -> RuntimeError:
    """Return the error that breaks a channel if a lost item of it was not made again."""
    return RuntimeError(
        f"an item in channel {channel!r} was lost with the host that made it, and processing its input again "
        "gave fewer items; the function of the stage must return as many items for the same input each time"
    )


def too_large(channel: str, host: str, size: int, most: int) -> MemoryError:
    """Return the error that breaks a channel whose next item does not fit into a host's memory."""
    return MemoryError(
        f"an item in channel {channel!r} must have at most {most} bytes, half of the memory "
        f"of host {host!r}, got {size}; send smaller items, or use hosts with more memory"
    )

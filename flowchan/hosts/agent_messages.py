"""The messages between the driver and an agent, as values.

They use the control stream of the link (stream 0).

Both sides have authenticated each other by then, so the values are pickled like items. The events of the
host's workers use the same stream, and the agent does not read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        line: The number of its stream on the link.
        info: The worker as its own code sees it.
        stage: Its stage, pickled.
        modules: Modules that the pickle refers to and that the host may lack.
        suspicion: Deaths over its first item.
        inputs: The channels of its input ports. The rings under the ports outlive a process of the worker.
        outputs: The channels of its output ports.
        errors: The channel of its errors, if the stage has one.
        most: How many bytes the driver's channels take.
        share: How many of these bytes a channel may hold when it has more than one item.
        gpus: How many GPUs it has for itself.
        membership: Its membership of the group of its gang, if it has one yet.
        elastic: Whether its gang is elastic: later memberships follow in ``NewMembership``.
    """

    line: int
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

    @property
    def id(self) -> WorkerId:
        return WorkerId(self.info.stage, self.info.number)


@dataclass(frozen=True, slots=True)
class Recover:
    """Recover the items of this worker, whose process has died. ``blame``: the item may have killed it."""

    worker: WorkerId
    blame: bool


@dataclass(frozen=True, slots=True)
class NewMembership:
    """Give this waiting worker of an elastic gang the membership ``membership`` of its next group."""

    worker: WorkerId
    membership: Any


@dataclass(frozen=True, slots=True)
class Close:
    """Close the ports of this worker, whose process died after it had reported its end."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Release:
    """Release everything of this worker."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Echo:
    """Send this back. Its return shows that every earlier report of a worker has arrived."""

    number: int


@dataclass(frozen=True, slots=True)
class AskWaits:
    """Report what all workers wait for."""

    number: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The run is over: end, and end every remaining worker."""


Command = (
    Start | NewMembership | Recover | Terminate | Close | Release | RequestCancelled | Echo | AskWaits | Leave
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
    """The waits of a worker's threads.

    Attributes:
        reading: How many threads wait for an item, by channel.
        writing: How many threads wait to put an item, by channel.
        counts: How many items entered and left each of its rings.
        moves: Whether it may continue without an item, or its process has ended.
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


AgentReport = Event | Lacking | PeerEnded | Echo | Waiting | Logged


def refusal(channel: str, destination: str) -> TypeError:
    """Make the error that breaks a channel whose next item can't leave its machine."""
    return TypeError(
        f"an item of channel {channel!r} can't be sent {destination}, because it holds a channel or "
        "shared tensor of one machine; send a channel across='hosts' or tensor.clone()"
    )


def too_large(channel: str, host: str, size: int, most: int) -> MemoryError:
    """Make the error that breaks a channel whose next item does not fit into the memory of a host."""
    return MemoryError(
        f"an item of channel {channel!r} must have at most {most} bytes, half of the memory "
        f"of host {host!r}, got {size}; send smaller items, or use hosts with more memory"
    )

"""The messages of the driver and an agent over the control line of their link (line 0), as values.

Both have proved the secret by then, so the values are pickled as any items are. The events of a worker on the
host take the same line, and the agent does not look at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowchan.run.crew.process_exit import ProcessExit
from flowchan.run.policy import seeds
from flowchan.run.policy.actions import Terminate
from flowchan.run.policy.events import Event, RequestCancelled, WorkerId
from flowchan.run.worker.logs import Logged


@dataclass(frozen=True, slots=True)
class Start:
    """Start this worker, as ``here``. ``stage``: what it does, pickled. ``modules``: those that the pickle
    refers to and that may be missing there. ``inputs``, ``outputs``, ``errors`` name its ports; the rings
    under them stay from one process of the worker to the next. ``most``: how many bytes the driver's channels
    take, ``share``: how many of these may be inside when there is more than one item. ``seat``: in the group
    of its gang, or none yet. ``elastic``: others come after it, each by a ``Seated``."""

    line: int
    here: seeds.Worker
    stage: bytes
    modules: tuple[str, ...]
    predecessors: tuple[str, ...]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    errors: str | None
    most: int
    share: int
    gpus: int
    seat: Any = None
    elastic: bool = False

    @property
    def id(self) -> WorkerId:
        return WorkerId(self.here.stage, self.here.number)


@dataclass(frozen=True, slots=True)
class Recover:
    """Give back what this worker, whose process has died, held. Without ``blame`` we ended it."""

    worker: WorkerId
    blame: bool


@dataclass(frozen=True, slots=True)
class Seated:
    """This worker of an elastic gang, which waits for it, has a ``seat`` in another group."""

    worker: WorkerId
    seat: Any


@dataclass(frozen=True, slots=True)
class Close:
    """This worker has said that it has ended, and then its process died: end its ports in its place."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Release:
    """This worker is done with: leave nothing of it."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Echo:
    """Send this back: everything that workers reported before has then been heard."""

    number: int


@dataclass(frozen=True, slots=True)
class AskWaits:
    """Say what all workers wait for."""

    number: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The run is over: end, and every worker that is left."""


Command = Start | Seated | Recover | Terminate | Close | Release | RequestCancelled | Echo | AskWaits | Leave


@dataclass(frozen=True, slots=True)
class Lacking:
    """These modules are missing here, so the worker was not started."""

    worker: WorkerId
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PeerEnded:
    """The process of this worker has ended, after everything that it reported."""

    worker: WorkerId
    exit: ProcessExit


@dataclass(frozen=True, slots=True)
class WorkerWaits:
    """What a worker does: how many of its threads wait for an item of which channels, or to put one.
    ``counts``: of the items it has got and taken, put and sent, by port. ``moves``: it may go on without an
    item, or its process has ended."""

    reading: Mapping[str, int]
    writing: Mapping[str, int]
    counts: tuple[int, ...]
    moves: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """The answer to ``AskWaits``."""

    number: int
    workers: Mapping[WorkerId, WorkerWaits]


Told = Event | Lacking | PeerEnded | Echo | Waiting | Logged


def refusal(channel: str, way: str) -> TypeError:
    """Why a channel breaks whose next item can't leave its machine."""
    return TypeError(
        f"an item of channel {channel!r} can't go {way}: it holds a channel or something else that only "
        "processes of one machine can share"
    )


def too_large(channel: str, host: str, size: int, most: int) -> MemoryError:
    """Why a channel breaks whose next item has no place on a host with less memory."""
    return MemoryError(
        f"host {host!r} has no place for an item of channel {channel!r}: it has {size} bytes, and a channel "
        f"there takes {most}, half of its memory; send smaller items, or name hosts with more memory"
    )

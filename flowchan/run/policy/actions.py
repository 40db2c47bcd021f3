"""Define the actions that decision functions return and the supervisor carries out."""

from __future__ import annotations

from dataclasses import dataclass

from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.scaling import AddWorker, RemoveWorker


@dataclass(frozen=True, slots=True)
class StopSources:
    """Close the channels of all sources and inputs."""


@dataclass(frozen=True, slots=True)
class EndServices:
    """Close the request channels of the services."""


@dataclass(frozen=True, slots=True)
class DropQueued:
    """Discard the items that wait in the channels of :meth:`Plan.queues`."""


@dataclass(frozen=True, slots=True)
class BreakChannels:
    """Abort every channel."""


@dataclass(frozen=True, slots=True)
class ReleasePorts:
    """Close the ports of a worker that has ended for any reason."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Terminate:
    """Send SIGTERM to the worker's process, or SIGKILL if ``force``."""

    worker: WorkerId
    force: bool


@dataclass(frozen=True, slots=True)
class Replace:
    """Return a dead worker's items to the channels, and start a replacement after ``pause`` seconds."""

    worker: WorkerId
    pause: float


@dataclass(frozen=True, slots=True)
class RestartGang:
    """Replace all workers of a gang. ``died`` is the worker whose death is the reason, if any."""

    workers: tuple[WorkerId, ...]
    pause: float
    died: WorkerId | None


@dataclass(frozen=True, slots=True)
class EndGroup:
    """End the current group of an elastic gang."""

    stage: str


@dataclass(frozen=True, slots=True)
class FormGroup:
    """Form a group of these workers of an elastic gang. New workers come last."""

    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class Warn:
    """Warn the user about a stage.

    In the report, a later warning with the same ``topic`` replaces this one.
    """

    stage: str
    topic: str
    text: str


Action = (
    StopSources
    | EndServices
    | DropQueued
    | BreakChannels
    | ReleasePorts
    | Terminate
    | Replace
    | RestartGang
    | EndGroup
    | FormGroup
    | AddWorker
    | RemoveWorker
    | Warn
)

"""What a run hears of its workers, from themselves and from who watches over them, and by which name each is
known. Values: most cross between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerId:
    """Which worker of which stage; workers of a stage are numbered from 1."""

    stage: str
    number: int

    def __str__(self) -> str:
        return f"{self.stage} {self.number}"


@dataclass(frozen=True, slots=True)
class Started:
    """The worker's process has been started. ``host``: on which, if not on this machine."""

    worker: WorkerId
    pid: int
    host: str = ""


@dataclass(frozen=True, slots=True)
class Began:
    """The worker has built what the user declared and begins its loop."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Ended:
    """The worker has ended cleanly. ``unwanted``: how many of its items nobody wanted, because their readers
    had left. ``early``: because nobody reads what it puts."""

    worker: WorkerId
    unwanted: int = 0
    early: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """The worker has ended by ``error``, which the user's code raised. ``item`` is the text of the item in
    hand. Number 0: nobody knows which worker it was. ``host``: the name of the host on which it ran, empty
    for this machine."""

    worker: WorkerId
    error: Any  # on its way out of a process a Portable, which arrives as the exception
    item: str | None
    pid: int
    channel: str | None = None  # the name of the channel that was aborted with the error
    host: str = ""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The worker is about to abort one of its channels, at a time of the machine's monotonic clock in ns."""

    worker: WorkerId
    channel: str
    error: Any  # as that of a Failure; None: without a cause
    pid: int
    at: int
    host: str = ""


@dataclass(frozen=True, slots=True)
class Met:
    """The worker has found these of its channels broken, and is about to break all others that it has."""

    worker: WorkerId
    channels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Retried:
    """The worker tries an item again."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Troubled:
    """An item has failed, and went to the errors stream: what happened, in a line. Told now and then."""

    worker: WorkerId
    text: str


@dataclass(frozen=True, slots=True)
class Answered:
    """What has come of an item that was asked: a ``value``, or the ``error`` by which it failed. ``failed``:
    how many items of the stage count as failed by that."""

    worker: WorkerId
    question: int
    value: Any
    error: Any  # as that of a Failure
    failed: int = 0


@dataclass(frozen=True, slots=True)
class CrossedOff:
    """The program says: nobody waits for the answer to this question any more. Agents are told so, too, and
    who takes up its item drops it."""

    question: int


@dataclass(frozen=True, slots=True)
class Result:
    """A stage whose output is a result of the run has it."""

    stage: str
    value: Any


@dataclass(frozen=True, slots=True)
class GroupLost:
    """The worker of an elastic gang waits for a group: the one that it had is over, as ``failure`` tells; or
    it has just begun."""

    worker: WorkerId
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class Gone:
    """The process of the worker has ended, for certain. This comes after all that the worker told."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Crashed:
    """A mistake of ours: nothing more is heard of the workers."""

    error: BaseException


Event = (
    Started
    | Began
    | Ended
    | Failure
    | Aborted
    | Met
    | Retried
    | Troubled
    | Answered
    | CrossedOff
    | Result
    | GroupLost
    | Gone
    | Crashed
)

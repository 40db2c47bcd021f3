"""Events that workers and the crew report to the supervisor of a run. Most cross between processes."""

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
    """The worker has ended cleanly. ``unwanted``: the number of its items whose readers had left. ``early``:
    its outputs have no readers."""

    worker: WorkerId
    unwanted: int = 0
    early: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """The worker has ended by ``error``, which the user's code raised. ``item`` is the text of the item that
    it held. Number 0: the worker is unknown. ``host``: the name of the host on which it ran, empty for this
    machine."""

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
    """An item has failed, and went to the errors stream: ``text`` says why, in a line. Not every such item
    is reported."""

    worker: WorkerId
    text: str


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a question: a ``value``, or the ``error`` by which the item failed. ``failed``: how many
    items of the stage count as failed by that."""

    worker: WorkerId
    question: int
    value: Any
    error: Any  # as that of a Failure
    failed: int = 0


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """No caller waits for the answer to this question any more. Agents hear it too, so that the next worker
    drops the item."""

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
    """The process of a worker has ended after it had reported how the worker ended. Comes after everything
    that the worker reported."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Death:
    """The process of a worker has ended without a report of how the worker ended. Comes after everything that
    the worker reported, and says all that decisions need.

    Attributes:
        worker: The worker.
        how: How it ended, in words.
        pid: Its process; 0 if unknown.
        exitcode: Its exit code, negative for a signal, if known.
        host: The host on which it ran, empty for this machine.
        over_item: How many workers have died over the item that this one held, this one included; 0 if it
            died outside the user's code.
        deaths: The same, or without an item how many have died in quick succession.
        unbegun: How many have died in a row before they began to work, this one included.
        counts: Whether it uses one of the restarts of its stage. The death of a host does not.
        retired: The worker asked for a fresh process (``Retires``), which is nothing to report.
        always: It is replaced whatever the limit of its stage, because an item exceeded its time limit.
        irreplaceable: Why its stage can't go on with another worker; empty: it can.
        hint: A possible cause, for the message.
        error: The error of the run if no replacement could do better.
    """

    worker: WorkerId
    how: str
    pid: int
    exitcode: int | None = None
    host: str = ""
    over_item: int = 0
    deaths: int = 1
    unbegun: int = 0
    counts: bool = True
    retired: bool = False
    always: bool = False
    irreplaceable: str = ""
    hint: str = ""
    error: BaseException | None = None

    @property
    def summary(self) -> str:
        """How it ended, with what is known of the item; empty if there is nothing to report."""
        if self.retired:
            return ""
        if not self.over_item:
            return self.how
        others = "" if self.over_item == 1 else f", as {self.over_item - 1} before it over the same"
        return f"{self.how}, at work on an item{others}"


@dataclass(frozen=True, slots=True)
class Crashed:
    """The crew itself failed: workers can't report any more."""

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
    | RequestCancelled
    | Result
    | GroupLost
    | Gone
    | Death
    | Crashed
)


# --- what the supervisor adds to the feed of the run ---


@dataclass(frozen=True, slots=True)
class RunBegan:
    """The run has begun with this number of workers."""

    workers: int
    seed: int


@dataclass(frozen=True, slots=True)
class NotAdded:
    """A further worker of a stage could not be started; ``text`` says why."""

    worker: WorkerId
    text: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run has ended in this state, except for threads that are ``stuck`` in the user's code."""

    state: str
    seconds: float
    stuck: frozenset[WorkerId]

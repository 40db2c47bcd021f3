"""Events that workers and the crew report to the supervisor of a run.

Most of them cross between processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerId:
    """The stage and the number of a worker. The workers of a stage are numbered from 1."""

    stage: str
    number: int

    def __str__(self) -> str:
        return f"{self.stage} {self.number}"


@dataclass(frozen=True, slots=True)
class Started:
    """The worker's process has been started. ``host`` is its host, empty for this machine."""

    worker: WorkerId
    pid: int
    host: str = ""


@dataclass(frozen=True, slots=True)
class Began:
    """The worker has built what the user declared and begins its loop."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Ended:
    """The worker has ended cleanly.

    ``unwanted`` is the number of its items whose readers had left. ``early`` means that its outputs have no
    readers.
    """

    worker: WorkerId
    unwanted: int = 0
    early: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """The worker has ended by ``error``, which the user's code raised.

    Attributes:
        worker: The worker. Number 0 means that it is unknown.
        error: The exception. On its way between processes it is a ``Portable``, which arrives as the
            exception.
        item: The text of the item that the worker held.
        pid: Its process.
        channel: The name of the channel that was aborted with the error, if one was.
        host: The host on which it ran, empty for this machine.
    """

    worker: WorkerId
    error: Any
    item: str | None
    pid: int
    channel: str | None = None
    host: str = ""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The worker is about to abort one of its channels.

    ``at`` is the time in ns by the machine's monotonic clock.
    """

    worker: WorkerId
    channel: str
    error: Any  # like that of a Failure; None: no cause was given
    pid: int
    at: int
    host: str = ""


@dataclass(frozen=True, slots=True)
class Met:
    """The worker has found these channels broken, and is about to break all its others."""

    worker: WorkerId
    channels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TriesMember:
    """A worker is about to call the function with members of a batch over which workers have died.

    The number of the member, or None for several of them. Only the crew receives this event.
    """

    worker: WorkerId
    member: int | None


@dataclass(frozen=True, slots=True)
class MembersTried:
    """A worker has tried all members of such a batch and is about to put its outputs.

    Only the crew receives this event.
    """

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Retried:
    """The worker tries an item again."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class ErrorSent:
    """An item has failed and went to the errors stream.

    ``text`` gives the reason in one line. Not every such item is reported.
    """

    worker: WorkerId
    text: str


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a request: a ``value``, or the ``error`` by which the item failed.

    ``failed`` is how many items of the stage then count as failed.
    """

    worker: WorkerId
    question: int
    value: Any
    error: Any  # like that of a Failure
    failed: int = 0


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """No caller waits for the answer to this request any more.

    Agents receive this event too, so that the next worker drops the item.
    """

    question: int


@dataclass(frozen=True, slots=True)
class Result:
    """A stage has the value that is a result of the run."""

    stage: str
    value: Any


@dataclass(frozen=True, slots=True)
class GroupLost:
    """The worker of an elastic gang waits for a group.

    ``failure`` ended its last group; None: the worker has just begun.
    """

    worker: WorkerId
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The process of a worker has ended after the worker had reported its end.

    All its other reports come first.
    """

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Death:
    """The process of a worker has ended without a report of how the worker ended.

    All reports of the worker come first. The event holds everything that decisions need.

    Attributes:
        worker: The worker.
        how: Its end in words.
        pid: Its process; 0 if unknown.
        exitcode: Its exit code, negative for a signal, if known.
        host: The host on which it ran, empty for this machine.
        over_item: How many workers, including this one, have died over its item; 0 if it died outside the
            user's code.
        deaths: The same number, without members of a batch that were found to kill. Without an item, how many
            have died in quick succession.
        unbegun: How many, including this one, have died in a row before they began to work.
        counts: Whether it uses one of the restarts of its stage. The death of a host does not.
        retired: Whether the worker asked for a fresh process (``Retires``), which is not reported.
        always: Whether it is replaced whatever the limit of its stage, because an item exceeded its time
            limit.
        irreplaceable: Why its stage can't continue with a replacement; empty if it can.
        hint: A possible cause, for the message.
        error: The error of the run, if a replacement would fail as well.
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
        """The end in words, with the known facts about the item; empty if there is nothing to report."""
        if self.retired:
            return ""
        if not self.over_item:
            return self.how
        others = "" if self.over_item == 1 else f", like {self.over_item - 1} before it on the same item"
        return f"{self.how} while it worked on an item{others}"


@dataclass(frozen=True, slots=True)
class Crashed:
    """The crew itself failed: workers can no longer report."""

    error: BaseException


Event = (
    Started
    | Began
    | Ended
    | Failure
    | Aborted
    | Met
    | TriesMember
    | MembersTried
    | Retried
    | ErrorSent
    | Answered
    | RequestCancelled
    | Result
    | GroupLost
    | ProcessEnded
    | Death
    | Crashed
)


# --- events that the supervisor adds to the feed of the run ---


@dataclass(frozen=True, slots=True)
class RunBegan:
    """The run has begun with this number of workers."""

    workers: int
    seed: int


@dataclass(frozen=True, slots=True)
class NotAdded:
    """An additional worker of a stage could not be started. ``text`` gives the reason."""

    worker: WorkerId
    text: str


@dataclass(frozen=True, slots=True)
class Warned:
    """The run continues, but the user should know this about a stage."""

    stage: str
    text: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run has ended in this state, except for threads that are ``stuck`` in the user's code."""

    state: str
    seconds: float
    stuck: frozenset[WorkerId]

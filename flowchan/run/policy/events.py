"""Define the events that workers and the crew report to the supervisor.

Most events are sent from one process to another, and must therefore be picklable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowchan.run.policy.lineage import Left


@dataclass(frozen=True, slots=True)
class WorkerId:
    """Identifies a worker by its stage and its number in the stage, from 1."""

    stage: str
    number: int

    def __str__(self) -> str:
        return f"{self.stage} {self.number}"


@dataclass(frozen=True, slots=True)
class Started:
    """A worker's process was started on ``host``, or on this machine if ``host`` is empty."""

    worker: WorkerId
    pid: int
    host: str = ""


@dataclass(frozen=True, slots=True)
class Began:
    """The worker has built its callable and begins to work."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Ended:
    """The worker has ended without an error.

    ``unwanted`` is the number of items that the worker took although its outputs had no readers. ``early`` is
    true if the worker ended because of this.
    """

    worker: WorkerId
    unwanted: int = 0
    early: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """The worker has ended because of ``error``, which user code raised.

    Attributes:
        worker: The worker. Number 0 means that the number is unknown.
        error: The exception. Between processes, it is sent as a ``Portable``, which unpickles as the
            exception.
        item: Description of the item that the worker was processing, as text.
        pid: Process ID of the worker.
        channel: Name of the channel that this error broke, if any.
        host: Host of the worker; empty for this machine.
    """

    worker: WorkerId
    error: Any
    item: str | None
    pid: int
    channel: str | None = None
    host: str = ""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The worker is about to abort a channel.

    ``at`` is the time on the monotonic clock of its machine, in nanoseconds.
    """

    worker: WorkerId
    channel: str
    error: Any  # the exception in the form that Failure describes, or None
    pid: int
    at: int
    host: str = ""


@dataclass(frozen=True, slots=True)
class Met:
    """The worker has found these channels broken, and is about to break its other channels."""

    worker: WorkerId
    channels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TriesMember:
    """The worker is about to call its function with members of a batch on which workers have died.

    ``member`` is the number of the only member, or None if there are several. Only the crew receives this
    event.
    """

    worker: WorkerId
    member: int | None


@dataclass(frozen=True, slots=True)
class MembersTried:
    """The worker has tried all members of a batch on which workers have died, and will now put its outputs.

    Only the crew receives this event.
    """

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Retried:
    """The worker is about to retry an item after an error."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class ErrorSent:
    """An item has failed and was sent to the ``errors`` stream.

    ``text`` gives the reason in one line. For some failed items, no event is sent.
    """

    worker: WorkerId
    text: str


@dataclass(frozen=True, slots=True)
class Answered:
    """Answer to a request: its ``value``, or the ``error`` of the failed item.

    ``failed`` is the number to add to the stage's count of failed items.
    """

    worker: WorkerId
    question: int
    value: Any
    error: Any  # the exception in the form that Failure describes, or None
    failed: int = 0


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The caller no longer waits for the answer to this request.

    The event also goes to the agents, so that the next worker can drop the item.
    """

    question: int


@dataclass(frozen=True, slots=True)
class Result:
    """A stage has produced the final value of a result."""

    stage: str
    value: Any


@dataclass(frozen=True, slots=True)
class GroupLost:
    """A worker of an elastic gang waits for a new group.

    ``failure`` ended the worker's last group, and is None if the worker has just started.
    """

    worker: WorkerId
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """A worker's process has ended after the worker reported its end.

    This is the last event from the worker.
    """

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Death:
    """A worker's process has ended before the worker reported its end.

    This is the last event from the worker, and contains everything that the decision needs.

    Attributes:
        worker: The worker.
        how: How the process ended.
        pid: Process ID of the worker; 0 if unknown.
        exitcode: Exit code, negative for a signal; None if unknown.
        host: Host of the worker; empty for this machine.
        over_item: Number of workers, including this worker, that died while processing the same item; 0 if
            this worker died outside user code.
        deaths: Number of deaths that determines the delay of the replacement: ``over_item`` without deaths on
            batch members that are known to kill workers. Without an item, it is the number of deaths in quick
            succession.
        unbegun: Number of consecutive workers, including this worker, that died before they began to work.
        counts: True if the death uses up one of the stage's restarts. The loss of a host does not.
        retired: True if the worker asked for a new process (``Retires``). The user sees no report of this.
        always: True if the worker is replaced regardless of the restart limit, because an item took too long.
        irreplaceable: Reason why no replacement can continue the stage; empty if one can.
        hint: Possible cause, for the error message.
        error: Error that ends the run because a replacement would fail in the same way.
        stack: Python stacks that the process wrote before a time limit killed it; empty if unknown.
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
    stack: str = ""

    @property
    def summary(self) -> str:
        """Describe the death and the item in words. The text is empty if the worker retired as planned."""
        if self.retired:
            return ""
        if not self.over_item:
            return self.how
        repeated = "" if self.over_item == 1 else f" (death {self.over_item} over this item)"
        return f"{self.how} while it was processing an item{repeated}"


@dataclass(frozen=True, slots=True)
class Crashed:
    """The crew itself has failed, so that workers can no longer report events."""

    error: BaseException


ItemSpan = tuple[tuple[int, ...], int, int]
"""Marks of sampled items, and the times in nanoseconds of taking them and of putting the first output."""


@dataclass(frozen=True, slots=True)
class ItemSpans:
    """The worker has finished sampled items.

    Attributes:
        worker: The worker.
        spans: One span for each time that the worker has taken sampled items.
    """

    worker: WorkerId
    spans: tuple[ItemSpan, ...]

    def shifted(self, by: int) -> ItemSpans:
        """Return the spans converted to a clock that is ``by`` nanoseconds ahead."""
        moved = tuple((marks, taken + by, put + by) for marks, taken, put in self.spans)
        return ItemSpans(self.worker, moved)


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
    | ItemSpans
    | Left
)


# --- events that the supervisor adds to the run's feed ---


@dataclass(frozen=True, slots=True)
class RunBegan:
    """The run has started with this number of workers."""

    workers: int
    seed: int


@dataclass(frozen=True, slots=True)
class NotAdded:
    """An additional worker could not be started; ``text`` gives the reason."""

    worker: WorkerId
    text: str


@dataclass(frozen=True, slots=True)
class Warned:
    """A stage has a problem that does not end the run."""

    stage: str
    text: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run has ended in ``state``. The threads in ``stuck`` are still running user code."""

    state: str
    seconds: float
    stuck: frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class ItemTraced:
    """A sampled item has reached an end of the graph.

    Attributes:
        source: Name of the stage that produced the item.
        number: Number of the sample in the run.
        spans: Stages that the item passed through, in order. Each entry contains the stage, the worker, and
            the times at which the worker took the item and put its first output. Times are in seconds on the
            clock of ``time.monotonic``.
    """

    source: str
    number: int
    spans: tuple[tuple[str, int, float, float], ...]

    @property
    def path(self) -> tuple[str, ...]:
        """Return the names of the stages that the item passed through."""
        return tuple(stage for stage, _, _, _ in self.spans)

    @property
    def latency(self) -> float:
        """Return the time from the source's put until the item was finished, in seconds."""
        return self.spans[-1][3] - self.spans[0][2]

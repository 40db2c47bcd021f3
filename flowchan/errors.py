"""Every exception of flowchan, one family under :class:`FlowchanError`.

A channel call ends in one of five ways: it worked; *not now* (:class:`Full`, :class:`Empty`); somebody closed
the channel (:class:`Closed`, and :class:`Drained` at its clean end); it ended by failure (:class:`Broken`);
or the call itself was wrong (``TypeError``, ``ValueError``). A graph call adds :class:`GraphError` (the
declaration is wrong) and :class:`RunError` (a stage failed while running), and Ctrl-C an :class:`Interrupted`
that keeps what was finished.
"""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


class FlowchanError(Exception):
    """Base of all errors that flowchan raises on its own account."""


class ChannelError(FlowchanError):
    """Base of everything a channel call can raise besides misuse."""


class Closed(ChannelError):
    """The channel was closed, so nothing can be put into it any more. Whoever called ``close()`` caused it,
    or the last reader that left."""


class Drained(Closed):
    """The clean end: the channel is closed, empty, and no item is out on lease. Iteration turns it into its
    end."""


class Broken(ChannelError):
    """The channel ended by failure: ``abort(cause)`` was called, a process with a counted writer died, or its
    memory was found damaged. ``__cause__`` is the cause."""


class Full(ChannelError, queue.Full, TimeoutError):
    """Nothing could be put *now*, or within ``timeout`` seconds: the channel is full."""


class Empty(ChannelError, queue.Empty, TimeoutError):
    """Nothing could be got *now*, or within ``timeout`` seconds: the channel is empty, and not yet at its
    end."""


class WorkerDied(FlowchanError):
    """A worker process ended without a word: it was killed, it crashed, or something in it called
    ``os._exit``. ``exitcode`` is the process's exit code, minus the signal's number; ``pid`` was its
    process."""

    def __init__(self, message: str, *, exitcode: int | None = None, pid: int | None = None) -> None:
        super().__init__(message)
        self.exitcode = exitcode
        self.pid = pid

    def __reduce__(self) -> tuple[Any, ...]:
        return _worker_died, (str(self), self.exitcode, self.pid)


def _worker_died(message: str, exitcode: int | None, pid: int | None) -> WorkerDied:
    return WorkerDied(message, exitcode=exitcode, pid=pid)


class HostError(FlowchanError):
    """A host can't be used: its agent can't be started, or does not answer. ``host`` is its name, empty where
    it is about all of them."""

    def __init__(self, message: str, host: str = "") -> None:
        super().__init__(message)
        self.host = host

    def __reduce__(self) -> tuple[Any, ...]:
        return HostError, (str(self), self.host)


class Refused(FlowchanError, ConnectionError):
    """A connection between hosts came to nothing: the other end did not prove that it knows the secret, was
    silent, or spoke otherwise. The message names its address."""


class GroupError(FlowchanError):
    """Base of all that an operation of a group can end by on its own account."""


class MemberDied(GroupError):
    """A member of a group ended, or gave up in the middle of an operation, and without it the operation can
    never be done. All surviving members raise it, or none. ``ranks`` names those that are gone,
    ``operation`` what was called here."""

    def __init__(self, message: str, ranks: Sequence[int] = (), operation: str = "") -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.operation = operation

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.ranks, self.operation)


class MemberLeft(MemberDied):
    """A member closed its group while others still call operations."""


class Mismatch(GroupError, ValueError):
    """The members of a group called different operations, or the same one with arguments that do not fit
    together. All raise it, the message names every call, and the group can be used further."""


class Deadlock(FlowchanError):
    """Every worker of a run waited for a channel, and nothing was in flight: nobody could ever move again.
    The message says who waited for whom."""


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the user's source text."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a graph: ``rule`` is a short stable word ("cycle", "unread", "pickle", …).
    ``stage`` is empty where the graph as a whole is wrong."""

    rule: str
    stage: str
    where: Where
    message: str

    def __str__(self) -> str:
        subject = f"stage {self.stage!r}: " if self.stage else ""
        return f"{self.where}: {subject}{self.message}"


class GraphError(FlowchanError):
    """The declaration of a graph is wrong. ``problems`` lists everything that ``check``
    found."""

    def __init__(self, graph: str, problems: Sequence[Problem]) -> None:
        self.graph = graph
        self.problems = tuple(problems)
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"graph {graph!r} has {count} problem{'s' if count != 1 else ''}:\n{lines}")

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphError, (self.graph, self.problems)


class StageError(FlowchanError):
    """A stage failed. ``stage`` and ``worker`` name it, ``item`` is the text of the item in hand (``None``
    when it had none), and ``__cause__`` is the exception of the user's function, with the worker's own
    traceback as a note."""

    def __init__(self, message: str, *, stage: str, worker: str, item: str | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.worker = worker
        self.item = item

    def __reduce__(self) -> tuple[Any, ...]:  # a run inside a worker process fails there, and is told here
        return _stage_error, (str(self), self.stage, self.worker, self.item, self.__cause__), self.__dict__


def _stage_error(
    message: str, stage: str, worker: str, item: str | None, cause: BaseException | None
) -> StageError:
    error = StageError(message, stage=stage, worker=worker, item=item)
    error.__cause__ = cause
    return error


class Interrupted(KeyboardInterrupt):
    """Ctrl-C (or SIGTERM in ``graph.run()``) ended a run.

    Attributes:
        results: What was finished, as ``run.wait()`` returns it, and the items that ``run.iter()`` had not
            given yet.
        report: The run's report as text.
        signal: The number of the signal, ``signal.SIGINT`` or ``signal.SIGTERM``.
        __cause__: The :class:`RunError` of a stage that failed before the run ended.
    """

    def __init__(
        self,
        message: str,
        tell: Callable[[Interrupted], tuple[Mapping[Any, Any], str]],
        number: int = signal.SIGINT,
    ) -> None:
        super().__init__(message)
        self.signal = number
        self._tell = tell  # the results and the report; waits for the end of a run that still goes on

    @property
    def results(self) -> Mapping[Any, Any]:
        return self._tell(self)[0]

    @property
    def report(self) -> str:
        return self._tell(self)[1]


class RunError(ExceptionGroup[StageError], FlowchanError):
    """A run failed. ``exceptions`` holds one :class:`StageError` per failure, the first failure first."""

    if TYPE_CHECKING:  # of a group Python says that it may hold others

        @property
        def exceptions(self) -> tuple[StageError, ...]: ...

    def derive(self, excs: Sequence[StageError]) -> RunError:  # type: ignore[override]
        return RunError(self.message, excs)

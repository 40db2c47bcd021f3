"""Define flowchan's exceptions, all of which derive from :class:`FlowchanError`.

A channel call ends in one of five ways:

- It succeeds.
- It cannot succeed at the moment: :class:`Full` or :class:`Empty`.
- The channel is closed: :class:`Closed`, or :class:`Drained` if it ended cleanly.
- The channel failed: :class:`Broken`.
- An argument is wrong: ``TypeError`` or ``ValueError``.

A graph call may also raise :class:`GraphError` (the declaration is wrong) or :class:`RunError` (a stage
failed). Ctrl-C raises :class:`Interrupted`, which contains the results so far.
"""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowchan.public import public


@public
class FlowchanError(Exception):
    """Base class of flowchan's exceptions."""


@public
class ChannelError(FlowchanError):
    """Base class of the exceptions that channel calls raise, except for invalid arguments."""


@public
class Closed(ChannelError):
    """The channel is closed and accepts no more items.

    A channel closes when ``close()`` is called, its last reader closes, or its last writer closes.

    Example:
        >>> from flowchan import Channel, Closed
        >>> channel = Channel()
        >>> channel.close()
        >>> try:
        ...     channel.put("a")
        ... except Closed:
        ...     print("closed")
        closed
    """


@public
class Drained(Closed):
    """The channel ended cleanly: it is closed and empty, and no item is leased.

    A ``for`` loop over the channel ends without an exception in this case.

    Example:
        >>> from flowchan import Channel, Drained
        >>> channel = Channel()
        >>> channel.close()
        >>> try:
        ...     channel.get()
        ... except Drained:
        ...     print("no more items")
        no more items
    """


@public
class Broken(ChannelError):
    """The channel failed; ``__cause__`` gives the reason.

    A channel breaks if ``abort(cause)`` is called, a process with a counted writer dies, or its shared memory
    is damaged.

    Example:
        >>> from flowchan import Broken, Channel
        >>> channel = Channel()
        >>> channel.abort(ValueError("bad input"))
        >>> try:
        ...     channel.get()
        ... except Broken as error:
        ...     print(error.__cause__)
        bad input
    """


@public
class Full(ChannelError, queue.Full, TimeoutError):
    """The channel had no room for the item, immediately or within ``timeout`` seconds.

    Example:
        >>> from flowchan import Channel, Full
        >>> channel = Channel(capacity=1)
        >>> channel.put("a")
        >>> try:
        ...     channel.put("b", timeout=0.01)
        ... except Full:
        ...     print("full")
        full
    """


@public
class Empty(ChannelError, queue.Empty, TimeoutError):
    """The channel had no item, immediately or within ``timeout`` seconds, but is still open.

    Example:
        >>> from flowchan import Channel, Empty
        >>> channel = Channel()
        >>> try:
        ...     channel.get(timeout=0.01)
        ... except Empty:
        ...     print("empty")
        empty
    """


@public
class WorkerDied(FlowchanError):
    """A worker process died: it was killed, crashed, or called ``os._exit``.

    Attributes:
        exitcode: Exit code of the process, or the negated number of the signal that killed it; ``None`` if
            unknown.
        pid: Process ID, or ``None`` if unknown.

    Example:
        >>> import os
        >>> from flowchan import Graph, RunError
        >>> graph = Graph()
        >>> graph.source([0]).sink(lambda _: os._exit(3), on="process", restarts=0)
        >>> try:
        ...     graph.run()
        ... except RunError as error:
        ...     died = error.exceptions[0].__cause__
        >>> type(died).__name__, died.exitcode
        ('WorkerDied', 3)
    """

    def __init__(self, message: str, *, exitcode: int | None = None, pid: int | None = None) -> None:
        super().__init__(message)
        self.exitcode = exitcode
        self.pid = pid

    def __reduce__(self) -> tuple[Any, ...]:
        return _worker_died, (str(self), self.exitcode, self.pid)


def _needs_native(problem: str) -> RuntimeError:
    """Return the error for a call that the pure-Python core does not support."""
    return RuntimeError(
        f"{problem}; processes and hosts need flowchan's native module, which is available only on Linux"
    )


def _worker_died(message: str, exitcode: int | None, pid: int | None) -> WorkerDied:
    return WorkerDied(message, exitcode=exitcode, pid=pid)


@public
class ChildDied(FlowchanError):
    """A child of ``flowchan.pipelines.children`` died: it was killed, it crashed, or its host was lost.

    Attributes:
        number: Number of the child.
        host: Name of the child's host; empty if the child ran on the program's machine.
        pid: Process ID on that host; 0 if unknown.
        signal: Number of the signal that killed the child; ``None`` if there was none or it is unknown.
        exitcode: Exit code of the child; ``None`` if a signal killed the child or the code is unknown.

    Example:
        >>> import os
        >>> from flowchan import ChildDied
        >>> from flowchan.pipelines import children
        >>> with children.start(2) as kids:
        ...     kids.run(lambda parent: os._exit(3) if parent.number == 2 else parent.pause())
        ...     try:
        ...         kids.join()
        ...     except ChildDied as error:
        ...         print(error.number, error.exitcode)
        2 3
    """

    def __init__(
        self,
        message: str,
        *,
        number: int = 0,
        host: str = "",
        pid: int = 0,
        signal: int | None = None,
        exitcode: int | None = None,
    ) -> None:
        super().__init__(message)
        self.number, self.host, self.pid = number, host, pid
        self.signal, self.exitcode = signal, exitcode

    def __reduce__(self) -> tuple[Any, ...]:
        return _child_died, (str(self), self.number, self.host, self.pid, self.signal, self.exitcode)


def _child_died(
    message: str, number: int, host: str, pid: int, signal: int | None, exitcode: int | None
) -> ChildDied:
    return ChildDied(message, number=number, host=host, pid=pid, signal=signal, exitcode=exitcode)


@public
class HostError(FlowchanError):
    """A host is unusable because its agent did not start or does not answer.

    Attributes:
        host: Name of the host; empty if the error concerns all hosts.

    Example:
        >>> from flowchan import Graph, HostError, hosts
        >>> graph = Graph()
        >>> graph.source(range(3)).sink(print, on=hosts.ssh("gpu1"))
        >>> try:
        ...     graph.run()
        ... except* HostError as errors:
        ...     print(errors.exceptions[0].host)
    """

    def __init__(self, message: str, host: str = "") -> None:
        super().__init__(message)
        self.host = host

    def __reduce__(self) -> tuple[Any, ...]:
        return HostError, (str(self), self.host)


@public
class Refused(FlowchanError, ConnectionError):
    """The handshake of a connection between hosts failed.

    The peer did not prove that it knows the secret, did not answer, or spoke another protocol. The message
    contains the peer's address.
    """


@public
class GroupError(FlowchanError):
    """Base class of the exceptions that group operations raise.

    Example:
        >>> from flowchan import GroupError
        >>> from flowchan.collective import group
        >>> g = group()
        >>> g.close()
        >>> try:
        ...     g.barrier()
        ... except GroupError:
        ...     print("this member was closed")
        this member was closed
    """


@public
class MemberDied(GroupError):
    """A group member died or gave up during an operation, so the operation cannot complete.

    Either all surviving members raise this exception, or none does.

    Attributes:
        ranks: Ranks of the lost members.
        operation: Name of the failed operation.

    Example:
        >>> from flowchan import MemberDied
        >>> from flowchan.collective import group
        >>> with group(rank=0, size=4, at="10.0.0.1:4711", secret=b"sixteen secret b") as g:
        ...     try:
        ...         g.barrier()
        ...     except MemberDied as error:
        ...         print(error.ranks, error.operation)
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), operation: str = "") -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.operation = operation

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.ranks, self.operation)


@public
class MemberLeft(MemberDied):
    """A member closed its group while others were still calling operations.

    Example:
        >>> from flowchan import MemberLeft
        >>> from flowchan.collective import members
        >>> first, second = members(2)
        >>> with first:
        ...     pass
        >>> try:
        ...     second.barrier()
        ... except MemberLeft as error:
        ...     print(error.ranks, error.operation)
        (0,) barrier
    """


@public
class Mismatch(GroupError, ValueError):
    """Group members called different operations, or the same one with conflicting arguments.

    All members raise this exception, whose message lists their calls. The group stays usable.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from flowchan import Mismatch
        >>> from flowchan.collective import members
        >>> def work(g):
        ...     try:
        ...         g.barrier() if g.rank else g.allreduce(1)
        ...     except Mismatch:
        ...         return "mismatch"
        >>> with ThreadPoolExecutor(2) as threads:
        ...     list(threads.map(work, members(2)))
        ['mismatch', 'mismatch']
    """


@public
class LateItem(FlowchanError):
    """An item arrived after its windows had closed, or after its possible partners in a join were dropped.

    If another stage reads this stage's ``errors`` stream, the item goes there. Otherwise the run ends with
    this error.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> windows = graph.source([1, 12, 3]).window(seconds=10, time=float)
        >>> sums, late = windows.map(lambda window: sum(window.items)).collect(), windows.errors.collect()
        >>> results = graph.run()
        >>> results[sums], [failed.item for failed in results[late]]
        ([1, 12], [3])
    """


@public
class Deadlock(FlowchanError):
    """All workers were waiting for channels and no item was in flight. The run could not continue.

    The message lists each waiting worker with its channel.

    Example:
        >>> from flowchan import Deadlock, Graph, In, RunError
        >>> def one_after_the_other(first: In[int], second: In[int]) -> None:
        ...     list(first), list(second)
        >>> graph = Graph()
        >>> graph.stage(one_after_the_other, *graph.source(range(1000)).tee(2))
        >>> try:
        ...     graph.run()
        ... except RunError as error:
        ...     print(type(error.exceptions[0].__cause__).__name__)
        Deadlock
    """


@dataclass(frozen=True, slots=True)
class Where:
    """Identify a line in the user's source code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@public
@dataclass(frozen=True, slots=True)
class Problem:
    """Problem that ``check`` found in a graph.

    Attributes:
        rule: Short, stable name of the violated rule, such as "cycle", "unread" or "pickle".
        stage: Name of the stage; empty if the problem concerns the whole graph.
        where: Source line of the declaration.
        message: Description of the problem and its remedy.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> numbers = graph.source(range(3))
        >>> [(problem.rule, problem.stage) for problem in graph.check()]
        [('unread', 'source')]
    """

    rule: str
    stage: str
    where: Where
    message: str

    def __str__(self) -> str:
        subject = f"stage {self.stage!r}: " if self.stage else ""
        return f"{self.where}: {subject}{self.message}"


@public
class GraphError(FlowchanError):
    """The declaration of a graph is wrong.

    Attributes:
        graph: Name of the graph.
        problems: Every :class:`Problem` that ``check`` found.

    Example:
        >>> from flowchan import Graph, GraphError
        >>> graph = Graph()
        >>> numbers = graph.source(range(3))
        >>> try:
        ...     graph.run()
        ... except GraphError as error:
        ...     print(error.problems[0].rule)
        unread
    """

    def __init__(self, graph: str, problems: Sequence[Problem]) -> None:
        self.graph = graph
        self.problems = tuple(problems)
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        count = len(self.problems)
        super().__init__(f"graph {graph!r} has {count} problem{'s' if count != 1 else ''}:\n{lines}")

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphError, (self.graph, self.problems)


@public
class StageError(FlowchanError):
    """A stage failed.

    ``__cause__`` is the exception that the user's function raised, with the worker's traceback as a note.

    Attributes:
        stage: Name of the stage.
        worker: Name of the worker.
        item: Text of the item that the worker was processing; ``None`` if it had none.

    Example:
        >>> from flowchan import Graph, RunError
        >>> graph = Graph()
        >>> graph.source(["1", "x"]).sink(int)
        >>> try:
        ...     graph.run()
        ... except RunError as error:
        ...     failure = error.exceptions[0]
        >>> failure.stage, failure.item, type(failure.__cause__).__name__
        ('int', "'x'", 'ValueError')
    """

    def __init__(self, message: str, *, stage: str, worker: str, item: str | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.worker = worker
        self.item = item

    # A graph may run inside a worker process, which pickles its errors and sends them to the program.
    def __reduce__(self) -> tuple[Any, ...]:
        return _stage_error, (str(self), self.stage, self.worker, self.item, self.__cause__), self.__dict__


def _stage_error(
    message: str, stage: str, worker: str, item: str | None, cause: BaseException | None
) -> StageError:
    error = StageError(message, stage=stage, worker=worker, item=item)
    error.__cause__ = cause
    return error


@public
class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended a run.

    Attributes:
        results: Results that were complete, in the form that ``run.wait()`` returns. A stream read by
            ``run.iter()`` contains only the items that were not yielded yet.
        report: Report of the run, as text.
        signal: Number of the signal: ``signal.SIGINT`` or ``signal.SIGTERM``.
        __cause__: The :class:`RunError` if a stage failed before the run ended.

    Example:
        >>> import signal
        >>> from flowchan import Graph, Interrupted
        >>> graph = Graph()
        >>> items = graph.input()
        >>> squares = items.map(lambda n: n * n).collect()
        >>> try:
        ...     with graph.start() as run:
        ...         run[items].put(3)
        ...         signal.raise_signal(signal.SIGINT)  # as Ctrl-C does
        ... except Interrupted as error:
        ...     print(error.results[squares])
        [9]
    """

    def __init__(
        self,
        message: str,
        tell: Callable[[Interrupted], tuple[Mapping[Any, Any], str]],
        number: int = signal.SIGINT,
    ) -> None:
        super().__init__(message)
        self.signal = number
        # Waits for the end of the run, then returns its results and report.
        self._tell = tell

    @property
    def results(self) -> Mapping[Any, Any]:
        """Return the results that were complete when the run ended."""
        return self._tell(self)[0]

    @property
    def report(self) -> str:
        """Return the run's report."""
        return self._tell(self)[1]


@public
class RunError(ExceptionGroup[StageError], FlowchanError):
    """A run failed; ``exceptions`` has one :class:`StageError` for each failure, in order.

    Example:
        >>> from flowchan import Graph, RunError
        >>> graph = Graph()
        >>> graph.source(["1", "x"]).sink(int)
        >>> try:
        ...     graph.run()
        ... except RunError as error:
        ...     print(error.exceptions[0].stage)
        int
    """

    if TYPE_CHECKING:  # typeshed's type would also allow nested groups

        @property
        def exceptions(self) -> tuple[StageError, ...]:
            """One :class:`StageError` for each failure, in order."""

    def derive(self, excs: Sequence[StageError]) -> RunError:  # type: ignore[override]
        """Return an error with the same message for some of the failures; ``except*`` requires this method.

        Args:
            excs: The failures of the new error.

        Returns:
            The new error.
        """
        return RunError(self.message, excs)

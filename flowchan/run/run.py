"""Define the handle of an active run: the methods that users call, and the results."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from types import TracebackType
from typing import Any, TypeVar, cast

from flowchan.channel.channel import Out
from flowchan.declare.fixed_workers import fixed_workers
from flowchan.declare.input_stream import Input
from flowchan.declare.stream import Stream
from flowchan.errors import Broken, Interrupted, RunError
from flowchan.items.arguments import flag, refuses_misspelt, seconds, whole
from flowchan.items.text import shown
from flowchan.items.tracebacks import methods_end_at_caller
from flowchan.public import public
from flowchan.run.crew.pool_processes import PooledProcesses
from flowchan.run.crew.router import CrewRouter
from flowchan.run.crew.run_ports import RunPorts
from flowchan.run.interruption import Interruption
from flowchan.run.observe.run_trace import RunTrace
from flowchan.run.observed_run import ObservedRun, follow_items_at_program
from flowchan.run.policy.decisions import AbortRequested, StopRequested
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.plan import Plan
from flowchan.run.policy.scaling import Scale
from flowchan.run.result_iterator import ResultIterator
from flowchan.run.results import ResultGathering, Results
from flowchan.run.resume_file import ResumeFile
from flowchan.run.supervisor import Supervisor
from flowchan.run.unfinished_runs import end_at_exit
from flowchan.run.worker.item_timeout import set_message
from flowchan.run.worker.requests import NOTHING, Requests, answering_ends
from flowchan.transport.interrupts import (
    InterruptWatch,
    interrupts_deferred,
    signal_of,
    terminate_as_interrupt,
)

T = TypeVar("T")


@public
@methods_end_at_caller
class Run(ObservedRun):
    """Started run of a graph. ``run[stream]`` is the writing end of an ``input()`` stream.

    Use the run as a context manager. Leaving the block closes the inputs and waits for the run to end. If an
    exception leaves the block, the run is aborted first.

    Ctrl-C, in the block or in a method that waits, stops the sources. Items in flight are finished unless a
    second Ctrl-C aborts the run. The exception :class:`~flowchan.Interrupted` contains the results.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> questions = graph.input()
        >>> answers = questions.map(str.upper).collect()
        >>> with graph.start() as run:
        ...     run[questions].put("why?")
        >>> run.state, run.wait()[answers]
        ('done', ['WHY?'])
    """

    def __init__(
        self,
        plan: Plan,
        pooled: PooledProcesses | None = None,
        recording: ResumeFile | None = None,
        trace: RunTrace | None = None,
    ) -> None:
        self._plan = plan
        self._pooled = pooled is not None
        self._ports = RunPorts(plan)
        self._crew = CrewRouter(self._ports, pooled)
        self._supervisor = Supervisor(plan, self._crew, self._ports, recording)
        self._gathering = ResultGathering(self._ports, self._crew.local, self._supervisor)
        self._interruption = Interruption(plan, self._supervisor, self._ports, self._gathering)
        # Weak references, so that a dropped run is freed without garbage collection.
        interrupted = weakref.WeakMethod(self._interrupted)
        self._interrupts = InterruptWatch(
            lambda number: method(number) if (method := interrupted()) is not None else None
        )
        self._in_block = False
        self._answering: set[str] = set()  # inputs that ask() has used
        take_in = weakref.WeakMethod(self._gathering.take_in)
        self._supervisor.take_in = lambda ids: method(ids) if (method := take_in()) is not None else None
        failure = weakref.WeakMethod(self._interruption.failure)
        cancel = weakref.WeakMethod(self._supervisor.cancel_request)
        self._asking = Requests(
            lambda: method() if (method := failure()) is not None else None,
            lambda question: method(question) if (method := cancel()) is not None else None,
        )
        self._supervisor.asking = self._asking
        if pooled is not None:  # the end of the pool's `with` block must wait for this run
            self._supervisor.unreported.append(self)
        if plan.samples_items:
            follow_items_at_program(self._supervisor, self._ports)
        if trace is not None:
            trace.follow(plan, self._ports, self._supervisor.feed)
        self._supervisor.start()
        if trace is not None:
            trace.start()
        end_at_exit(self._supervisor)

    # --- inputs and results ---

    def __getitem__(self, stream: Input[T]) -> Out[T]:
        """Return the writing end of an input. Inputs with ``per_worker`` accept pairs ``(worker, item)``.

        Args:
            stream: Stream that ``graph.input()`` returned.

        Returns:
            The writing end of the input.

        Raises:
            KeyError: The stream is not an input of this run.
        """
        if not self._owns(stream) or stream.stage not in self._ports.inputs:
            raise KeyError(
                f"{stream!r} is not an input of this run; use the stream that graph.input() returned"
            )
        return cast(Out[T], self._ports.inputs[stream.stage])

    def iter(self, stream: Stream[list[T]]) -> Iterator[T]:
        """Iterate over the items of a ``collect`` stream while the graph runs.

        Leaving the loop early stops the stages that feed this stream.

        Args:
            stream: Stream that ``collect()`` returned.

        Returns:
            An iterator for one loop.

        Raises:
            RunError: The run failed.
            TypeError: ``stream`` is not a stream but, for example, a name.
            ValueError: The stream is not a result of this run, or its items are already taken.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> squares = graph.source(range(3)).map(lambda n: n * n).collect()
            >>> with graph.start() as run:
            ...     for square in run.iter(squares):
            ...         print(square)
            0
            1
            4
        """
        return self._items(self._claimed(stream))

    def aiter(self, stream: Stream[list[T]]) -> AsyncIterator[T]:
        """Iterate over the items of a ``collect`` stream with ``async for``.

        Args:
            stream: Stream that ``collect()`` returned.

        Returns:
            An asynchronous iterator for one loop.

        Raises:
            RunError: The run failed.
            TypeError: ``stream`` is not a stream but, for example, a name.
            ValueError: The stream is not a result of this run, or its items are already taken.

        Example:
            >>> import asyncio
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> squares = graph.source(range(3)).map(lambda n: n * n).collect()
            >>> async def main():
            ...     with graph.start() as run:
            ...         return [square async for square in run.aiter(squares)]
            >>> asyncio.run(main())
            [0, 1, 4]
        """
        stage = self._claimed(stream)
        return ResultIterator(self._items_later(stage), functools.partial(self._leave, stage))

    def _claimed(self, stream: Stream[list[T]]) -> str:
        """Reserve a result for a loop in the program, and return the name of its stage."""
        if not isinstance(stream, Stream):
            raise TypeError(f"iter: stream must be the stream that collect() returned, got {shown(stream)}")
        if not self._owns(stream):
            raise ValueError(f"{stream!r} does not belong to graph {self._plan.graph.name!r}")
        stage = self._plan.graph._stage_at(stream._origin)
        if not any(worker.gathers for worker in self._plan.workers if worker.stage is stage):
            raise ValueError(
                f"{stream!r} is not a result of the graph; call collect() on this stream, and iterate "
                "over the stream that collect() returns"
            )
        if not self._gathering.claim(stage.name):
            raise ValueError(f"the items of {stream!r} were already taken by wait() or another iter()")
        return stage.name

    async def ask(
        self, stream: Input[T], item: T, timeout: float | None = None, max_waiting: int | None = None
    ) -> Any:
        """Put an item into an ``input()`` stream, and return the result for this item.

        If the item fails, raise its error. All stages between the input and the result must process single
        items or batches. After a timeout or a cancellation, the next stage that receives the item drops it.

        Args:
            stream: Stream that ``graph.input()`` returned.
            item: The item.
            timeout: Seconds to wait for the result (default: no limit).
            max_waiting: Maximum number of ``ask`` calls on this stream that may wait at the same time
                (default: no limit). If this number of calls is already waiting, raise ``Full`` at once
                without putting the item.

        Returns:
            The result of this item.

        Raises:
            Full: ``max_waiting`` calls are already waiting.
            TimeoutError: No result arrived within ``timeout`` seconds.
            RunError: The run failed before the result arrived.
            ValueError: The graph does not allow ``ask`` on this stream.

        Example:
            >>> import asyncio
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> questions = graph.input()
            >>> answers = questions.map(str.upper).collect()
            >>> async def main():
            ...     with graph.start() as run:
            ...         return await asyncio.gather(run.ask(questions, "a"), run.ask(questions, "b"))
            >>> asyncio.run(main())
            ['A', 'B']
        """
        import asyncio

        out, limit = self[stream], seconds("ask", "timeout", timeout)
        if stream.stage not in self._answering:
            ends = answering_ends(self._plan, stream.stage)
            self._gathering.take_in(frozenset(WorkerId(end, 1) for end in ends))
            self._answering.add(stream.stage)
        request, answer = self._asking.begin(item, stream.stage, max_waiting)
        try:
            async with asyncio.timeout(limit) as clock:
                try:
                    await out.aput(cast(T, request))
                except Broken:  # awaiting the answer raises an error with the reason
                    pass
                return await answer
        except TimeoutError as error:
            set_message(f"ask: no answer within timeout={timeout} s", error, clock)
            raise
        finally:
            self._asking.forget(request.question)

    async def _items_later(self, stage: str) -> AsyncGenerator[Any, None]:
        gathering = self._gathering
        try:
            async for item in gathering.coming(stage):
                if (remaining := gathering.settle_answers(stage, item)) is not NOTHING:
                    yield remaining
                    gathering.record(item)
            gathering.raise_if_broken(stage)
        except Broken:
            gathering.leave(stage)
            await self
            raise
        finally:
            self._leave(stage)

    def _leave(self, stage: str) -> None:
        """Release a result when the loop over ``aiter`` ends.

        If Ctrl-C ended the loop inside a ``with`` block, keep the remaining items for ``Interrupted``.
        """
        if self._in_block and self._interrupts.handled:
            self._gathering.keep(stage)
        self._gathering.leave(stage)

    def _items(self, stage: str) -> Iterator[Any]:
        gathering = self._gathering
        self._interrupts.open()
        try:
            for item in gathering.items(stage):
                yield item
                gathering.mark_reader(stage)
                self._interrupts.seen = False
            gathering.raise_if_broken(stage)
        except Broken:
            gathering.leave(stage)  # the run cannot end before its last reader has left
            self.wait()
            raise
        except KeyboardInterrupt as interrupt:
            self._interruption.end(signal_of(interrupt))
        except GeneratorExit:
            if self._in_block:
                if self._interrupts.seen:
                    gathering.keep(stage)
            elif error := self._interrupts.still_raised():  # Ctrl-C was raised in the loop's body
                self._interruption.finish(signal_of(error))
                error.__cause__ = self._interruption.failure()
            raise
        finally:
            self._interrupts.close()
            gathering.leave(stage)

    def _owns(self, stream: Stream[Any]) -> bool:
        return isinstance(stream, Stream) and stream.graph is self._plan.graph

    # --- ending ---

    @refuses_misspelt("wait")
    def wait(self, timeout: float | None = None) -> Results:
        """Wait for the run to end, and return its results.

        Args:
            timeout: Seconds to wait (default: no limit).

        Returns:
            The results, by stream.

        Raises:
            TimeoutError: The run did not end within ``timeout`` seconds.
            RunError: A stage failed.
            Interrupted: The program received Ctrl-C or SIGTERM. The exception contains the results.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> total = graph.source(range(5)).reduce(lambda total, number: total + number)
            >>> run = graph.start()
            >>> run.wait(timeout=60)[total]
            10
        """
        with terminate_as_interrupt():
            self._wait_until_ended(timeout)
        failure = self._interruption.failure()
        self._supervisor.unreported.clear()
        try:
            if failure is not None:
                self._gathering.end_recording()
                raise failure
        finally:
            # Break the reference cycle between this frame and its exception, which would keep the run alive.
            failure = None
        return self._gathering.results()

    def _wait_until_ended(self, timeout: float | None) -> None:
        try:
            with interrupts_deferred():
                if self._interruption.results is None:
                    self._gathering.leave_kept()
                self._gathering.begin()
            if not self._supervisor.wait(timeout):
                raise TimeoutError(
                    f"the run of graph {self._plan.graph.name!r} did not end within {timeout} s; wait "
                    "again, or call stop()"
                )
        except KeyboardInterrupt as interrupt:
            self._interruption.end(signal_of(interrupt))

    def __await__(self) -> Generator[Any, None, Results]:
        """Wait for the run without blocking the event loop: ``results = await run``.

        Cancelling the wait does not affect the run.
        """
        return self._ended().__await__()

    async def _ended(self) -> Results:
        with interrupts_deferred():
            self._gathering.leave_kept()
            self._gathering.begin()
        await self._supervisor.ended.awaited()
        return self.wait()

    @refuses_misspelt("stop")
    def stop(self, *, timeout: float | None = None, finish_queued: bool = True) -> None:
        """Stop the sources, and let the stages finish all items in flight.

        The call returns at once. A later call can change the timeout or discard queued items.

        Args:
            timeout: Seconds after which a run that is still active is aborted (default: no limit).
            finish_queued: Also finish items that wait in channels (default: True). If False, discard these
                items, and finish only those that workers hold. In both cases, the run keeps results, failed
                items, and items on their way to a stage with several inputs.

        Example:
            >>> import itertools
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> count = graph.source(itertools.count()).reduce(lambda count, _: count + 1, 0)
            >>> run = graph.start()
            >>> run.stop(timeout=20)
            >>> run.wait()[count] >= 0
            True
        """
        limit, queued = seconds("stop", "timeout", timeout), flag("stop", "finish_queued", finish_queued)
        self._supervisor.ask(StopRequested(limit, queued))

    def abort(self) -> None:
        """Break every channel and discard all items in flight.

        The call returns at once.

        Example:
            >>> import itertools
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> graph.source(itertools.count()).sink(lambda number: None)
            >>> run = graph.start()
            >>> run.abort()
            >>> results = run.wait()
            >>> run.state
            'aborted'
        """
        self._supervisor.ask(AbortRequested())

    @refuses_misspelt("scale")
    def scale(self, stage: Stream[Any] | str, workers: int) -> None:
        """Change the number of a stage's workers while the graph runs.

        The call returns at once; ``stats()`` shows how many workers the stage has. A removed worker finishes
        its item first, and its number is not reused. The call has no effect if the stage or the run is
        already ending. A ``workers="auto"`` stage keeps the given number from then on.

        Args:
            stage: A ``map``, ``filter``, ``flat_map``, ``partition`` or ``sink`` on threads or processes: its
                name, or one of its streams.
            workers: New number of workers, at least 1.

        Raises:
            KeyError: The graph has no such stage.
            ValueError: The number of workers cannot change, because of the operator or the stage's options:
                hosts, an async function, reserved GPUs or a pool's processes.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> items = graph.input()
            >>> items.map(str, name="show").sink(print)
            >>> with graph.start() as run:
            ...     run.scale("show", workers=3)
        """
        name = stage.stage if isinstance(stage, Stream) and self._owns(stage) else stage
        if not isinstance(name, str):
            raise KeyError(f"{stage!r} is not a stage of graph {self._plan.graph.name!r}")
        whole("run.scale", "workers", workers, 1)
        found = self._plan.graph.stage_named(name)
        why = fixed_workers(found)
        if not why and self._pooled and found.placement.own_process:
            why = f"a {found.kind} with the processes of a pool"
        if why:
            raise ValueError(
                f"run.scale: the number of workers of stage {name!r} cannot change, because the stage "
                f"is {why}; set workers= when you declare it"
            )
        self._supervisor.ask(Scale(name, workers))

    def _interrupted(self, number: int) -> Interrupted | None:
        """Return the error to raise for a signal in a loop over items outside any ``with`` block.

        The run ends when the exception leaves the loop, or when the program reads the exception's results.
        """
        return None if self._in_block or self._supervisor.ended.is_set() else self._interruption.error(number)

    def __enter__(self) -> Run:
        self._interrupts.open()
        self._in_block = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with terminate_as_interrupt():  # the interrupt watch no longer covers the wait below
            self._interrupts.close()
            self._in_block = False
            self._leave_block(error)

    def _leave_block(self, error: BaseException | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            own = self._interruption.results
            if own is None or not isinstance(error, Interrupted) or error.results is not own:
                self._interruption.end(signal_of(error))
            return
        if error is None:
            self._end_block()
            return
        cancelled = getattr(sys.modules.get("asyncio"), "CancelledError", ())
        if isinstance(error, cancelled) and self._interrupts.handled:  # how asyncio reports Ctrl-C
            self._interruption.finish()
            return
        self._break_block(error)

    def _end_block(self) -> None:
        """Close the inputs and wait for the run, because its block or its pool's block has ended normally."""
        self._gathering.leave_all(of_thread=threading.get_ident())
        for out in self._ports.inputs.values():
            out.close()
        self.wait()

    def _break_block(self, error: BaseException | None) -> None:
        """Abort the run because an exception has left its block."""
        self.abort()
        self._gathering.break_all()
        try:
            self.wait()
        except RunError:
            # The block only saw a broken channel, but RunError has the reason.
            if isinstance(error, Broken):
                raise

    def __repr__(self) -> str:
        return f"<Run of {self._plan.graph.name!r}: {self.stats().state}>"

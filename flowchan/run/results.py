"""Collect the results of a run.

The program may iterate over a result while the graph runs. Otherwise, a thread of the run collects the result
once a caller waits for the run. If a result fills its channel before the program reads the result, this
thread starts even earlier.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from flowchan.channel.channel import Channel, In
from flowchan.declare.stream import Stream
from flowchan.errors import Broken, Closed
from flowchan.public import public
from flowchan.run.crew.local_part import LocalPart
from flowchan.run.crew.run_ports import RunPorts
from flowchan.run.policy.decisions import AbortRequested
from flowchan.run.policy.events import Began, Ended, Event, Failure, WorkerId
from flowchan.run.supervisor import Supervisor
from flowchan.run.worker.requests import NOTHING
from flowchan.run.worker.tracking import marks_of, unmarked

T = TypeVar("T")


@public
class Results(Mapping[Stream[Any], Any]):
    """Results of a run by stream: the value of each ``reduce`` and the list of each ``collect``.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> numbers = graph.source([3, 4]).collect(name="numbers")
        >>> results = graph.run()
        >>> results[numbers], results
        ([3, 4], <Results of 'graph': numbers>)
    """

    def __init__(self, graph: str, values: dict[Stream[Any], Any]) -> None:
        self._graph = graph
        self._values = values

    def __getitem__(self, stream: Stream[T]) -> T:
        try:
            value: T = self._values[stream]
            return value
        except KeyError:
            known = ", ".join(sorted(known.name for known in self._values)) or "none"
            raise KeyError(
                f"{stream!r} is not a result of graph {self._graph!r}; the results are {known} "
                "(reduce and collect streams that run.iter() has not taken)"
            ) from None

    def __iter__(self) -> Iterator[Stream[Any]]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<Results of {self._graph!r}: {', '.join(stream.name for stream in self._values) or 'none'}>"


class ResultGathering:
    """Assigns each result of a run to its reader, which is a thread of the program or of the run."""

    def __init__(self, ports: RunPorts, local: LocalPart, supervisor: Supervisor) -> None:
        self._plan = plan = ports.plan
        self._ports, self._local = ports, local
        self._supervisor = supervisor
        self._recording = supervisor.recording
        self._with_requests = {worker.id.stage for worker in plan.workers if worker.stage.may_get_requests}
        self._all = [worker.id for worker in plan.workers if worker.gathers]
        # Thread that last asked for an item of the result, or None after its loop has ended.
        self._loops: dict[str, int | None] = {}
        self._interrupted_loops: set[str] = set()  # results whose loop Ctrl-C has interrupted
        # Results that the run collects because they filled their channel before the program read them.
        self._gathered: dict[str, _GatheredResult] = {}
        self._begun = False
        self._lock = threading.Lock()

    # --- results that the program iterates over ---

    def claim(self, stage: str) -> bool:
        """Reserve a result for a loop of the calling thread. Return False if it already has a reader."""
        with self._lock:
            if self._begun or stage in self._loops:
                return False
            self.mark_reader(stage)
            return True

    def mark_reader(self, stage: str) -> None:
        """Record the calling thread as the reader of this result."""
        self._loops[stage] = threading.get_ident()

    def items(self, stage: str) -> Iterable[Any]:
        """Return an iterable over a result. It omits items that answer requests."""
        coming = self.coming(stage)
        wrapped = self._recording is not None or stage in self._with_requests
        return self._settled(stage, coming) if wrapped else coming

    def coming(self, stage: str) -> Any:
        """Return an iterable, also for ``async for``, over a result that includes answers to requests."""
        self.mark_reader(stage)
        self._supervisor.report(Began(_worker(stage)))
        port = self._ports.gathering_port(_worker(stage))
        taken_in = self._gathered.get(stage)
        return port if taken_in is None else _TakenInFirst(taken_in, port)

    def _settled(self, stage: str, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            if (remaining := self.settle_answers(stage, item)) is not NOTHING:
                yield remaining
                self.record(item)

    def record(self, item: Any) -> None:
        """Record in the resume file, if there is one, that the program has finished an item."""
        if self._recording is not None:
            self._recording.record(marks_of(item), 0)

    def settle_answers(self, stage: str, item: Any) -> Any:
        """Send the answers in an item to their callers. Return the rest of the item, or ``NOTHING``."""
        if self._recording is not None:
            return unmarked(item)
        return self._supervisor.settle_answers(item) if stage in self._with_requests else item

    def raise_if_broken(self, stage: str) -> None:
        """Raise ``Broken`` if collecting this result failed before its end."""
        taken_in = self._gathered.get(stage)
        if taken_in is not None and taken_in.broken is not None:
            raise taken_in.broken

    def keep(self, stage: str) -> None:
        """Keep the remaining items as a result if Ctrl-C interrupted the calling thread's loop."""
        if self._loops[stage] == threading.get_ident():
            self._interrupted_loops.add(stage)

    def leave(self, stage: str) -> None:
        """Release the reader of this result, unless its remaining items are kept."""
        if stage not in self._interrupted_loops:
            self._end(stage)

    def leave_all(self, of_thread: int) -> None:
        """Release all results that one thread was reading."""
        for stage, reader in list(self._loops.items()):
            if reader == of_thread:
                self._end(stage)

    def break_all(self) -> None:
        """Break the results that have a reader, because the run is being aborted."""
        for stage, reader in list(self._loops.items()):
            if reader is not None:
                self._break(stage)

    def leave_kept(self) -> None:
        """Release the kept results, because the program has caught ``KeyboardInterrupt`` and continues."""
        # Copy the set, because another thread's loop may be interrupted at the same time.
        for stage in list(self._interrupted_loops):
            self._end(stage)
        self._interrupted_loops.clear()

    def _break(self, stage: str) -> None:
        """Break a result's channel. If only its port were closed, other results could look complete."""
        self._ports.gathering_port(_worker(stage)).channel.abort()
        self._end(stage)

    def _end(self, stage: str) -> None:
        self._loops[stage] = None
        self._ports.gathering_port(_worker(stage)).close()
        with contextlib.suppress(Closed):  # raised if the run has ended
            self._supervisor.report(Ended(_worker(stage)))

    # --- results that the run collects ---

    def take_in(self, ids: frozenset[WorkerId]) -> None:
        """Start to collect these results, except those that already have a reader."""
        with self._lock:
            for id in ids:
                if not self._begun and id.stage not in self._loops and id.stage not in self._gathered:
                    self._take_in(id)

    def _take_in(self, id: WorkerId) -> None:
        def reader_left() -> bool:
            return self._loops.get(id.stage, 0) is None

        self._gathered[id.stage] = _GatheredResult(
            self._ports, self._local, self._supervisor, id, reader_left
        )

    def take_in_the_rest(self) -> None:
        """Collect the remaining items of the loops that Ctrl-C interrupted in the calling thread."""
        for id in self._all:
            if self._loops.get(id.stage) == threading.get_ident():
                self._interrupted_loops.add(id.stage)
                if id.stage in self._gathered:
                    self._gathered[id.stage].take_in_again()
                else:
                    self._take_in(id)

    def begin(self) -> None:
        """Start a thread for each result without a reader to collect the result, because a caller waits.

        If another caller is already starting the threads, wait until all threads have started. This ensures
        that the results are available as soon as the run has ended.
        """
        waiting: list[WorkerId] = []
        try:
            with self._lock:
                if self._begun:
                    return
                self._begun = True
                waiting = [id for id in self._all if id.stage not in {*self._loops, *self._gathered}]
                while waiting:
                    if waiting[0].stage in self._with_requests:
                        self._take_in(waiting[0])
                    else:
                        self._local.start_thread(waiting[0])
                    del waiting[0]
        except BaseException:  # a result without a reader would block the run forever
            self._supervisor.ask(AbortRequested())
            for id in waiting:
                self._break(id.stage)
            self._supervisor.wait()
            raise

    def results(self) -> Results:
        """Return the results, after the run has ended.

        A result with a loop in the program is included only if :meth:`keep` kept its remaining items.
        """
        values = self._supervisor.results
        for name, taken_in in list(self._gathered.items()):
            taken_in.thread.join()
            if name in self._interrupted_loops or (name not in self._loops and taken_in.broken is None):
                values.setdefault(name, self._recorded(taken_in.rest()))
        self.end_recording()
        graph = self._plan.graph
        taken = self._loops.keys() - self._interrupted_loops
        names = [stage.name for stage in graph.stages if stage.name in values and stage.name not in taken]
        streams: dict[Stream[Any], Any] = {Stream(graph, name, "out", name): values[name] for name in names}
        return Results(graph.name, streams)

    def _recorded(self, items: list[Any]) -> list[Any]:
        """Record in the resume file that items have left the graph, and return them without marks."""
        self.record(items)
        return items if self._recording is None else unmarked(items)

    def end_recording(self) -> None:
        """Close the resume file, if there is one, after the end of the run."""
        if self._recording is not None:
            self._recording.close()


def _worker(stage: str) -> WorkerId:
    """Return the ID of the only worker that collects a result."""
    return WorkerId(stage, 1)


_HANDED_OVER = object()
"""Marks the end of the collected items. The reader then continues with the port."""


class _TakenInFirst:
    """Iterates over a result: first over the items that the run has collected, then over its port.

    The run stops collecting items for this reader. The channel's capacity therefore limits memory again.
    """

    def __init__(self, taken_in: _GatheredResult, port: In[Any]) -> None:
        self._source: Any = taken_in.items
        self._port = port
        taken_in.hand_over()

    def __iter__(self) -> Iterator[Any]:
        while True:
            for item in self._source:
                if item is _HANDED_OVER:
                    self._source = self._port
                    break
                yield item
            else:
                return

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            async for item in self._source:
                if item is _HANDED_OVER:
                    self._source = self._port
                    break
                yield item
            else:
                return


class _GatheredResult:
    """Collects a result that filled its channel before the program read it.

    A thread takes items from the port until a reader takes over. ``reader_left`` returns whether the
    program's reader has left the result.
    """

    def __init__(
        self,
        ports: RunPorts,
        local: LocalPart,
        supervisor: Supervisor,
        id: WorkerId,
        reader_left: Callable[[], bool],
    ) -> None:
        self.items: Channel[Any] = Channel(10**15)
        self.broken: Broken | None = None  # set if the run broke the result before all items arrived
        self._read = self._handed_over = False
        self._ports, self._local, self._supervisor = ports, local, supervisor
        self._id, self._reader_left = id, reader_left
        self._start()

    def _start(self) -> None:
        name = f"flowchan {self._ports.plan.graph.name}/{self._id}"
        port = self._ports.gathering_port(self._id)
        self.thread = threading.Thread(target=self._pour, args=(port,), name=name, daemon=True)
        self.thread.start()
        self._local.add_thread(self._id, self.thread)

    def hand_over(self) -> None:
        """Stop collecting, and let the reader take all later items from the port."""
        self._read = True

    def take_in_again(self) -> None:
        """Collect the remaining items after Ctrl-C has interrupted the reader's loop."""
        self._read = False
        if self._handed_over:
            self._handed_over = False
            self._start()

    def rest(self) -> list[Any]:
        """Return the collected items that no reader has taken. Call this after the thread has ended."""
        return [item for item in self.items if item is not _HANDED_OVER]

    def _pour(self, port: In[Any]) -> None:
        last: Event = Ended(self._id)
        with contextlib.suppress(Closed):  # raised if the run has ended
            self._supervisor.report(Began(self._id))
        try:
            for item in port:
                if (rest := self._supervisor.settle_answers(item)) is not NOTHING:
                    self.items.put(rest)
                if self._read:
                    self._handed_over = True
                    self.items.put(_HANDED_OVER)
                    return
        except BaseException as error:  # unpickling an item can raise anything
            if isinstance(error, Broken) and port.channel.broken:
                self.broken = error
            elif not (
                isinstance(error, ValueError) and self._reader_left()
            ):  # the reader has closed the port during this get
                self.broken = Broken("an item of a result could not be unpickled")
                last = Failure(self._id, error, None, os.getpid())
        finally:
            if not self._handed_over:
                with contextlib.suppress(Closed):
                    # Report before items.close(), because the reader may report a clean end afterwards.
                    self._supervisor.report(last)
                self.items.close()
                port.close()

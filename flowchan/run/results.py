"""Gather the results of a run.

The program takes them item by item, or threads of the run take them once a caller waits for the end. The run
also takes in a result that is full before the program reads it.
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
from flowchan.run.crew.local_part import LocalPart
from flowchan.run.crew.run_ports import RunPorts
from flowchan.run.policy.decisions import AbortRequested
from flowchan.run.policy.events import Began, Ended, Event, Failure, WorkerId
from flowchan.run.supervisor import Supervisor
from flowchan.run.worker.requests import NOTHING

T = TypeVar("T")


class Results(Mapping[Stream[Any], Any]):
    """Map streams to the results of a run.

    The result of a ``reduce`` stream is its value, and that of a ``collect`` stream is its list.

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
    """Knows which reader takes the items of each result of one run, by the name of its stage."""

    def __init__(self, ports: RunPorts, local: LocalPart, supervisor: Supervisor) -> None:
        self._plan = plan = ports.plan
        self._ports, self._local = ports, local
        self._supervisor = supervisor
        self._with_requests = {worker.id.stage for worker in plan.workers if worker.stage.may_get_requests}
        self._all = [worker.id for worker in plan.workers if worker.gathers]
        # the last thread that asked for an item; None: its loop has ended
        self._loops: dict[str, int | None] = {}
        self._interrupted_loops: set[str] = set()  # results whose loop a Ctrl-C interrupted
        self._gathered: dict[str, _GatheredResult] = {}  # results that were full before the program read them
        self._begun = False
        self._lock = threading.Lock()

    # --- item by item ---

    def claim(self, stage: str) -> bool:
        """Let the calling thread iterate over this result. False if another reader takes it already."""
        with self._lock:
            if self._begun or stage in self._loops:
                return False
            self.mark_reader(stage)
            return True

    def mark_reader(self, stage: str) -> None:
        """Note that the calling thread asks for an item."""
        self._loops[stage] = threading.get_ident()

    def items(self, stage: str) -> Iterable[Any]:
        """Give the items, without those that answer questions."""
        coming = self.coming(stage)
        return self._settled(coming) if stage in self._with_requests else coming

    def coming(self, stage: str) -> Any:
        """Give the items with the answers to questions. ``async for`` takes them too."""
        self.mark_reader(stage)
        self._supervisor.report(Began(_worker(stage)))
        port = self._ports.gathering_port(_worker(stage))
        taken_in = self._gathered.get(stage)
        return port if taken_in is None else _TakenInFirst(taken_in, port)

    def _settled(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            if (reader_left := self._supervisor.settle_answers(item)) is not NOTHING:
                yield reader_left

    def settle_answers(self, stage: str, item: Any) -> Any:
        """Settle the answers in an item. Return what is left of it, or ``NOTHING``."""
        return self._supervisor.settle_answers(item) if stage in self._with_requests else item

    def raise_if_broken(self, stage: str) -> None:
        """Raise ``Broken`` if :meth:`items` did not give all items."""
        taken_in = self._gathered.get(stage)
        if taken_in is not None and taken_in.broken is not None:
            raise taken_in.broken

    def keep(self, stage: str) -> None:
        """Keep the rest of a result until the end of the block, if the calling thread iterated over it."""
        if self._loops[stage] == threading.get_ident():
            self._interrupted_loops.add(stage)

    def leave(self, stage: str) -> None:
        """Note that no reader iterates over this result any more, unless it is kept."""
        if stage not in self._interrupted_loops:
            self._end(stage)

    def leave_all(self, of_thread: int) -> None:
        """Note that a thread has left the results over which it iterated."""
        for stage, reader in list(self._loops.items()):
            if reader == of_thread:
                self._end(stage)

    def break_all(self) -> None:
        """Break the results over which a reader iterates: the run was asked to break off."""
        for stage, reader in list(self._loops.items()):
            if reader is not None:
                self._break(stage)

    def leave_kept(self) -> None:
        """Leave what was kept: the program has caught the Ctrl-C that ended its loop, and goes on."""
        for stage in list(self._interrupted_loops):  # another thread's loop may be interrupted now
            self._end(stage)
        self._interrupted_loops.clear()

    def _break(self, stage: str) -> None:
        """Break a result. An early end would make other results look whole."""
        self._ports.gathering_port(_worker(stage)).channel.abort()
        self._end(stage)

    def _end(self, stage: str) -> None:
        self._loops[stage] = None
        self._ports.gathering_port(_worker(stage)).close()
        with contextlib.suppress(Closed):  # the run may be over
            self._supervisor.report(Ended(_worker(stage)))

    # --- taken by the run ---

    def take_in(self, ids: frozenset[WorkerId]) -> None:
        """Take in results that are full before the program reads them."""
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
        """Take in the results over which the calling thread iterated when it was interrupted."""
        for id in self._all:
            if self._loops.get(id.stage) == threading.get_ident():
                self._interrupted_loops.add(id.stage)
                if id.stage in self._gathered:
                    self._gathered[id.stage].take_in_again()
                else:
                    self._take_in(id)

    def begin(self) -> None:
        """Gather the results without a reader, each on a thread, because a caller waits.

        Another caller that waits returns once all threads have begun, so that it finds the results when the
        run has ended.
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
        except BaseException:  # these results get no reader, so the run would wait forever
            self._supervisor.ask(AbortRequested())
            for id in waiting:
                self._break(id.stage)
            self._supervisor.wait()
            raise

    def results(self) -> Results:
        """Give what was finished, once the run has ended.

        A result with a reader counts only if it was kept.
        """
        values = self._supervisor.results
        for name, taken_in in list(self._gathered.items()):
            taken_in.thread.join()
            if name in self._interrupted_loops or (name not in self._loops and taken_in.broken is None):
                values.setdefault(name, taken_in.rest())
        graph = self._plan.graph
        taken = self._loops.keys() - self._interrupted_loops
        names = [stage.name for stage in graph.stages if stage.name in values and stage.name not in taken]
        streams: dict[Stream[Any], Any] = {Stream(graph, name, "out", name): values[name] for name in names}
        return Results(graph.name, streams)


def _worker(stage: str) -> WorkerId:
    """Give the worker of a result; there is only one."""
    return WorkerId(stage, 1)


_HANDED_OVER = object()
"""Marks the place among the items taken in after which the reader takes the others from the port."""


class _TakenInFirst:
    """The items of a result for its reader: those that were taken in, then those of the port.

    From now on no more are taken in than the reader reads, so the channels bound the memory again.
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
    """The items of a result that was full before the program read it.

    A thread takes in more of them until a reader comes. ``reader_left``: whether its reader has left.
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
        self.broken: Broken | None = None  # the run broke off, and these are not all of them
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
        """Let the reader take the items from the port, after those that were taken in."""
        self._read = True

    def take_in_again(self) -> None:
        """Take in the rest, because the loop of the reader was interrupted."""
        self._read = False
        if self._handed_over:
            self._handed_over = False
            self._start()

    def rest(self) -> list[Any]:
        """Return the items that no reader has taken, once the thread has ended."""
        return [item for item in self.items if item is not _HANDED_OVER]

    def _pour(self, port: In[Any]) -> None:
        last: Event = Ended(self._id)
        with contextlib.suppress(Closed):  # the run may be over
            self._supervisor.report(Began(self._id))
        try:
            for item in port:
                if (rest := self._supervisor.settle_answers(item)) is not NOTHING:
                    self.items.put(rest)
                if self._read:
                    self._handed_over = True
                    self.items.put(_HANDED_OVER)
                    return
        except BaseException as error:  # also an error of an item's unpickling
            if isinstance(error, Broken) and port.channel.broken:
                self.broken = error
            elif not (
                isinstance(error, ValueError) and self._reader_left()
            ):  # its reader has closed the port
                self.broken = Broken("an item of the results could not be unpickled")
                last = Failure(self._id, error, None, os.getpid())
        finally:
            if not self._handed_over:
                with contextlib.suppress(Closed):
                    self._supervisor.report(last)  # first, or the reader of the items may report a clean end
                self.items.close()
                port.close()

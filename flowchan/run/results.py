"""Gather the results of a run.

The program may read a result item by item. Once it waits for the end of the run, threads of the run gather
the results. The run itself gathers a full result that the program cannot read at the time.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from flowchan.channel.channel import Channel
from flowchan.declare.stream import Stream
from flowchan.errors import Broken, Closed
from flowchan.run.crew.local_crew import LocalCrew
from flowchan.run.policy.decisions import AbortAsked
from flowchan.run.policy.events import Began, Ended, Event, Failure, WorkerId
from flowchan.run.policy.plan import Plan
from flowchan.run.supervisor import Supervisor
from flowchan.run.worker.requests import NOTHING

T = TypeVar("T")


class Results(Mapping[Stream[Any], Any]):
    """Results of a run by stream: the value of a ``reduce`` stream, the list of a ``collect`` stream."""

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
                f"{stream!r} is not a result of graph {self._graph!r}; results are the reduce and collect "
                f"streams that run.iter() has not taken: {known}"
            ) from None

    def __iter__(self) -> Iterator[Stream[Any]]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<Results of {self._graph!r}: {', '.join(stream.name for stream in self._values) or 'none'}>"


class ResultGathering:
    """Gathering of the results of one run, by stage name."""

    def __init__(self, plan: Plan, crew: LocalCrew, supervisor: Supervisor) -> None:
        self._plan = plan
        self._crew = crew
        self._supervisor = supervisor
        self._with_requests = {worker.id.stage for worker in plan.workers if worker.stage.asked}
        self._all = [worker.id for worker in plan.workers if worker.gathers]
        # the last thread that asked for an item; None: its loop has ended
        self._loops: dict[str, int | None] = {}
        self._kept_loops: set[str] = set()  # results whose loop a Ctrl-C interrupted
        self._gathered: dict[str, _GatheredResult] = {}  # results that were full before the program read them
        self._begun = False
        self._lock = threading.Lock()

    # --- item by item ---

    def claim(self, stage: str) -> bool:
        """Reserve a result for a loop on the calling thread; return false if it is taken."""
        with self._lock:
            if self._begun or stage in self._loops:
                return False
            self.asked(stage)
            return True

    def asked(self, stage: str) -> None:
        """Record that the calling thread asks for an item."""
        self._loops[stage] = threading.get_ident()

    def items(self, stage: str) -> Iterable[Any]:
        """Return the items of the result to iterate over."""
        coming = self.coming(stage)
        return self._unasked(coming) if stage in self._with_requests else coming

    def coming(self, stage: str) -> Any:
        """Return the same, also for ``async for``, but including answers to requests."""
        self.asked(stage)
        self._supervisor.tell(Began(_worker(stage)))
        taken_in = self._gathered.get(stage)
        return self._crew.port(_worker(stage)) if taken_in is None else taken_in.items

    def _unasked(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            if (left := self._supervisor.left_of(item)) is not NOTHING:
                yield left

    def left_of(self, stage: str, item: Any) -> Any:
        """Deliver the answers in an item and return the rest of it, or ``NOTHING``."""
        return self._supervisor.left_of(item) if stage in self._with_requests else item

    def raise_if_broken(self, stage: str) -> None:
        """Raise ``Broken`` if :meth:`items` did not yield all items."""
        taken_in = self._gathered.get(stage)
        if taken_in is not None and taken_in.broken is not None:
            raise taken_in.broken

    def keep(self, stage: str) -> None:
        """Postpone the end of the calling thread's loop; the end of the ``with`` block decides about the
        rest."""
        if self._loops[stage] == threading.get_ident():
            self._kept_loops.add(stage)

    def leave(self, stage: str) -> None:
        """End the loop over this result, unless it is kept."""
        if stage not in self._kept_loops:
            self._end(stage)

    def leave_all(self, of_thread: int) -> None:
        """End all loops of the given thread."""
        for stage, reader in list(self._loops.items()):
            if reader == of_thread:
                self._end(stage)

    def break_all(self) -> None:
        """Break all results with a loop after a request to abort."""
        for stage, reader in list(self._loops.items()):
            if reader is not None:
                self._break(stage)

    def leave_kept(self) -> None:
        """End the kept loops; the program has caught the Ctrl-C and continues."""
        for stage in self._kept_loops:
            self._end(stage)
        self._kept_loops.clear()

    def _break(self, stage: str) -> None:
        """Break the result; an early end would make the other outputs of earlier stages look complete."""
        self._crew.port(_worker(stage)).channel.abort()
        self._end(stage)

    def _end(self, stage: str) -> None:
        self._loops[stage] = None
        self._crew.port(_worker(stage)).close()
        with contextlib.suppress(Closed):  # the run may have ended
            self._supervisor.tell(Ended(_worker(stage)))

    # --- taken by the run ---

    def take_in(self, ids: frozenset[WorkerId]) -> None:
        """Gather full results that the program cannot read at the time, as the supervisor asks."""
        with self._lock:
            for id in ids:
                if not self._begun and id.stage not in self._loops and id.stage not in self._gathered:
                    self._take_in(id)

    def _take_in(self, id: WorkerId) -> None:
        def left() -> bool:
            return self._loops.get(id.stage, 0) is None

        self._gathered[id.stage] = _GatheredResult(self._crew, self._supervisor, id, left)

    def take_in_the_rest(self) -> None:
        """Add the rest of the interrupted loop of the calling thread to the results."""
        for id in self._all:
            if self._loops.get(id.stage) == threading.get_ident():
                self._kept_loops.add(id.stage)
                if id.stage not in self._gathered:
                    self._take_in(id)

    def begin(self) -> None:
        """Gather each result without a loop on its own thread.

        A second caller returns once all threads have started, so that it finds the results after the run has
        ended.
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
                        self._crew.start_thread(waiting[0])
                    del waiting[0]
        except BaseException:  # these results have no reader, so the run would wait forever
            self._supervisor.ask(AbortAsked())
            for id in waiting:
                self._break(id.stage)
            self._supervisor.wait()
            raise

    def results(self) -> Results:
        """Return the results of a run that has ended; those with a loop only if they were kept."""
        values = self._supervisor.results
        for name, taken_in in self._gathered.items():
            taken_in.thread.join()
            if name in self._kept_loops or (name not in self._loops and taken_in.broken is None):
                values.setdefault(name, list(taken_in.items))
        graph = self._plan.graph
        taken = self._loops.keys() - self._kept_loops
        names = [stage.name for stage in graph.stages if stage.name in values and stage.name not in taken]
        streams: dict[Stream[Any], Any] = {Stream(graph, name, "out", name): values[name] for name in names}
        return Results(graph.name, streams)


def _worker(stage: str) -> WorkerId:
    """Return the single worker of a result."""
    return WorkerId(stage, 1)


class _GatheredResult:
    """Items of a result that was full before the program read it; a thread keeps gathering them.

    ``left`` returns whether the loop over it has ended.
    """

    def __init__(
        self, crew: LocalCrew, supervisor: Supervisor, id: WorkerId, left: Callable[[], bool]
    ) -> None:
        self.items: Channel[Any] = Channel(10**15)
        self.broken: Broken | None = None  # set if the run broke off and items are missing
        name, arguments = f"flowchan {supervisor.plan.graph.name}/{id}", (crew, supervisor, id, left)
        self.thread = threading.Thread(target=self._drain, args=arguments, name=name, daemon=True)
        self.thread.start()
        crew.count_thread(id, self.thread)

    def _drain(self, crew: LocalCrew, supervisor: Supervisor, id: WorkerId, left: Callable[[], bool]) -> None:
        port = crew.port(id)
        last: Event = Ended(id)
        with contextlib.suppress(Closed):  # the run may have ended
            supervisor.tell(Began(id))
        try:
            for item in port:
                if (rest := supervisor.left_of(item)) is not NOTHING:
                    self.items.put(rest)
        except BaseException as error:  # including errors of unpickling an item
            if isinstance(error, Broken) and port.channel.broken:
                self.broken = error
            elif not (isinstance(error, ValueError) and left()):  # the loop that ended has closed the port
                self.broken = Broken("not all items could be received")
                last = Failure(id, error, None, os.getpid())
        finally:
            with contextlib.suppress(Closed):
                supervisor.tell(last)  # before the close, or a loop over the items may report a clean end
            self.items.close()
            port.close()

"""Run inference in a graph with one stage per part, through which micro-batches flow one after another.

    batches ──split──> [input] ──> [part 0] ──> [part 1] ──> … ──> [results] ──join──> outputs
                                      └─────────────┴──errors────────^

Each item is a :class:`Micro`. Each part is a ``map``, which keeps no state between items. The supervisor can
therefore replace a killed part and repeat its micro-batch. The run starts with the first batch and lasts
until :meth:`Inference.close`. A thread that is waiting for its batch reads the outputs of all batches until
its own is complete. The stage ``results`` lends its port to such threads, and handles failures.

A call splits its batch into micro-batches to keep all parts busy; a stream sends whole batches. A stream has
at most ``2 * parts + 2`` batches in flight before it requests another. This limit bounds memory use, and
still gives every part work while the program handles one batch and prepares the next.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from flowchan import Broken, Channel, Closed, Failed, Full, Graph, In, Stream, _core
from flowchan.pipelines.sequential.cut import CHUNKS, Cut
from flowchan.pipelines.sequential.engine.driver import PipelineRun, part_error
from flowchan.pipelines.sequential.parts import Part, called, is_plain_torch, run_part, take_cores
from flowchan.pipelines.sequential.shared_memory import share
from flowchan.pipelines.sequential.state import PartState, modes_of, state_of
from flowchan.pipelines.sequential.tensor_trees import Micro, mapped
from flowchan.pipelines.sequential.timeline import TimelineEvent
from flowchan.pipelines.sequential.wire_format import (
    Sent,
    closed,
    expect_reading,
    only_reads,
    opened,
    received,
)
from flowchan.run.policy.failures import ItemFailed
from flowchan.transport.interrupts import append_result


@dataclass
class PartWorker:
    """Callable that runs one part. Each worker creates one, and in a process nothing else uses the part.

    This class is a dataclass, because the generated ``__init__`` of a dataclass has no source file. A picture
    therefore shows the line of the user's code that created the pipe.
    """

    part: Part
    processes: int
    """Number of processes with parts; 0 for threads."""
    hosts: int
    """Number of other hosts on which the processes run."""

    def __post_init__(self) -> None:
        torch.set_grad_enabled(False)  # affects only this thread, which belongs to the worker
        self.only_reads = only_reads(self.part)
        # If true, this part does not need run_part's additional steps.
        self.is_simple = self.processes and self.part.device is None and is_plain_torch(self.part.module)
        if self.processes:
            take_cores(self.part.number, self.processes, self.hosts)
            expect_reading()
            self.state = PartState(self.part.module, self.part.device)

    def __call__(self, item: Sent) -> Sent:
        begin = time.monotonic()
        batch, chunk, chunks, value, skips, events, form = item
        if form is not None:
            value = opened(value, form, self.only_reads)
        if self.is_simple:
            value = called(self.part.module, value)
        else:
            value, skips = run_part(self.part, value, skips, keep=not self.processes)
            if self.processes:
                self.state.give()
        if self.part.remote:
            self._raise_if_changed()
        if self.processes:
            value, form = closed(value)
        return batch, chunk, chunks, value, skips, (*events, (begin, time.monotonic())), form

    def _raise_if_changed(self) -> None:
        if self.state.changed():
            raise ValueError(
                "Sequential: a layer changed its buffers on another host, and the program cannot see "
                "such a change; call eval() on the pipe, or use on='process'"
            )


@dataclass(slots=True)
class Batch:
    """Batch in flight, with the outputs that have arrived.

    ``sizes`` are the sample counts of its micro-batches. ``values`` are the outputs of the micro-batches,
    except those whose numbers are in ``missing``.
    """

    run: InferenceRun
    sizes: list[int]
    values: list[Any]
    missing: set[int]
    outcome: Channel[list[Any] | BaseException] = field(default_factory=lambda: Channel(1))
    """Channel that receives one item: all values, or the exception that ended the batch.

    A ``concurrent.futures.Future`` is not safe here: Ctrl-C in a waiting thread could leave its lock acquired
    and block the thread that sets the result.
    """


class InferenceRun(PipelineRun):
    """One run of the parts, each of which is a ``map`` stage, with the batches in flight by number.

    If Ctrl-C interrupts the recording of a result, the recording is repeated from the beginning.
    """

    def __init__(self, name: str, cut: Cut, capacity: int, events: deque[TimelineEvent]) -> None:
        super().__init__(name)
        self.events = events
        self.out: dict[int, Batch] = {}
        self.parts = parts = cut.parts
        processes, hosts = len(parts) if cut.on.own_process else 0, len(cut.on.hosts)
        chunks = cut.chunks or CHUNKS
        self._input = self.graph.input("micro-batches", capacity=capacity)
        stream: Stream[Any] = self._input
        failures = []
        for part in parts:
            worker = partial(PartWorker, part, processes, hosts)
            capacity = chunks if part is not parts[-1] else capacity
            stream = stream.map(worker, name=part.name, on=cut.on, capacity=capacity, restarts=10**9)
            failures.append(stream.errors)
        failed = self.graph.merge(*failures, name="errors") if len(failures) > 1 else failures[0]
        self.lend(stream, failed)
        self.graph._drawn |= {part.name: part.drawn for part in parts} | {
            "errors": None,
            "results": "outputs",
        }

    def begin(self) -> None:
        """Start the parts."""
        self.start([self._input])

    def watched(self) -> Sequence[In[Any]]:
        """Return the error ports, which the last stage reads for the whole run."""
        return self.ports[1:]

    def receive(self, port: Any, item: Any) -> None:
        """Record an item that the last stage has read."""
        if port is self.ports[0]:
            self._record_output(item)
        else:
            self._record_failure(item)

    def _record_output(self, item: Sent) -> None:
        """Record a finished micro-batch, unless the caller has abandoned its stream."""
        micro = received(item)
        self._record_times(micro)
        batch = self.out.get(micro.batch)
        if batch is None:
            return
        batch.values[micro.chunk] = micro.value
        batch.missing.discard(micro.chunk)
        if not batch.missing:
            self._end_batch(micro.batch, batch.values)

    def _record_failure(self, failed: Failed[Any]) -> None:
        """Record that a part failed on a micro-batch, or that the part's process died too often."""
        micro = Micro(*failed.item[: len(Micro._fields)])
        self._record_times(micro)
        part = self.parts[len(micro.events)]  # each finished part has appended an event
        self._end_batch(micro.batch, part_error(part, repr(micro), failed.error))

    def _record_times(self, micro: Micro) -> None:
        for part, (begin, end) in enumerate(micro.events):
            self.events.append(TimelineEvent(part, part, "F", micro.batch, micro.chunk, begin, end))

    def end_batches(self, error: BaseException) -> None:
        """End all batches in flight with ``error``."""
        for number in list(self.out):
            self._end_batch(number, error)

    def _end_batch(self, number: int, outcome: list[Any] | BaseException) -> None:
        batch = self.out.get(number)
        if batch is not None:
            with contextlib.suppress(Full):
                batch.outcome.put_nowait(outcome)
            self.out.pop(number, None)

    def ended(self) -> None:
        """End all batches in flight."""
        self.end_batches(self.error)

    # --- methods for the threads that submit batches ---

    def put(self, item: Sent) -> None:
        """Send a micro-batch. Read outputs while the channel is full."""
        try:
            self.inputs[0].put_nowait(item)
        except Full:
            self._take_in([], [(self.inputs[0], item)])

    def outcome(self, batch: Batch) -> list[Any] | BaseException:
        """Wait for a batch, and return its outputs or its exception."""
        try:
            found: list[Any] | BaseException = self._take_in([batch.outcome], [])
        except (Closed, Broken, ValueError):  # the run has ended; its watcher ends this batch
            found = batch.outcome.get()
        return found

    def _take_in(self, gets: list[Any], puts: list[Any]) -> Any:
        """Read outputs of all batches until one of the given operations succeeds, and return its item."""
        if not self.ports and self.opened.wait() and not self.ports:
            raise Closed("the run of the pipe has ended")
        operations = [self.ports[0], *gets], puts, None
        results: deque[tuple[int, Any]] = deque()
        try:
            while True:
                append_result(results, _core._select, *operations)
                number, item = results[0]
                if number:
                    return item
                self._record_output(item)
                results.clear()
        except ItemFailed as failed:  # an output cannot be unpickled, so its batch is unknown
            self.end_batches(failed.__cause__ or failed)
            self.run.abort()
            self.over.wait()
            return self._take_in(gets, puts)
        finally:
            for number, item in results:
                if not number:
                    self._record_output(item)

    def fail(self, number: int) -> None:
        """End a batch that was sent while the run was ending, unless the batch has already ended."""
        if self.started:
            self.over.wait()
        self._end_batch(number, self.error)


class Inference:
    """Inference graph of a pipe's parts, its current run, and the batches in flight."""

    def __init__(self, cut: Cut, name: str, numbers: Iterator[int], events: deque[TimelineEvent]) -> None:
        self.cut, self.name = cut, name
        self._numbers, self.events = numbers, events
        self._most = 2 * len(cut.parts) + 2
        self._lock = threading.Lock()  # protects the start, the end and the input of runs
        self._seen: object = None  # state of the module in the worker processes
        self._closed = False
        self.run = self._declared()

    def _declared(self) -> InferenceRun:
        """Create a run of the current parts, but do not start it."""
        # The channels have room for all batches of one stream or call, so neither the program nor a part
        # waits for room.
        capacity = max(self._most, 2 * (self.cut.chunks or CHUNKS))
        return InferenceRun(self.name, self.cut, capacity, self.events)

    @property
    def graph(self) -> Graph:
        """Graph of the current run."""
        return self.run.graph

    # --- batches ---

    def call(self, value: Any) -> Any:
        """Split a batch into micro-batches, and compute its output."""
        number, batch = self._send(value, fresh=True, whole=False)
        try:
            return _outcome(self.cut, number, batch)
        finally:
            batch.run.out.pop(number, None)

    def stream(self, batches: Iterable[Any], keep: object = None) -> Iterator[Any]:
        """Compute the output of each batch, in order. The returned iterator holds a reference to ``keep``."""
        self._raise_if_closed()
        return self._streamed(iter(batches), keep)

    def _streamed(self, batches: Iterator[Any], keep: object) -> Iterator[Any]:
        out: deque[tuple[int, Batch]] = deque()
        ended_by: BaseException | None = None
        try:
            while True:
                try:
                    out.append(self._send(next(batches), fresh=not out, whole=True))
                except StopIteration:
                    break
                except Exception as error:  # raise it later, after the outputs of the earlier batches
                    ended_by = error
                    break
                while len(out) >= self._most:
                    yield _outcome(self.cut, *out.popleft())
            while out:
                yield _outcome(self.cut, *out.popleft())
            if ended_by is not None:
                raise ended_by
        finally:
            ended_by = None  # its traceback refers to this frame
            for number, batch in out:
                batch.run.out.pop(number, None)

    def _send(self, value: Any, fresh: bool, whole: bool) -> tuple[int, Batch]:
        """Send a batch and register it. The batch is sent in micro-batches unless ``whole`` is true.

        ``fresh`` means that the stream has no batch in flight. The processes may then get a new state.
        """
        self._raise_if_closed()
        pieces = self.cut.pieces(mapped(torch.Tensor.detach, value), whole)
        self.cut.measure(pieces[0])
        sizes = [self.cut.samples(piece) for piece in pieces]
        with self._lock:
            self._raise_if_closed()
            run = self._started(fresh)
            number = next(self._numbers)
            batch = Batch(run, sizes, [None] * len(pieces), set(range(len(pieces))))
            run.out[number] = batch
            try:
                for chunk, piece in enumerate(pieces):
                    value, form = closed(piece) if self.cut.on.own_process else (piece, None)
                    run.put((number, chunk, len(pieces), value, {}, (), form))
            except (Closed, Broken):
                run.fail(number)
            except BaseException:
                run.out.pop(number, None)
                raise
        return number, batch

    # --- the run ---

    def _started(self, fresh: bool) -> InferenceRun:
        """Return the current run, or start a new one if it has ended or its processes are out of date."""
        run = self.run
        stale = run.parts is not self.cut.parts or (run.started and not run.alive)
        if stale:  # the cut has changed, or the run has failed
            run.end()
        if self.cut.on.own_process and (stale or fresh or not run.started):
            share(part.module for part in self.cut.parts if not part.remote)
            now = state_of(self.cut.parts, copied=True), [modes for modes, _ in modes_of(self.cut.parts)]
            if run.alive and now != self._seen:
                run.end()  # this first finishes the batches in flight
                stale = True
            self._seen = now
        if stale:
            run = self.run = self._declared()
        if not run.started:
            run.begin()
        return run

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Closed(f"the pipe {self.graph.name!r} is closed; create another one")

    def close(self) -> None:
        """End the run. Callers that wait for a batch get ``Closed``."""
        with self._lock:
            self._closed = True
            busy = bool(self.run.out)
            self.run.end_batches(Closed(f"the pipe {self.graph.name!r} was closed"))
            self.run.end(at_once=busy)

    def forget(self) -> None:
        """End the run without waiting and without taking a lock.

        The garbage collector may call this at any point in the program.
        """
        self.run.close()


def _outcome(cut: Cut, number: int, batch: Batch) -> Any:
    """Wait for the output of a batch, or raise its exception."""
    found = batch.run.outcome(batch)
    if isinstance(found, BaseException):
        try:
            raise found
        finally:
            found = []  # its traceback refers to this frame
    return cut.joined(found, batch.sizes, f"batch {number}")

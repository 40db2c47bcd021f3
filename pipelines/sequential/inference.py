"""Inference: a graph with one stage for each part, through which micro-batches follow each other.

    batches ──split──> [input] ──> [part 0] ──> [part 1] ──> … ──> [results] ──join──> outputs
                                      └─────────────┴──errors────────^

Each item is a :class:`Micro`. A ``map`` keeps nothing between items, so a part whose process is killed is
replaced and the micro-batch in its hands is done again. The run begins with the first batch and stays until
:meth:`Inference.close`; what is out is noted in a :class:`Book`, into which goes what comes back.

Whoever waits for a batch takes outputs in, of whatever batch, until its own is there: a thread between the
parts and the program would take a core from a part twice for each batch, to wake up and to wake the program.
The stage ``results`` only lends its port for that, and looks after failures.

A call's batch is split into micro-batches, which keep all parts at work; a stream's batches do that as they
are. A stream has at most ``2 * parts + 2`` batches out before it asks for one more: enough for every part to
have work while the program handles one batch and makes the next, and a bound on memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from flowchan import (
    Broken,
    Channel,
    Closed,
    Drained,
    Failed,
    Full,
    Graph,
    In,
    Input,
    RunError,
    StageError,
    Stream,
    _core,
    select,
)
from flowchan.pipelines.sequential.cut import CHUNKS, Cut
from flowchan.pipelines.sequential.parts import Part, called, is_torchs_own, run_part, take_cores
from flowchan.pipelines.sequential.passing import Sent, closed, expect_reading, only_reads, opened, received
from flowchan.pipelines.sequential.shared import State, share
from flowchan.pipelines.sequential.state import modes_of, state_of
from flowchan.pipelines.sequential.timeline import Event
from flowchan.pipelines.sequential.values import Micro, mapped
from flowchan.run.failures import ItemFailed
from flowchan.run.latch import Latch
from flowchan.transport.interrupts import append_result


@dataclass
class PartWorker:
    """What a stage calls: one part, built once for each worker. In a process it has the part to itself.

    A generated ``__init__`` has no file: a picture shows the line where the user made the pipe in its place.
    """

    part: Part
    processes: int
    """How many processes the parts have; 0 where they work on threads."""
    hosts: int
    """On how many other hosts these are."""

    def __post_init__(self) -> None:
        torch.set_grad_enabled(False)  # of this thread, which is the worker's own
        self.only_reads = only_reads(self.part)
        # Nothing in it needs what run_part does around the call of a module.
        self.is_simple = self.processes and self.part.device is None and is_torchs_own(self.part.module)
        if self.processes:
            take_cores(self.part.number, self.processes, self.hosts)
            expect_reading()
            self.state = State(self.part.module, self.part.device)

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
        if self.part.away:
            self._raise_if_changed()
        if self.processes:
            value, form = closed(value)
        return batch, chunk, chunks, value, skips, (*events, (begin, time.monotonic())), form

    def _raise_if_changed(self) -> None:
        if self.state.changed():
            raise ValueError(
                "a layer has changed its buffers on another host, where the program does not see it: "
                "call eval() on the pipe, or use on='process'"
            )


@dataclass(slots=True)
class Batch:
    """One batch that is out. ``sizes`` are the samples of its micro-batches, ``values`` what has come back of
    them, but for the ``missing`` ones."""

    line: _Line
    sizes: list[int]
    values: list[Any]
    missing: set[int]
    outcome: Channel[list[Any] | BaseException] = field(default_factory=lambda: Channel(1))
    """Gets all values, or the exception that ended the batch, once. It is no ``concurrent.futures.Future``,
    for a Ctrl-C while one waits may leave that locked, and who sets it stuck."""


class Book:
    """The batches that are out, by number, and what has come back of them. A Ctrl-C may break off any of this
    and have it done again from the start."""

    def __init__(self, parts: list[Part], events: deque[Event]) -> None:
        self.parts, self.events = parts, events
        self.out: dict[int, Batch] = {}

    def receive(self, item: Sent) -> None:
        """A micro-batch is through. Nobody waits for those of a stream that was left."""
        micro = received(item)
        self._note(micro)
        batch = self.out.get(micro.batch)
        if batch is None:
            return
        batch.values[micro.chunk] = micro.value
        batch.missing.discard(micro.chunk)
        if not batch.missing:
            self._end(micro.batch, batch.values)

    def fail(self, failed: Failed[Any]) -> None:
        """A part failed on a micro-batch, or its process died with it again and again."""
        micro = Micro(*failed.item[: len(Micro._fields)])
        self._note(micro)
        part = self.parts[len(micro.events)]  # each part that is done has left its times
        error = StageError(
            f"{part} failed on {micro}: {type(failed.error).__name__}: {failed.error}",
            stage=part.name, worker=part.name, item=repr(micro),
        )  # fmt: skip
        error.__cause__ = failed.error
        self.end(error, micro.batch)

    def end(self, error: BaseException, number: int | None = None) -> None:
        """Batch ``number``, or every one, ends by ``error``, if it has not ended."""
        for one in list(self.out) if number is None else [number]:
            self._end(one, error)

    def _end(self, number: int, outcome: list[Any] | BaseException) -> None:
        batch = self.out.get(number)
        if batch is not None:
            with contextlib.suppress(Full):
                batch.outcome.put_nowait(outcome)
            self.out.pop(number, None)

    def _note(self, micro: Micro) -> None:
        for part, (begin, end) in enumerate(micro.events):
            self.events.append(Event(part, part, "F", micro.batch, micro.chunk, begin, end))


class _Line:
    """One run of the graph, with a thread that waits for its end: whatever it ends by, nobody waits for a
    batch in vain."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.error: BaseException = Closed("the run has ended")
        self._watcher: threading.Thread | None = None
        self._over = Latch()  # Ctrl-C in Thread.join() or is_alive() makes a thread look as if it had ended
        self._outputs: In[Any] | None = None
        self._opened = Latch()
        self._ending: Channel[None] = Channel(1)

    def start(self, graph: Graph, batches: Input[Any]) -> None:
        run = self._run = graph.start()
        self._port = run[batches]
        watcher = threading.Thread(target=self._watch, name=f"{graph.name} watcher", daemon=True)
        watcher.start()
        self._watcher = watcher

    @property
    def runs(self) -> bool:
        return self._watcher is not None and not self._over.is_set()

    def _watch(self) -> None:
        try:
            self._run.wait()
        except RunError as failed:
            self.error = failed.exceptions[0]
        except BaseException as failed:
            self.error = failed
        self._opened.set()
        self.book.end(self.error)
        self._over.set()

    def attend(self, outputs: In[Any], failures: In[Failed[Any]]) -> None:
        """The last stage: lends its port to who waits, and hears of failures. What nobody has taken in when
        the line ends is taken in here."""
        self._outputs = outputs
        self._opened.set()
        gets: list[Any] = [failures, self._ending]
        with contextlib.suppress(Drained):
            while True:
                found = select(gets)
                if found.channel is failures:
                    self.book.fail(found.item)
                elif found.channel is outputs:
                    self.book.receive(found.item)
                else:
                    gets = [failures, outputs]

    # --- called by whoever has batches ---

    def put(self, item: Sent) -> None:
        """Puts a micro-batch in. Where there is no room it takes outputs in meanwhile."""
        try:
            self._port.put_nowait(item)
        except Full:
            self._take_in([], [(self._port, item)])

    def outcome(self, batch: Batch) -> list[Any] | BaseException:
        """What has become of a batch, once that is known."""
        try:
            found: list[Any] | BaseException = self._take_in([batch.outcome], [])
        except (Closed, Broken, ValueError):  # the run has ended, and the watcher ends all batches
            found = batch.outcome.get()
        return found

    def _take_in(self, gets: list[Any], puts: list[Any]) -> Any:
        """Takes in outputs, of whatever batch, until one of the other operations is done; gives its item."""
        if self._outputs is None and self._opened.wait() and self._outputs is None:
            raise Closed("the run has ended")
        operations = [self._outputs, *gets], puts, None
        came: deque[tuple[int, Any]] = deque()
        try:
            while True:
                append_result(came, _core._select, *operations)
                number, item = came[0]
                if number:
                    return item
                self.book.receive(item)
                came.clear()
        except ItemFailed as failed:  # it can't be unpickled, so nobody knows whose output it was
            self.book.end(failed.__cause__ or failed)
            self._run.abort()
            self._over.wait()
            return self._take_in(gets, puts)
        finally:
            for number, item in came:
                if not number:
                    self.book.receive(item)

    def failed(self, number: int) -> None:
        """Batch ``number`` met the end of the run, whose watcher may have ended all batches before it
        came."""
        if self._watcher is not None:
            self._over.wait()
        self.book.end(self.error, number)

    def close(self) -> None:
        """Lets what is out be finished, and then the run end. Takes no lock, and does not wait."""
        if self._watcher is not None:
            self._port.close()
            with contextlib.suppress(Full):
                self._ending.put_nowait(None)

    def end(self, at_once: bool = False) -> None:
        """Ends the run and waits for it. What is out is finished first, unless it shall end ``at_once``."""
        if self._watcher is not None:
            self.close()
            if at_once:
                self._run.abort()
            self._over.wait()
            self._watcher.join()


class Inference:
    """The graph of some parts, its run, and the batches that go through."""

    def __init__(self, cut: Cut, name: str, numbers: Iterator[int], events: deque[Event]) -> None:
        self.cut, self.name = cut, name
        self._numbers, self.events = numbers, events
        self._most = 2 * len(cut.parts) + 2
        self._lock = threading.Lock()  # around what begins and ends runs, and feeds them
        self._line: _Line | None = None
        self._seen: object = None  # the state of the module that the processes have
        self._closed = False
        self._declare()

    def _declare(self) -> None:
        """The graph and the book, for the parts of now."""
        parts = self._parts = self.cut.parts
        processes, hosts = len(parts) if self.cut.on.apart else 0, len(self.cut.on.hosts)
        self.book, self.graph = Book(parts, self.events), Graph(self.name)
        chunks = self.cut.chunks or CHUNKS
        # for all that one stream or call has out, so that it need not wait for room, nor a part for the
        # program
        room = max(self._most, 2 * chunks)
        self._input = self.graph.input("micro-batches", capacity=room)
        stream: Stream[Any] = self._input
        failures = []
        for part in parts:
            worker = partial(PartWorker, part, processes, hosts)
            capacity = chunks if part is not parts[-1] else room
            stream = stream.map(worker, name=part.name, on=self.cut.on, capacity=capacity, restarts=10**9)
            failures.append(stream.errors)
        failed = self.graph.merge(*failures, name="errors") if len(failures) > 1 else failures[0]
        self.graph.stage(self._attend, stream, failed, name="results")
        self.graph._drawn |= {part.name: part.drawn for part in parts} | {
            "errors": None,
            "results": "outputs",
        }

    def _attend(self, outputs: In[Any], failures: In[Failed[Any]]) -> None:
        assert self._line is not None
        self._line.attend(outputs, failures)

    # --- batches ---

    def call(self, value: Any) -> Any:
        """The output of a batch that is split into micro-batches."""
        number, batch = self._send(value, fresh=True, whole=False)
        try:
            return _outcome(self.cut, number, batch)
        finally:
            self.book.out.pop(number, None)

    def stream(self, batches: Iterable[Any], keep: object = None) -> Iterator[Any]:
        """The output of each batch, in order. ``keep`` is kept alive as long as the stream is."""
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
                except Exception as error:  # it comes in its turn, after the outputs of the batches before
                    ended_by = error
                    break
                while len(out) >= self._most:
                    yield _outcome(self.cut, *out.popleft())
            while out:
                yield _outcome(self.cut, *out.popleft())
            if ended_by is not None:
                raise ended_by
        finally:
            ended_by = None  # its traceback holds this frame
            for number, _ in out:
                self.book.out.pop(number, None)

    def _send(self, value: Any, fresh: bool, whole: bool) -> tuple[int, Batch]:
        """Puts a batch into the graph, ``whole`` or in micro-batches, and notes it. ``fresh``: nothing of
        this stream is out, so the processes may be given another state."""
        self._raise_if_closed()
        pieces = self.cut.pieces(mapped(torch.Tensor.detach, value), whole)
        self.cut.measure(pieces[0])
        sizes = [self.cut.samples(piece) for piece in pieces]
        with self._lock:
            self._raise_if_closed()
            line = self._started(fresh)
            number = next(self._numbers)
            batch = Batch(line, sizes, [None] * len(pieces), set(range(len(pieces))))
            self.book.out[number] = batch
            try:
                for chunk, piece in enumerate(pieces):
                    value, form = closed(piece) if self.cut.on.apart else (piece, None)
                    line.put((number, chunk, len(pieces), value, {}, (), form))
            except (Closed, Broken):
                line.failed(number)
            except BaseException:
                self.book.out.pop(number, None)
                raise
        return number, batch

    # --- the run ---

    def _started(self, fresh: bool) -> _Line:
        """The line; a new one where there is none, the last has failed, or its processes hold an old
        state."""
        line = self._line
        if self._parts is not self.cut.parts:  # it was measured where to cut
            if line is not None:
                line.end()
            line = None
            self._declare()
        if line is not None and not line.runs:
            line = None
        if self.cut.on.apart and (line is None or fresh):
            share(part.module for part in self._parts if not part.away)
            now = state_of(self._parts, copied=True), [modes for modes, _ in modes_of(self._parts)]
            if line is not None and now != self._seen:
                line.end()  # it finishes what is out first
                line = None
            self._seen = now
        if line is None:
            line = self._line = _Line(self.book)
            line.start(self.graph, self._input)
        return line

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Closed(f"the pipe {self.graph.name!r} is closed; make another one")

    def close(self) -> None:
        """Ends the run. Batches that are out end with ``Closed``."""
        with self._lock:
            self._closed = True
            busy = bool(self.book.out)
            self.book.end(Closed(f"the pipe {self.graph.name!r} was closed"))
            if self._line is not None:
                self._line.end(at_once=busy)
                self._line = None

    def forget(self) -> None:
        """Ends the run without waiting for it, and without a lock: the collector may call this anywhere."""
        line = self._line
        if line is not None:
            line.close()


def _outcome(cut: Cut, number: int, batch: Batch) -> Any:
    """The output of a batch when it is there. Raises what ended the batch."""
    found = batch.line.outcome(batch)
    if isinstance(found, BaseException):
        try:
            raise found
        finally:
            found = []  # its traceback holds this frame
    return cut.joined(found, batch.sizes, f"batch {number}")

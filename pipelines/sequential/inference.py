"""Inference: a graph with one stage for each part, through which micro-batches follow each other.

    batches ──split──> [input] ──> [part 0] ──> [part 1] ──> … ──> [results] ──join──> outputs
                                      └─────────────┴──errors──> [failures]

Each item is a :class:`Micro`. A ``map`` keeps nothing between items, so a part whose process is killed is
replaced and the micro-batch in its hands is done again. The run begins with the first batch and stays until
:meth:`Inference.close`; what is out is noted in a :class:`Book`, where the last stages put what comes back.

A call's batch is split into micro-batches, which keep all parts at work; a stream's batches do that as they
are. A stream has at most ``2 * parts + 2`` batches out before it asks for one more: enough for every part to
have work while the program handles one batch and makes the next, and a bound on memory.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from flowchan import Broken, Channel, Closed, Failed, Graph, RunError, StageError, Stream
from flowchan.pipelines.sequential.cut import CHUNKS, Cut
from flowchan.pipelines.sequential.parts import Part, run_part, take_cores
from flowchan.pipelines.sequential.timeline import Event
from flowchan.pipelines.sequential.values import Micro, batch_size, join_checked, mapped

REMEMBERED = 100_000
"""Events of the timeline that are kept: the last ones."""


@dataclass
class PartWorker:
    """What a stage calls: one part, built once for each worker. In a process it has the part to itself.

    A generated ``__init__`` has no file: a picture shows the line where the user made the pipe in its place.
    """

    part: Part
    processes: int
    """How many processes the parts have; 0 where they work on threads."""

    def __post_init__(self) -> None:
        if self.processes:
            take_cores(self.part.number, self.processes)
            if self.part.device is not None:
                self.part.module.to(self.part.device)

    def __call__(self, micro: Micro) -> Micro:
        begin = time.monotonic()
        with torch.no_grad():
            value, skips = run_part(self.part, micro.value, micro.skips, keep=not self.processes)
        events = (*micro.events, (begin, time.monotonic()))
        return Micro(micro.batch, micro.chunk, micro.chunks, value, skips, events)


@dataclass(slots=True)
class Batch:
    """One batch that is out. ``sizes`` are the samples of its micro-batches, ``values`` what has come back of
    them."""

    sizes: list[int]
    values: list[Any]
    left: int
    outcome: Channel[list[Any] | BaseException] = field(default_factory=lambda: Channel(1))
    """Gets all values, or the exception that ended the batch, once: from whoever took the batch out of the
    book. It is no ``concurrent.futures.Future``, for a Ctrl-C while one waits may leave that locked, and the
    stage that sets it stuck."""


class Book:
    """The batches that are out, by number. The last stages of the graph write into it what comes back."""

    def __init__(self, parts: list[Part], events: deque[Event]) -> None:
        self.parts, self.events = parts, events
        self.out: dict[int, Batch] = {}

    def receive(self, micro: Micro) -> None:
        """A micro-batch is through. Nobody waits for those of a stream that was left."""
        self._note(micro)
        batch = self.out.get(micro.batch)
        if batch is None:
            return
        batch.values[micro.chunk] = micro.value
        batch.left -= 1
        if not batch.left and self.out.pop(micro.batch, None) is not None:
            batch.outcome.put(batch.values)

    def fail(self, failed: Failed) -> None:
        """A part failed on a micro-batch, or its process died with it again and again."""
        micro: Micro = failed.item
        self._note(micro)
        part = self.parts[len(micro.events)]  # each part that is done has left its times
        error = StageError(
            f"{part} failed on {micro}: {type(failed.error).__name__}: {failed.error}",
            stage=part.name, worker=part.name, item=repr(micro),
        )  # fmt: skip
        error.__cause__ = failed.error
        self.end(micro.batch, error)

    def end(self, number: int, error: BaseException) -> None:
        """Batch ``number`` ends by ``error``, if it has not ended."""
        batch = self.out.pop(number, None)
        if batch is not None:
            batch.outcome.put(error)

    def _note(self, micro: Micro) -> None:
        for part, (begin, end) in enumerate(micro.events):
            self.events.append(Event(part, part, "F", micro.batch, micro.chunk, begin, end))


class _Line:
    """One run of the graph, with a thread that waits for its end: whatever it ends by, nobody waits for a
    batch in vain."""

    def __init__(self, graph: Graph, batches: Stream, book: Book) -> None:
        self.run = graph.start()
        self.port = self.run[batches]
        self.error: BaseException = Closed("the run has ended")
        self.watcher = threading.Thread(
            target=self._watch, args=(book,), name=f"{graph.name} watcher", daemon=True
        )
        self.watcher.start()

    def _watch(self, book: Book) -> None:
        try:
            self.run.wait()
        except RunError as failed:
            self.error = failed.exceptions[0]
        except BaseException as failed:
            self.error = failed
        for number in list(book.out):
            book.end(number, self.error)

    def end(self, at_once: bool = False) -> None:
        """Ends the run and waits for it. What is out is finished first, unless it shall end ``at_once``."""
        self.port.close()
        if at_once:
            self.run.abort()
        self.watcher.join()


class Inference:
    """The graph of some parts, its run, and the batches that go through."""

    def __init__(self, cut: Cut, name: str) -> None:
        self.cut, self.name = cut, name
        self.events: deque[Event] = deque(maxlen=REMEMBERED)
        self._most = 2 * len(cut.parts) + 2
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # around what begins and ends runs, and feeds them
        self._line: _Line | None = None
        self._seen: object = None  # the state of the module that the processes have
        self._closed = False
        self._declare()

    def _declare(self) -> None:
        """The graph and the book, for the parts of now."""
        parts = self._parts = self.cut.parts
        self.book, self.graph = Book(parts, self.events), Graph(self.name)
        processes = len(parts) if self.cut.on == "process" else 0
        chunks = self.cut.chunks or CHUNKS
        # for all that one stream or call has out, so that it need not wait for room
        room = max(self._most, 2 * chunks)
        stream = self._input = self.graph.input("micro-batches", capacity=room)
        failures = []
        for part in parts:
            worker = partial(PartWorker, part, processes)
            stream = stream.map(worker, name=part.name, on=self.cut.on, capacity=chunks, restarts=10**9)
            failures.append(stream.errors)
        stream.sink(self.book.receive, name="results")
        failed = self.graph.merge(*failures, name="errors") if len(failures) > 1 else failures[0]
        failed.sink(self.book.fail, name="failures")

    # --- batches ---

    def call(self, value: Any) -> Any:
        """The output of a batch that is split into micro-batches."""
        number, batch = self._send(value, fresh=True, whole=False)
        try:
            return _outcome(number, batch)
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
                    yield _outcome(*out.popleft())
            while out:
                yield _outcome(*out.popleft())
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
        batch = Batch([batch_size(piece) for piece in pieces], [None] * len(pieces), len(pieces))
        with self._lock:
            self._raise_if_closed()
            line = self._started(fresh)
            number = next(self._numbers)
            self.book.out[number] = batch
            try:
                for chunk, piece in enumerate(pieces):
                    line.port.put(Micro(number, chunk, len(pieces), piece))
            # the run has failed; its watcher may have looked for batches before this one came
            except (Closed, Broken):
                line.watcher.join()
                self.book.end(number, line.error)
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
        if line is not None and not line.watcher.is_alive():
            line = None
        if self.cut.on == "process" and (line is None or fresh):
            now = state_of(self._parts)
            if line is not None and now != self._seen:
                line.end()  # it finishes what is out first
                line = None
            self._seen = now
        if line is None:
            line = self._line = _Line(self.graph, self._input, self.book)
        return line

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Closed(f"the pipe {self.graph.name!r} is closed; make another one")

    def close(self) -> None:
        """Ends the run. Batches that are out end with ``Closed``."""
        with self._lock:
            self._closed = True
            busy = bool(self.book.out)
            for number in list(self.book.out):
                self.book.end(number, Closed(f"the pipe {self.graph.name!r} was closed"))
            if self._line is not None:
                self._line.end(at_once=busy)
                self._line = None

    def forget(self) -> None:
        """Ends the run without waiting for it, and without a lock: the collector may call this anywhere."""
        line = self._line
        if line is not None:
            line.port.close()


def _outcome(number: int, batch: Batch) -> Any:
    """The output of a batch when it is there. Raises what ended the batch."""
    found = batch.outcome.get()
    if isinstance(found, BaseException):
        try:
            raise found
        finally:
            found = []  # its traceback holds this frame
    return join_checked(found, batch.sizes, f"batch {number}")


def state_of(parts: list[Part]) -> object:
    """Something that changes when parameters, buffers or modes of the parts do: torch counts the changes of
    each tensor, but for those through ``tensor.data``; of inference tensors it keeps no count, so they always
    count as changed."""
    found: list[object] = []
    for part in parts:
        for module in part.module.modules():
            found.append(module.training)
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None:
                    found.append(
                        (
                            tensor.data_ptr(),
                            object() if tensor.is_inference() else (id(tensor), tensor._version),
                        )
                    )
    return found

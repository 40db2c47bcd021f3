"""Write the trace of a run to a file while the run is active.

Algorithm. A thread reads the wait times of all ports every ``READ_EVERY_S`` seconds, or less often if that
would cost more than 1 % of a core. The thread also reads the channels' counters, and writes the trace events
to the file. Everything else comes from the run's feed. For the workers, only sampled items therefore cost any
time. If a worker is killed, only the sampled items that it has not reported are missing.

The file is a JSON array. The closing bracket is optional in the trace format. Viewers can therefore open the
file of a killed program.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from flowchan.channel.latch import Latch
from flowchan.errors import FlowchanError
from flowchan.items.text import shown
from flowchan.run.observe.feed import Feed
from flowchan.run.observe.trace_events import LABELS, TraceEvents
from flowchan.run.observe.worker_spans import FINEST_NS, Span, WorkerSpans
from flowchan.run.policy.decisions import AbortRequested, Decided, StopRequested
from flowchan.run.policy.events import (
    Began,
    Death,
    Ended,
    ErrorSent,
    Failure,
    ItemSpans,
    ItemTraced,
    NotAdded,
    Retried,
    RunEnded,
    Started,
    Warned,
    WorkerId,
)
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.plan import Plan
from flowchan.run.policy.scaling import Scale
from flowchan.run.worker.opening import Channels, Ports

log = logging.getLogger("flowchan.run")

READ_EVERY_S = 0.01
"""Minimum number of seconds between two readings of the wait times."""
COST = 100
"""The time between two readings is at least this multiple of the CPU time that one takes."""
WRITE_EVERY_NS = 500_000_000
COUNT_EVERY_NS = 100_000_000
"""Interval between two values of a counter, in nanoseconds. After every ``MOST_COUNTS`` values, the interval
doubles."""
MOST_COUNTS = 5_000


class TracedPorts(Protocol):
    """Methods of a run's ports that tracing needs."""

    @property
    def channels(self) -> Channels: ...

    @property
    def ports(self) -> Mapping[WorkerId, Ports]: ...


class _TraceFile:
    """File without a buffer, because a forked child would write its copy of buffered data again."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._is_regular = stat.S_ISREG(os.fstat(self._file).st_mode)
            if self._is_regular:
                os.ftruncate(self._file, 0)
        except BlockingIOError as error:
            os.close(self._file)
            raise BlockingIOError(
                error.errno, "another run is already writing its trace to this file"
            ) from None
        except BaseException:
            os.close(self._file)
            raise
        self._compress: Callable[..., bytes] | None = None
        if path.endswith(".gz"):
            # Imported late, because few programs compress the trace, but before the workers are forked.
            from gzip import compress

            self._compress = compress

    def write(self, text: str) -> None:
        data = text.encode("ascii")
        if self._compress:  # write complete gzip members, because viewers reject a truncated one
            data = self._compress(data, compresslevel=1)
        begin = os.lseek(self._file, 0, os.SEEK_CUR) if self._is_regular else 0
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            if self._is_regular:
                os.ftruncate(self._file, begin)
            raise

    def end(self, text: str) -> None:
        """Write the end of the trace, and close the file."""
        try:
            self.write(text)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file, and leave the trace incomplete."""
        # Unlock it explicitly, because forked children inherit the file and would keep the lock.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)


class RunTrace:
    """Writes the trace of one run.

    Args:
        path: Path of the file, ending in ``.json`` or ``.json.gz``.

    Raises:
        TypeError: ``path`` is not a path.
        ValueError: The file name does not end in ``.json`` or ``.json.gz``.
        OSError: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"run: trace must be a path or None, got {shown(path)}")
        self.path = os.fsdecode(path)
        if not self.path.endswith((".json", ".json.gz")):
            raise ValueError(f"run: trace must end in .json or .json.gz, got {self.path!r}")
        try:
            self._file: _TraceFile | None = _TraceFile(self.path)
        except OSError as error:
            text = f"run: trace={self.path!r} could not be opened: {error.strerror}; choose another path"
            raise type(error)(error.errno, text) from None
        self._lock = threading.Lock()
        self._over = Latch()
        self._thread: threading.Thread | None = None
        self._lines: list[str] = []
        self._is_empty = True
        self._workers: dict[WorkerId, WorkerSpans] = {}
        self._starting: dict[WorkerId, int] = {}
        self._finest = FINEST_NS
        self._write_at = self._count_at = 0
        self._count_every, self._counts = COUNT_EVERY_NS, 0
        self._passed: dict[str, int] = {}
        self._values: dict[str, float] = {}
        self._counted_at = 0

    def follow(self, plan: Plan, ports: TracedPorts, feed: Feed) -> None:
        """Prepare to trace a run that has not started yet."""
        self._ports, now = ports, time.monotonic_ns()
        self._edges = [edge.name for edge in plan.edges]
        self._counted_at = now
        self._events = TraceEvents(plan.graph.name, tuple(stage.name for stage in plan.graph.stages), now)
        self._add(self._events.begin())
        self._starting = {worker.id: now for worker in plan.workers if not worker.gathers}
        feed.listen(self._record)

    def start(self) -> None:
        """Start the thread that reads the ports.

        The run must already have forked its processes, because forking is unsafe while other threads run.
        """
        with self._lock:
            if not self._over.is_set():
                name = f"flowchan {self._events.graph} trace"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Complete the file, and ignore later events."""
        with self._lock:
            self._over.set()
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._lock:
            self._write()
            file, self._file = self._file, None
            self._workers.clear()
        if file is not None:
            try:
                file.end("[\n]\n" if self._is_empty else "\n]\n")
            except OSError as error:
                self._warn(error)

    # --- called by the thread of the trace ---

    def _work(self) -> None:
        pause = READ_EVERY_S
        while not self._over.wait(pause):
            began = time.thread_time()
            with self._lock:
                self._sample(time.monotonic_ns())
            pause = max(READ_EVERY_S, COST * (time.thread_time() - began))

    def _sample(self, now: int) -> None:
        for id in list(self._workers):
            self._read(id, now)
        if now >= self._count_at:
            self._count_at = now + self._count_every
            self._count(now)
        if now >= self._write_at:
            self._write_at = now + WRITE_EVERY_NS
            self._write()

    def _read(self, id: WorkerId, now: int) -> None:
        ports, spans = self._ports.ports.get(id), self._workers[id]
        if ports is not None:
            self._show(id, spans.read(now, _waited(ports)))
        if spans.finest > self._finest:
            self._finest = spans.finest
            text = f"from here on, spans of some workers are at least {self._finest / 1e6:g} ms long"
            self._lines.append(self._events.run_instant(text, now))

    def _show(self, id: WorkerId, spans: Iterable[Span]) -> None:
        for span in spans:
            self._add(self._events.span(id.stage, id.number, LABELS[span.kind], span.begin, span.end))

    def _count(self, now: int) -> None:
        seconds, self._counted_at = (now - self._counted_at) / 1e9, now
        for name in self._edges:
            stats = self._ports.channels[name].stats()
            passed = stats.items_out - self._passed.get(name, 0)
            self._passed[name] = stats.items_out
            self._value(f"{name}: items inside", now, stats.inside)
            self._value(f"{name}: items per second", now, round(passed / max(seconds, 1e-9), 3))
        self._counts += 1
        if self._counts % MOST_COUNTS == 0:
            self._count_every *= 2

    def _value(self, name: str, now: int, value: float) -> None:
        if self._values.get(name) != value:
            self._values[name] = value
            self._lines.append(self._events.counter(name, now, value))

    # --- called by the feed ---

    def _record(self, event: Any) -> None:
        """Record an event from the feed, on any thread."""
        try:
            with self._lock:
                if self._file is not None:
                    self._see(event, time.monotonic_ns())
            if isinstance(event, RunEnded):
                self.close()
        except (FlowchanError, OSError) as error:
            self._warn(error)

    def _see(self, event: Any, now: int) -> None:
        match event:
            case Decided():
                self._see_decided(event, now)
            case Started(worker, host=host):
                self._events.started(worker.stage, worker.number, host)
                self._starting.setdefault(worker, now)
            case Began(worker):
                self._begin(worker, now)
            case ItemSpans(worker, spans):
                for marks, taken, put in spans:
                    self._add(self._events.items(worker.stage, worker.number, marks, taken, put))
            case ItemTraced():
                self._add(self._events.flow(event))
            case Retried(worker):
                self._happened(worker, "retry", now)
            case ErrorSent(worker, text):
                self._happened(worker, "item failed", now, text)
            case NotAdded(worker, text):
                self._happened(worker, "could not be added", now, text)
            case Warned(stage, text):
                self._lines.append(self._events.run_instant(f"warning about {stage}", now, text))
            case RunEnded(state):
                for worker in list(self._workers):
                    self._end(worker, now)
                self._count(now)
                self._lines.append(self._events.run_instant(f"run is {state}", now))

    def _see_decided(self, decided: Decided, now: int) -> None:
        match decided.event:
            case Ended(worker):
                self._end(worker, now)
            case Failure(worker, error):
                self._end(worker, now)
                if worker.number:
                    self._happened(worker, "failed", now, text_of(error))
            case Death(worker) as death:
                self._end(worker, now)
                self._happened(worker, "restarts" if death.retired else "died", now, death.how)
                if worker in decided.after.alive:
                    self._starting[worker] = now
            case StopRequested():
                self._lines.append(self._events.run_instant("stop requested", now))
            case AbortRequested():
                self._lines.append(self._events.run_instant("abort requested", now))
            case Scale(stage, workers):
                self._lines.append(self._events.run_instant(f"{stage}: workers={workers}", now))

    def _begin(self, worker: WorkerId, now: int) -> None:
        started, ports = self._starting.pop(worker, now), self._ports.ports.get(worker)
        if started < now:
            self._add(self._events.span(worker.stage, worker.number, "starting", started, now))
        self._workers[worker] = WorkerSpans(now, (0, 0, 0) if ports is None else _waited(ports))

    def _end(self, worker: WorkerId, now: int) -> None:
        if (spans := self._workers.pop(worker, None)) is not None:
            self._show(worker, spans.end(now))

    def _happened(self, worker: WorkerId, name: str, now: int, text: str = "") -> None:
        self._add(self._events.instant(worker.stage, worker.number, name, now, text))

    # --- writing the file ---

    def _add(self, lines: Iterator[str]) -> None:
        self._lines += lines

    def _write(self) -> None:
        if not self._lines or self._file is None:
            return
        text = ",\n".join(self._lines)
        self._lines.clear()
        try:
            self._file.write(("[\n" if self._is_empty else ",\n") + text)
            self._is_empty = False
        except OSError as error:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()
            self._warn(error)

    def _warn(self, error: BaseException) -> None:
        log.warning("the trace in %r is incomplete: %s", self.path, text_of(error))


def _waited(ports: Ports) -> tuple[int, int, int]:
    """Return how many nanoseconds a worker has waited for input, for room and for its turn."""
    reads = sum(reader._waited()[0] for reader in ports.inputs.values())
    writes = [writer._waited() for writer in ports.writers()]
    turn = sum(turn for _, turn in writes)
    place = sum(wait for wait, _ in writes) - turn
    return round(1e9 * reads), round(1e9 * place), round(1e9 * turn)

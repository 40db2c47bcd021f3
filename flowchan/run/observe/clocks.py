"""Measure how long each worker has worked and how much CPU time it has used.

Both measurements begin when the worker has built the user's callable (``Began``). ``clock_gettime`` reads the
CPU clock of a thread or process in about a microsecond; this module computes the clock's number. If the
thread or process has ended, the call fails, and the last value is kept. ``time.pthread_getcpuclockid`` would
be unsafe for a thread that has ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

from flowchan.run.policy.events import Started, WorkerId
from flowchan.run.policy.stats import WorkerStats, WorkSeconds

HAS_CLOCKS = sys.platform == "linux"
"""Whether this system provides CPU clocks of other threads and processes."""


@dataclass(slots=True)
class CpuClock:
    """Measures the CPU time of a process, or of a thread in this process, since the clock was created."""

    pid: int = 0
    thread: int = 0
    _first: tuple[float, float] = (0.0, 0.0)
    _last: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self.update()
        self._first = self._last

    def update(self) -> None:
        """Read the clock, if the process or thread still exists."""
        # The kernel numbers the clocks of other processes and threads in this way: CPUCLOCK_SCHED, plus 4 for
        # a single thread.
        clock = (~self.thread << 3) | 6 if self.thread else (~self.pid << 3) | 2
        place = f"self/task/{self.thread}" if self.thread else str(self.pid)
        try:
            cpu, ready = time.clock_gettime(clock), 0.0
            with open(f"/proc/{place}/schedstat", "rb") as file:
                ready = int(file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return
        self._last = cpu, ready

    @property
    def cpu(self) -> float:
        return self._last[0] - self._first[0]

    @property
    def ready(self) -> float:
        return self._last[1] - self._first[1]


@dataclass(slots=True)
class _Working:
    """Start time and CPU clock of a worker that has begun to work.

    ``clock`` is None if the CPU time is unknown, or if another worker on the same thread counts it
    (``shares``).
    """

    began: float
    clock: CpuClock | None
    shares: bool = False

    def seconds(self, now: float) -> WorkSeconds:
        if self.clock is not None:
            self.clock.update()
            return WorkSeconds(max(0.0, now - self.began), cpu=self.clock.cpu, ready=self.clock.ready)
        unknown = 0.0 if self.shares else None
        return WorkSeconds(max(0.0, now - self.began), cpu=unknown, ready=unknown)


@dataclass(frozen=True, slots=True)
class Worked:
    """Work of a stage: the ``total`` of all workers so far, and the statistics of the current workers."""

    total: WorkSeconds = field(default_factory=WorkSeconds)
    now: tuple[WorkerStats, ...] = ()


@dataclass
class WorkerClocks:
    """Measures the working and CPU times of all workers of a run.

    A worker on a thread starts its clock on this thread, and the supervisor's thread stops it.
    """

    _pids: dict[WorkerId, int] = field(default_factory=dict)  # process ids, or 0 on another host
    _working: dict[WorkerId, _Working] = field(default_factory=dict)
    # Ids of the threads that already have a clock. The id 0 stands for a process.
    _threads: set[int] = field(default_factory=set)
    _ended: defaultdict[str, WorkSeconds] = field(
        default_factory=lambda: defaultdict(lambda: WorkSeconds(cpu=0.0, ready=0.0))
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def started(self, event: Started) -> None:
        """Record that a worker's process has been started."""
        with self._lock:
            self._pids[event.worker] = 0 if event.host else event.pid

    def begin(self, worker: WorkerId) -> None:
        """Start the clock of a worker. If the worker runs on a thread, call this on the thread itself."""
        now = time.monotonic()
        with self._lock:
            self._end(worker, now)
            pid, thread = self._pids.get(worker), 0
            if pid is None:
                thread = threading.get_native_id()
            shares = bool(thread) and thread in self._threads
            clock = None if pid == 0 or shares or not HAS_CLOCKS else CpuClock(pid or os.getpid(), thread)
            self._working[worker] = _Working(now, clock, shares)
            if clock is not None:
                self._threads.add(thread)

    def update(self, worker: WorkerId) -> None:
        """Read the clock of a worker that is about to end, while its thread or process still exists."""
        with self._lock:
            working = self._working.get(worker)
            if working is not None and working.clock is not None:
                working.clock.update()

    def end(self, worker: WorkerId) -> None:
        """Stop the clock of a worker that has ended."""
        with self._lock:
            self._end(worker, time.monotonic())
            self._pids.pop(worker, None)

    def _end(self, worker: WorkerId, now: float) -> None:
        working = self._working.pop(worker, None)
        if working is not None:
            if working.clock is not None:
                self._threads.discard(working.clock.thread)
            self._ended[worker.stage] = added(self._ended[worker.stage], working.seconds(now))

    def until(self, now: float) -> dict[str, Worked]:
        """Return the work of each stage from the start of the run up to ``now``."""
        with self._lock:
            totals = dict(self._ended)
            working: dict[str, list[WorkerStats]] = {}
            for id, one in self._working.items():
                seconds = one.seconds(now)
                totals[id.stage] = added(totals.get(id.stage, WorkSeconds(cpu=0.0, ready=0.0)), seconds)
                working.setdefault(id.stage, []).append(WorkerStats(id.number, True, seconds))
        return {
            stage: Worked(total, tuple(sorted(working.get(stage, ()), key=lambda one: one.number)))
            for stage, total in totals.items()
        }


def added(one: WorkSeconds, other: WorkSeconds) -> WorkSeconds:
    """Return the sum of two measurements.

    If one of two values is unknown, their sum is also unknown.
    """
    cpu = None if one.cpu is None or other.cpu is None else one.cpu + other.cpu
    ready = None if one.ready is None or other.ready is None else one.ready + other.ready
    return WorkSeconds(one.working + other.working, cpu=cpu, ready=ready)

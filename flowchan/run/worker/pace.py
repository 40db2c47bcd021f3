"""Space the starts of a stage's items evenly, for the option ``rate=``.

Algorithm. This is the generic cell rate algorithm (ITU-T I.371) with a burst of one. The workers of a stage
share one value per run: the start time of the next item. A worker takes this time for its item and adds one
interval to the shared value, in one step under a lock. The worker then waits until its start time. If no item
starts for a while, the missed starts are lost.

Invariants. A worker holds the lock only while it reads and writes the value. The kernel releases a file lock
when the process that holds it ends. A worker that is killed at any point therefore wastes at most one start,
and never blocks the others.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from flowchan.declare.values import Stage
from flowchan.errors import Broken
from flowchan.items.program_file import ProgramFile
from flowchan.run.policy.failures import OwnEnd

POLL_INTERVAL_S = 0.05
"""Seconds between checks whether the run has ended while a worker waits."""
_TIME = struct.Struct("d")


class Pace:
    """Schedules the items of a stage whose workers are threads or coroutines.

    Args:
        interval: Seconds between consecutive starts.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._lock = threading.Lock()
        self._next = 0.0

    def take_start(self) -> float:
        """Take the next start time, and return it as a time on the monotonic clock."""
        with self._lock:
            start = max(time.monotonic(), self._next)
            self._next = start + self._interval
        return start


class SharedPace(Pace):
    """Schedules the items of a stage whose workers are processes on one machine.

    The program keeps the next start time in an in-memory file.
    """

    def __init__(self, interval: float) -> None:
        self._interval, self._file = interval, ProgramFile("flowchan pace")
        os.pwrite(self._file.fd, _TIME.pack(0.0), 0)

    def take_start(self) -> float:
        """Take the next start time, or raise ``Broken`` if the run has ended and the file is gone."""
        return _taken_from(self._file.fd, self._interval)


def _taken_from(fd: int, interval: float) -> float:
    """Take the next start time from a file, under a file lock that excludes other processes."""
    fcntl.lockf(fd, fcntl.LOCK_EX)
    try:
        (next_start,) = _TIME.unpack(os.pread(fd, _TIME.size, 0))
        start: float = max(time.monotonic(), next_start)
        os.pwrite(fd, _TIME.pack(start + interval), 0)
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)
    return start


def pace_of(stage: Stage) -> Pace | None:
    """Return a new schedule for one run of a stage, or ``None`` if the stage has no ``rate``."""
    if stage.rate is None:
        return None
    interval = min(1.0 / stage.rate, threading.TIMEOUT_MAX)
    return SharedPace(interval) if stage.placement.own_process else Pace(interval)


def paced(function: Callable[..., Any], pace: Pace, is_over: Callable[[], bool]) -> Callable[..., Any]:
    """Wrap ``function`` so that each call first waits for its start time.

    If the run fails or is aborted during the wait, raise ``OwnEnd``, because the item has not failed.
    """

    def call(item: Any) -> Any:
        try:
            wait_until(pace.take_start(), is_over, "start")
        except Broken as end:
            raise OwnEnd from end
        return function(item)

    return call


def wait_until(until: float, is_over: Callable[[], bool], purpose: str) -> None:
    """Wait until a time on the monotonic clock. Raise ``Broken`` if the run ends first."""
    while (remaining := until - time.monotonic()) > 0:
        if is_over():
            raise Broken(f"the run failed or was aborted while an item was waiting for its {purpose}")
        time.sleep(min(remaining, POLL_INTERVAL_S))

"""Space the starts of a stage's items evenly: ``rate=``.

Algorithm. The generic cell rate algorithm (ITU-T I.371) with a burst of one. A stage has one time in each
run: the start of its next item. A worker takes that time for its item and moves it on by one interval, in one
step under a lock. Then it waits until the time that it took. Time in which no item starts is not saved up.

Invariants. A worker holds the lock only while it reads and writes the time. The kernel releases a lock on a
file when the process that holds it ends. So a worker killed at any point leaves at most one start unused, and
blocks no other worker.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from flowchan.declare.values import Stage
from flowchan.errors import Broken
from flowchan.run.policy.failures import OwnEnd

POLL_INTERVAL_S = 0.05
"""Seconds between two checks for broken channels during a wait."""
_TIME = struct.Struct("d")


class Pace:
    """Times at which the workers of one stage start their items, for threads and coroutines.

    Args:
        interval: Seconds between two starts.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._lock = threading.Lock()
        self._next = 0.0

    def take_start(self) -> float:
        """Take the next start, and return its time on the monotonic clock."""
        with self._lock:
            start = max(time.monotonic(), self._next)
            self._next = start + self._interval
        return start


class SharedPace(Pace):
    """Times at which the worker processes of one stage start their items, on one machine.

    The time is in a file in memory. It belongs to the program, and other processes open it when they take
    their first start.
    """

    def __init__(self, interval: float) -> None:
        super().__init__(interval)
        self._fd = os.memfd_create("flowchan pace")
        weakref.finalize(self, os.close, self._fd)
        os.pwrite(self._fd, _TIME.pack(0.0), 0)

    def __reduce__(self) -> tuple[Any, ...]:
        inode = os.fstat(self._fd).st_ino
        return _OpenedPace, (self._interval, f"/proc/{os.getpid()}/fd/{self._fd}", inode)

    def take_start(self) -> float:
        """See :class:`Pace`."""
        return _taken_from(self._fd, self._interval)


class _OpenedPace(Pace):
    """A shared pace in a process that has received it."""

    def __init__(self, interval: float, path: str, inode: int) -> None:
        super().__init__(interval)
        self._path, self._inode = path, inode
        self._own = -1

    def take_start(self) -> float:
        """See :class:`Pace`. Raises ``Broken`` if the run has ended, because its file is gone."""
        if self._own < 0:
            self._own = self._open()
        return _taken_from(self._own, self._interval)

    def _open(self) -> int:
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Broken("the run is over") from error
        if os.fstat(fd).st_ino != self._inode:  # the program has opened another file in its place
            os.close(fd)
            raise Broken("the run is over")
        weakref.finalize(self, os.close, fd)
        return fd


def _taken_from(fd: int, interval: float) -> float:
    """Take the next start from a file, whose lock excludes other processes."""
    fcntl.lockf(fd, fcntl.LOCK_EX)
    try:
        (next_start,) = _TIME.unpack(os.pread(fd, _TIME.size, 0))
        start: float = max(time.monotonic(), next_start)
        os.pwrite(fd, _TIME.pack(start + interval), 0)
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)
    return start


def pace_of(stage: Stage) -> Pace | None:
    """Return a new pace for one run of a stage, or ``None`` without a limit."""
    if stage.rate is None:
        return None
    interval = min(1.0 / stage.rate, threading.TIMEOUT_MAX)
    return SharedPace(interval) if stage.placement.own_process else Pace(interval)


def paced(function: Callable[..., Any], pace: Pace, is_over: Callable[[], bool]) -> Callable[..., Any]:
    """Return ``function`` with a wait before each call until its start.

    The wait raises ``OwnEnd`` if the run is aborted or fails, because that is not a failure of the item.
    """

    def call(item: Any) -> Any:
        try:
            wait_until(pace.take_start(), is_over, "start")
        except Broken as end:
            raise OwnEnd from end
        return function(item)

    return call


def wait_until(until: float, is_over: Callable[[], bool], purpose: str) -> None:
    """Wait until a time on the monotonic clock; raise ``Broken`` if the run ends before."""
    while (remaining := until - time.monotonic()) > 0:
        if is_over():
            raise Broken(f"the run failed or was aborted while an item was waiting for its {purpose}")
        time.sleep(min(remaining, POLL_INTERVAL_S))

"""Watch processes on a thread that sleeps until one of them ends."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from flowchan.run.crew.process import WorkerProcess
from flowchan.run.policy.events import ProcessEnded, WorkerId

POLL_INTERVAL_S = 0.05
"""Seconds between checks of processes without a pidfd."""


class Watch:
    """Watches processes, and reports ``ProcessEnded`` once for each process that ends."""

    def __init__(self, tell: Callable[[ProcessEnded], None]) -> None:
        self._tell = tell
        self._announced: dict[int, WorkerId] = {}  # watched processes that have a pidfd, by pidfd
        self._silent: list[tuple[WorkerId, WorkerProcess]] = []
        self._closed = False
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._epoll = select.epoll()
        except BaseException:
            os.close(self._wake)
            raise
        self._epoll.register(self._wake, select.EPOLLIN)

    def add(self, id: WorkerId, process: WorkerProcess) -> None:
        """Add a process to watch."""
        with self._lock:
            if process.pidfd is None:
                self._silent.append((id, process))
                os.eventfd_write(self._wake, 1)
            else:
                self._announced[process.pidfd] = id
                self._epoll.register(process.pidfd, select.EPOLLIN)

    def run(self) -> None:
        """Report every process that ends, until :meth:`stop` is called."""
        while not self._closed:
            found = self._epoll.poll(POLL_INTERVAL_S if self._silent else None)
            for id in self._ended([fd for fd, _ in found]):
                self._tell(ProcessEnded(id))

    def _ended(self, readable: list[int]) -> list[WorkerId]:
        """Return the workers whose processes have ended, and stop watching these.

        Each pidfd must be unregistered. If a forked child has inherited the pidfd, closing it would not
        remove it from epoll.
        """
        ended = []
        with self._lock:
            for fd in readable:
                if fd == self._wake:
                    os.eventfd_read(fd)
                else:
                    self._epoll.unregister(fd)
                    ended.append(self._announced.pop(fd))
            for id, process in list(self._silent):
                if process.ended():
                    self._silent.remove((id, process))
                    ended.append(id)
        return ended

    def stop(self) -> None:
        """Let :meth:`run` return. Call this method before a watched process is closed."""
        self._closed = True
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the descriptors after :meth:`run` has returned."""
        self._epoll.close()
        os.close(self._wake)

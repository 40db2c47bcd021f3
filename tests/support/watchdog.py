"""Use one thread to watch all tests of a process, and to end a test that hangs.

A thread per test would cost a millisecond of CPU time per test, and several milliseconds of waiting on a busy
machine.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable

GRACE_S = 20.0
"""Minimum seconds from a test's limit until faulthandler ends the process. The maximum is twice as long."""


class Watchdog:
    """Calls ``end`` when a test reaches its limit, and lets faulthandler end the process if the test still
    hangs.

    Faulthandler's own thread runs even if native code never releases the GIL. The thread restarts only if its
    remaining time is shorter or much longer than a test's limit.
    """

    def __init__(self, stderr: int) -> None:
        self._stderr = stderr
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._end: Callable[[], None] | None = None
        self._deadline = self._wakes = float("inf")
        self._backstop = self._limit_s = 0.0

    def begin(self, limit_s: float, end: Callable[[], None]) -> bool:
        """Begin to watch a test, and return whether this has started a thread."""
        now = time.monotonic()
        with self._changed:
            self._deadline, self._end, self._limit_s = now + limit_s, end, limit_s
            if self._deadline < self._wakes:
                self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        if limit_s + GRACE_S <= self._backstop - now <= limit_s + 2 * GRACE_S:
            return False
        self._backstop = now + limit_s + 2 * GRACE_S
        faulthandler.dump_traceback_later(self._backstop - now, exit=True, file=self._stderr)
        return True

    def pause(self) -> None:
        """Stop watching until the next test begins."""
        with self._changed:
            self._deadline, self._end = float("inf"), None

    def close(self) -> None:
        """Stop watching.

        If the process does not exit within the limit of the last test, faulthandler ends it.
        """
        self.pause()
        self._backstop = 0.0
        faulthandler.cancel_dump_traceback_later()
        if self._limit_s:
            faulthandler.dump_traceback_later(self._limit_s, exit=True, file=self._stderr)

    def _watch(self) -> None:
        with self._changed:
            while (left := self._deadline - time.monotonic()) > 0:
                self._wakes = self._deadline
                self._changed.wait(None if left == float("inf") else left)
            end = self._end
        assert end is not None
        end()

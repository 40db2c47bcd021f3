"""The background thread that sends commands which did not fill a batch."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol

FLUSH_INTERVAL_S = 0.001
"""Seconds after which the commands in a buffer are sent."""
QUIET_ROUNDS = 50
"""Number of flushes without commands after which the thread sleeps."""


class Flushable(Protocol):
    """A client with a command buffer.

    Attributes:
        buffer: Position of the buffer in the stream, and commands that were not sent.
        idle: True if the thread does not watch the buffer.
    """

    buffer: list[Any]
    idle: bool

    def flush(self) -> None:
        """Send the commands."""


class Flusher:
    """Background thread that sends commands that did not fill a batch."""

    def __init__(self) -> None:
        self._watched: set[Flushable] = set()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._changing = threading.Lock()

    def watch(self, client: Flushable) -> None:
        """Send the client's commands within milliseconds until it is quiet."""
        with self._changing:
            client.idle = False
            self._watched.add(client)
            self._wake.set()
            if self._thread is None:
                self._ended = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._ended,), name="flowchan remote flush", daemon=True
                )
                self._thread.start()

    def end(self) -> None:
        """End the thread, because no client is left. The next client starts it again."""
        with self._changing:
            thread, self._thread = self._thread, None
            self._ended.set()
            self._wake.set()
        if thread is not None:
            thread.join()

    def _run(self, ended: threading.Event) -> None:
        quiet = 0
        while not ended.wait(FLUSH_INTERVAL_S):
            quiet += 1
            for client in list(self._watched):
                if len(client.buffer) > 1:
                    quiet = 0
                    try:
                        client.flush()
                    except Exception:  # the next operation of the program raises the error
                        self._watched.discard(client)
            if quiet > QUIET_ROUNDS:
                self._wake.clear()
                for client in list(self._watched):
                    client.idle = True
                    self._watched.discard(client)
                    if len(client.buffer) > 1:  # a command came between the flush and the end of the watch
                        self.watch(client)
                self._wake.wait()
                quiet = 0


flusher = Flusher()


def _in_fork() -> None:
    global flusher
    flusher = Flusher()


os.register_at_fork(after_in_child=_in_fork)

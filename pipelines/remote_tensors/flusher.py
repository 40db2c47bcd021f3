"""The background thread that sends commands which did not fill a batch."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Protocol

FLUSH_INTERVAL_S = 0.001
"""Seconds after which the commands in a buffer are sent."""
FREE_INTERVAL_S = 0.5
"""Seconds after which a program without commands sends the ids of dropped tensors."""
QUIET_ROUNDS = 50
"""Number of flushes without commands after which the thread sleeps."""


class Flushable(Protocol):
    """A client with a command buffer.

    Attributes:
        buffer: Position of the buffer in the stream, and commands that were not sent.
        frees: Ids to free with the next batch.
        idle: True if the thread does not watch the buffer.
    """

    buffer: list[Any]
    frees: list[int]
    idle: bool

    def flush(self) -> None:
        """Send the commands."""


class Flusher:
    """Background thread that sends commands that did not fill a batch."""

    def __init__(self) -> None:
        self._watched: set[Flushable] = set()
        self._known: weakref.WeakSet[Flushable] = weakref.WeakSet()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, client: Flushable) -> None:
        """Send the client's commands within milliseconds until it is quiet."""
        client.idle = False
        self._watched.add(client)
        self._known.add(client)
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flowchan remote flush", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        quiet = 0
        pause = threading.Event()
        while True:
            pause.wait(FLUSH_INTERVAL_S)
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
                while not self._wake.wait(FREE_INTERVAL_S):
                    self._free()
                quiet = 0

    def _free(self) -> None:
        """Send the ids of tensors that the program has dropped without a later command."""
        for client in list(self._known):
            if client.frees:
                try:
                    client.flush()
                except Exception:  # the node has ended
                    self._known.discard(client)


flusher = Flusher()


def _in_fork() -> None:
    global flusher
    flusher = Flusher()


os.register_at_fork(after_in_child=_in_fork)

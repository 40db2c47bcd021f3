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
    """Background thread that sends commands that did not fill a batch. The last client ends it."""

    def __init__(self) -> None:
        self._clients: set[Flushable] = set()
        self._watched: set[Flushable] = set()
        self._wake = threading.Event()
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, client: Flushable) -> None:
        """Send the client's commands within milliseconds until it is quiet."""
        with self._changing:
            self._clients.add(client)
            self._keep(client)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="flowchan remote flush", daemon=True)
                self._thread.start()

    def remove(self, client: Flushable) -> None:
        """Forget a closed client. The thread ends with the last one."""
        with self._changing:
            self._clients.discard(client)
            self._watched.discard(client)
            if not self._clients and self._thread is not None:
                self._wake.set()
                self._thread.join()
                self._thread = None

    def _keep(self, client: Flushable) -> None:
        client.idle = False
        self._watched.add(client)
        self._wake.set()

    def _run(self) -> None:
        quiet = 0
        pause = threading.Event()
        while self._clients:
            pause.wait(FLUSH_INTERVAL_S)
            quiet = 0 if self._flush() else quiet + 1
            if quiet > QUIET_ROUNDS:
                self._wake.clear()
                self._rest()
                if self._clients:
                    self._wake.wait()
                quiet = 0

    def _flush(self) -> bool:
        """Send the commands of the clients, and return whether there were any."""
        busy = [client for client in list(self._watched) if len(client.buffer) > 1]
        for client in busy:
            try:
                client.flush()
            except Exception:  # the next operation of the program raises the error
                self._watched.discard(client)
        return bool(busy)

    def _rest(self) -> None:
        """Stop watching the clients until they issue the next command."""
        for client in list(self._watched):
            client.idle = True
            self._watched.discard(client)
            if len(client.buffer) > 1:  # a command came between the flush and the end of the watch
                self._keep(client)


flusher = Flusher()


def _in_fork() -> None:
    global flusher
    flusher = Flusher()


os.register_at_fork(after_in_child=_in_fork)

"""Send the commands of incomplete batches, and the IDs to free, on a background thread."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import Any, Protocol

FLUSH_INTERVAL_S = 0.001
"""Seconds after which buffered commands are sent."""
QUIET_ROUNDS = 50
"""Number of flushes without commands after which the thread goes to sleep."""
FREE_INTERVAL_S = 0.1
"""Seconds between sends of ids to free while the thread sleeps."""


class Flushable(Protocol):
    """A client with a command buffer.

    Attributes:
        buffer: Position of the buffer in the stream, and the unsent commands.
        frees: References to deleted handles, whose IDs can be freed.
        idle: True while the thread does not check this client's buffer every millisecond.
    """

    buffer: list[Any]
    death: BaseException | None
    frees: list[Any]
    idle: bool

    def try_flush(self) -> None:
        """Send the commands and the IDs to free, unless the node is too far behind."""


class Flusher:
    """Background thread that sends commands and IDs to free.

    The thread runs while this process has clients.
    """

    def __init__(self) -> None:
        self._clients: set[Flushable] = set()
        # A signal handler that raises in Event.set() would leave the event's lock locked.
        # SimpleQueue.put() is native code, and a signal handler cannot interrupt it.
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, client: Flushable) -> None:
        """Start serving a client."""
        with self._changing:
            self._clients = {*self._clients, client}
            if self._thread is None:
                name = "flowchan remote flush"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def remove(self, client: Flushable) -> None:
        """Stop serving a client."""
        with self._changing:
            self._clients = self._clients - {client}
            thread = self._thread
            if self._clients or thread is None:
                return
            self._thread = None
            self._wakes.put(None)
        thread.join()

    def wake(self) -> None:
        """Make the thread check the buffers every millisecond until no more commands arrive."""
        for client in self._clients:
            client.idle = False
        self._wakes.put(None)

    def _run(self) -> None:
        quiet = 0
        pause = threading.Event()
        while self._thread is threading.current_thread():
            if quiet <= QUIET_ROUNDS:
                pause.wait(FLUSH_INTERVAL_S)
                quiet = 0 if self._flush() else quiet + 1
                continue
            with contextlib.suppress(queue.Empty):
                while True:
                    self._wakes.get_nowait()
            for client in self._clients:
                client.idle = True
            # Flush once more: a command may have been added before its client was marked idle.
            if self._flush() or self._sleep():
                quiet = 0

    def _sleep(self) -> bool:
        """Wait until IDs are due to be freed or ``wake()`` is called; return whether it was called."""
        with contextlib.suppress(queue.Empty):
            self._wakes.get(timeout=FREE_INTERVAL_S)
            return True
        return False

    def is_current(self) -> bool:
        """Return whether the calling thread is this background thread."""
        return self._thread is threading.current_thread()

    def _flush(self) -> bool:
        """Flush all clients, and return whether any client had commands."""
        found = False
        for client in self._clients:
            has_commands = client.death is None and len(client.buffer) > 1
            found = found or has_commands
            if has_commands or client.frees:
                try:
                    client.try_flush()
                except Exception:  # the program's next operation raises this error
                    continue
        return found


flusher = Flusher()


def _in_fork() -> None:
    global flusher
    flusher = Flusher()


os.register_at_fork(after_in_child=_in_fork)

"""The background thread that sends commands which did not fill a batch, and frees."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol

FLUSH_INTERVAL_S = 0.001
"""Seconds after which the commands in a buffer are sent."""
QUIET_ROUNDS = 50
"""Number of flushes without commands after which the thread sleeps."""
FREE_INTERVAL_S = 0.1
"""Seconds after which frees are sent while the thread sleeps."""


class Flushable(Protocol):
    """A client with a command buffer.

    Attributes:
        buffer: Position of the buffer in the stream, and commands that were not sent.
        frees: Ids to free.
        idle: True if the thread sleeps.
    """

    buffer: list[Any]
    frees: list[int]
    idle: bool

    def try_flush(self) -> None:
        """Send the commands and frees, unless the node is too far behind."""


class Flusher:
<<<<<<< HEAD
    """Background thread that sends commands that did not fill a batch. The last client ends it."""
||||||| c9f2ca94
    """Background thread that sends commands that did not fill a batch."""
=======
    """Background thread that sends commands and frees. It exists while this process has clients."""
>>>>>>> copies

    def __init__(self) -> None:
<<<<<<< HEAD
        self._clients: set[Flushable] = set()
        self._watched: set[Flushable] = set()
||||||| c9f2ca94
        self._watched: set[Flushable] = set()
=======
        self._clients: set[Flushable] = set()
>>>>>>> copies
        self._wake = threading.Event()
        self._changing = threading.Lock()
        self._thread: threading.Thread | None = None

<<<<<<< HEAD
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
||||||| c9f2ca94
    def watch(self, client: Flushable) -> None:
        """Send the client's commands within milliseconds until it is quiet."""
        client.idle = False
        self._watched.add(client)
=======
    def add(self, client: Flushable) -> None:
        """Begin to serve a client."""
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
            self._wake.set()
        thread.join()

    def wake(self) -> None:
        """Let the thread look at the buffers every millisecond until they are quiet."""
        for client in self._clients:
            client.idle = False
>>>>>>> copies
        self._wake.set()

    def _run(self) -> None:
        quiet = 0
        pause = threading.Event()
<<<<<<< HEAD
        while self._clients:
            pause.wait(FLUSH_INTERVAL_S)
            quiet = 0 if self._flush() else quiet + 1
            if quiet > QUIET_ROUNDS:
                self._wake.clear()
                self._rest()
                if self._clients:
                    self._wake.wait()
||||||| c9f2ca94
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
                self._wake.wait()
=======
        while self._thread is threading.current_thread():
            if quiet <= QUIET_ROUNDS:
                pause.wait(FLUSH_INTERVAL_S)
                quiet = 0 if self._flush() else quiet + 1
                continue
            self._wake.clear()
            for client in self._clients:
                client.idle = True
            # a command may have come before its client was idle
            if self._flush() or self._wake.wait(FREE_INTERVAL_S):
>>>>>>> copies
                quiet = 0

<<<<<<< HEAD
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

||||||| c9f2ca94
=======
    def _flush(self) -> bool:
        """Flush all clients, and return whether one of them had commands."""
        found = False
        for client in self._clients:
            has_commands = len(client.buffer) > 1
            found = found or has_commands
            if has_commands or client.frees:
                try:
                    client.try_flush()
                except Exception:  # the next operation of the program raises the error
                    continue
        return found

>>>>>>> copies

flusher = Flusher()


def _in_fork() -> None:
    global flusher
    flusher = Flusher()


os.register_at_fork(after_in_child=_in_fork)

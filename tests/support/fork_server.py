"""Start a program that imports modules once for many tests, and forks a child for each request.

The programs are peer_server.py and program_server.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.waiting import WAIT_LIMIT_S


def started(file: str, given: socket.socket, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start ``file`` from this folder as a program that inherits the socket."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name(file)), str(given.fileno()), *arguments],
        pass_fds=[given.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
        process_group=0,  # Ctrl-C must not end the server before the processes that use it
    )


class ForkingProgram:
    """A running program: ``file`` from this folder.

    The program's first argument is the descriptor for orders. ``close()`` waits for all its children to end,
    and then ends the program.
    """

    def __init__(self, file: str, *arguments: str, **environment: str) -> None:
        own_end, child_end = socket.socketpair()
        self._lock = threading.Lock()
        self._program = started(file, child_end, *arguments, **environment)
        child_end.close()
        self._orders = Connection(own_end.detach())

    def order(self, order: tuple[Any, ...], descriptors: list[int], task: bytes | None = None) -> int:
        """Send an order with descriptors, and return the pid of the child that executes the order."""
        with self._lock, socket.socket(fileno=os.dup(self._orders.fileno())) as duplicate:
            self._orders.send(order)
            socket.send_fds(duplicate, [b"+"], descriptors)
            if task is not None:
                self._orders.send_bytes(task)
            child: int = self._orders.recv()
            return child

    def reap(self, child: int) -> int:
        """Return the exit code of a child that has ended."""
        with self._lock:
            self._orders.send(child)
            code: int = self._orders.recv()
            return code

    def kill(self) -> None:
        """End the program, but not its children."""
        self._program.kill()
        self._program.wait()
        self._orders.close()

    def close(self) -> None:
        self._orders.send(None)
        self._program.wait(WAIT_LIMIT_S)
        self._orders.close()

"""Pass a process's standard output and error on to the processes that it starts."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from multiprocessing import context, reduction
from typing import Any


class Streams:
    """Carries the standard output and error of this process to a process that it starts.

    A child of Python's forkserver inherits the server's streams, which may differ from this process's
    streams. All other children inherit the right streams directly.
    """

    def __init__(self) -> None:
        self._sent: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        popen: Any = context.get_spawning_popen()
        if popen is None or popen.method != "forkserver":
            return {"_sent": {}}
        return {"_sent": {fd: reduction.DupFd(fd) for fd in (1, 2) if _is_open(fd)}}

    def take(self) -> None:
        """Use the parent's streams as this process's standard output and error."""
        while self._sent:
            fd, sent = self._sent.popitem()
            received = sent.detach()
            os.dup2(received, fd)
            os.close(received)


def terminals() -> dict[int, str]:
    """Return the terminals that standard output and error write to, by descriptor."""
    found = {}
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            found[fd] = os.ttyname(fd)
    return found


@contextlib.contextmanager
def printing_to(wanted: Mapping[int, str]) -> Iterator[None]:
    """Redirect output that goes to a terminal to the ``wanted`` terminals during the block.

    While a run displays its progress, the program's output goes to a terminal other than the user's.
    """
    current = terminals()
    with contextlib.ExitStack() as restored:
        for fd in current.keys() & wanted.keys():
            if current[fd] != wanted[fd]:
                # The terminal may be gone, or this process may not be allowed to write to it.
                with contextlib.suppress(OSError):
                    _redirect(fd, wanted[fd], restored)
        yield


def _redirect(fd: int, terminal: str, restored: contextlib.ExitStack) -> None:
    new = os.open(terminal, os.O_WRONLY | os.O_NOCTTY)
    try:
        kept = os.dup(fd)
        restored.callback(os.close, kept)
        _flush()
        os.dup2(new, fd)
        restored.callback(os.dup2, kept, fd)
    finally:
        os.close(new)
    restored.callback(_flush)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True

"""What is printed while a table is live, so that it appears above the table and not through it.

The table stands on the terminal; whoever else writes there would write into it: the program, its threads, C
libraries, worker processes, and what these start. So for that time the standard streams lead to a terminal
of ours, which a thread reads. It is a terminal, so that all go on to write line by line, and in colour.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import sys
import termios
import threading
from collections.abc import Callable
from types import TracebackType

_GRACE_MS = 50
"""How long what was written last takes to come through."""


class Captured:
    """While it is open, what comes by those standard streams of this process and its children that are
    terminals goes to ``show``, line by line; what is drawn over within a line (a progress bar) is left out.
    ``terminal`` leads to the terminal itself."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def __enter__(self) -> Captured:
        self._ours, theirs = os.openpty()
        _leave_bytes_alone(theirs)
        with contextlib.suppress(OSError):
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(8)))
        _flush()
        self._kept = {fd: os.dup(fd) for fd in (1, 2) if os.isatty(fd)}
        self.terminal = open(os.dup(self._kept[2]), "w", buffering=1)
        for fd in self._kept:
            os.dup2(theirs, fd)
        os.close(theirs)
        self._over = os.eventfd(0, os.EFD_CLOEXEC)
        self._reader = threading.Thread(target=self._read, name="flowchan terminal", daemon=True)
        return self

    def start(self) -> None:
        """From now on ``show`` is called, on another thread."""
        self._reader.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _flush()
        for fd, kept in self._kept.items():
            os.dup2(kept, fd)
            os.close(kept)
        os.eventfd_write(self._over, 1)
        self._reader.join()
        os.close(self._ours)
        os.close(self._over)
        self.terminal.close()

    def _read(self) -> None:
        waiting = select.poll()
        waiting.register(self._ours, select.POLLIN)
        waiting.register(self._over, select.POLLIN)
        text, over = b"", False
        while True:
            ready = [fd for fd, _ in waiting.poll(_GRACE_MS if over else None)]
            if self._over in ready:
                over = True
                waiting.unregister(self._over)
            if self._ours in ready:
                try:
                    text = self._pass_on(text + os.read(self._ours, 65536))
                    continue
                except OSError:  # all who had the other end have closed it
                    break
            if over and not ready:
                break
        if text:
            self._pass_on(text + b"\n")

    def _pass_on(self, text: bytes) -> bytes:
        """Shows the whole lines, and gives the rest."""
        *lines, rest = text.split(b"\n")
        for line in lines:
            self._show(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace"))
        return rest


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _leave_bytes_alone(terminal: int) -> None:
    modes = termios.tcgetattr(terminal)
    modes[1] &= ~termios.OPOST
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, modes)

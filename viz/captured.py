"""What is printed while a table is live, so that it appears above the table and not through it.

The table stands on the terminal; whoever else writes there would write into it: the program, its threads, C
libraries, worker processes, and what these start. So for that time the standard streams lead to a terminal
of ours, which a thread reads. It is a terminal, so that all go on to write line by line, and in colour.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import sys
import termios
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

_GRACE_MS = 50
"""How long what was written last takes to come through."""
_LAST = 1.0
"""Seconds after which nobody listens any more to a process that prints on when the table has gone."""


_PRINTS_ONLY = ("dumb", "unknown")
"""Terminals on which rich draws nothing before the end."""


class Drawn(Protocol):
    """What rich draws again and again, as its ``Live`` and its ``Progress``."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


D = TypeVar("D", bound=Drawn)
_drawing = threading.Lock()


def claim(stream: TextIO, ends: contextlib.ExitStack) -> bool:
    """Whether it leads to a terminal that can be drawn on, and nobody else in this process does. Then the
    terminal is the caller's until ``ends``."""
    if not stream.isatty() or os.environ.get("TERM", "").lower() in _PRINTS_ONLY:
        return False
    if not _drawing.acquire(blocking=False):
        return False
    ends.callback(_drawing.release)
    return True


def draw_on(
    stream: TextIO, make: Callable[[Console], D], ends: contextlib.ExitStack
) -> tuple[D, threading.RLock]:
    """What ``make`` gives for a console on ``stream``, drawn until ``ends``. If that is the standard error
    stream, what is printed meanwhile by this process and by those that it starts appears above it. Both at
    its beginning and at its end the caller holds interrupts.

    Whoever draws holds the lock that comes with it: rich settles what is to be drawn over before it writes,
    and of two threads the later would go by what the other has drawn over already."""
    from rich.console import Console
    from rich.text import Text

    def show(line: str) -> None:
        with lock:
            console.print(Text.from_ansi(line), soft_wrap=True)

    lock, captured = threading.RLock(), None
    if _is_standard_error(stream):
        captured = ends.enter_context(Captured(show))
    console = Console(file=stream if captured is None else captured.terminal)
    drawn = make(console)
    ends.callback(_quietly, drawn.stop)
    drawn.start()
    if captured is not None:
        ends.callback(captured.stop)  # before the drawing, or what came last would be drawn with it once more
        captured.start()
    return drawn, lock


def _is_standard_error(stream: TextIO) -> bool:
    """Whether what is written to it comes out where the standard error stream of this process does."""
    try:
        return stream.fileno() == 2
    except (OSError, ValueError):
        return False


class Captured:
    """While it is open, what comes by those standard streams of this process and its children that are
    terminals goes to ``show``, line by line; what is drawn over within a line (a progress bar) is left out,
    and so is what ``show`` fails at. ``terminal`` leads to the terminal itself."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def __enter__(self) -> Captured:
        with contextlib.ExitStack() as ends:
            self._ours, theirs = os.openpty()
            ends.callback(os.close, self._ours)
            with open(theirs, "wb", buffering=0):
                _leave_bytes_alone(theirs)
                with contextlib.suppress(OSError):
                    fcntl.ioctl(theirs, termios.TIOCSWINSZ, fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(8)))
                self._over = os.eventfd(0, os.EFD_CLOEXEC)
                ends.callback(os.close, self._over)
                # As the program writes to it, but what that encoding lacks is shown by its number.
                encoding = getattr(sys.stderr, "encoding", None)
                self.terminal = open(os.dup(2), "w", 1, encoding=encoding, errors="backslashreplace")
                ends.callback(_quietly, self.terminal.close)
                self._reader = threading.Thread(target=self._read, name="flowchan terminal", daemon=True)
                self._captures = ends.enter_context(contextlib.ExitStack())
                self._captures.callback(self._end_reader)
                _flush()
                for fd in (1, 2):
                    if os.isatty(fd):
                        _lead(fd, theirs, self._captures)
                self._captures.callback(_flush)
            self._ends = ends.pop_all()
        return self

    def start(self) -> None:
        """From now on ``show`` is called, on another thread."""
        self._reader.start()

    def stop(self) -> None:
        """The streams lead where they led; what came by them until now has been shown."""
        self._captures.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.close()

    def _end_reader(self) -> None:
        if self._reader.ident is not None:
            os.eventfd_write(self._over, 1)
            self._reader.join()

    def _read(self) -> None:
        waiting = select.poll()
        waiting.register(self._ours, select.POLLIN)
        waiting.register(self._over, select.POLLIN)
        text, give_up = b"", math.inf
        while time.monotonic() < give_up:
            ready = [fd for fd, _ in waiting.poll(None if give_up == math.inf else _GRACE_MS)]
            if self._over in ready:
                give_up = time.monotonic() + _LAST
                waiting.unregister(self._over)
            if self._ours in ready:
                try:
                    read = os.read(self._ours, 65536)
                except OSError:  # all who had the other end have closed it
                    break
                text = self._pass_on(text + read)
            elif not ready:
                break
        if text:
            self._pass_on(text + b"\n")

    def _pass_on(self, text: bytes) -> bytes:
        """Shows the whole lines, and gives what is to be seen of the rest."""
        *lines, rest = text.split(b"\n")
        for line in lines:
            _quietly(self._show, _last_drawn(line).decode(errors="replace"))
        return _last_drawn(rest) + (b"\r" if rest.endswith(b"\r") else b"")


def _last_drawn(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _lead(fd: int, to: int, ends: contextlib.ExitStack) -> None:
    """Until ``ends`` what is written to ``fd`` goes there."""
    kept = os.dup(fd)
    ends.callback(os.close, kept)
    ends.callback(os.dup2, kept, fd)
    os.dup2(to, fd)


def _quietly(call: Callable[..., object], *args: object) -> None:
    """A terminal that fails is no reason for anything else to."""
    with contextlib.suppress(Exception):
        call(*args)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _leave_bytes_alone(terminal: int) -> None:
    modes = termios.tcgetattr(terminal)
    modes[1] &= ~termios.OPOST
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, modes)

"""A run on a terminal: a table of its stages, or bars that say how far it is. Where nothing can be drawn,
lines.

What is printed while something is drawn appears above it and not through it. The table stands on the
terminal; whoever else writes there would write into it: the program, its threads, C libraries, worker
processes, and what these start. So for that time the standard streams lead to a terminal of ours, which a
thread reads. It is a terminal, so that all go on to write line by line, and in colour.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import select
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from flowchan.declare.blueprint import Blueprint
from flowchan.run.crew.process_start import start_server
from flowchan.run.observe.report import bottleneck_text, count, rate, share
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.stats import RunStats, StageStats
from flowchan.transport.interrupts import interrupts_deferred
from flowchan.viz.live.lines import Lines
from flowchan.viz.live.model import (
    bars,
    bars_line,
    busiest,
    headline,
    items_of,
    plain_line,
    queues,
    times,
    troubles,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.table import Table

log = logging.getLogger("flowchan.viz")

AROUND = 9
"""Lines of the terminal that the table's rows leave free: for its head and for what stands below it."""
_GRACE_MS = 50
"""How long what was written last takes to come through."""
_LAST = 1.0
"""Seconds after which nobody listens any more to a process that prints on when the table has gone."""


_PRINTS_ONLY = ("dumb", "unknown")
"""Terminals on which rich draws nothing before the end."""


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


def draw_on(stream: TextIO, stays: bool, ends: contextlib.ExitStack) -> tuple[Live, threading.RLock]:
    """What draws on ``stream`` until ``ends``; what was drawn last stays then, or goes. If that is the
    standard error stream, what is printed meanwhile by this process and by those that it starts appears above
    it. Both at its beginning and at its end the caller holds interrupts.

    Whoever draws holds the lock that comes with it: rich settles what is to be drawn over before it writes,
    and of two threads the later would go by what the other has drawn over already."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def show(line: str) -> None:
        with lock:
            console.print(Text.from_ansi(line), soft_wrap=True)

    lock, captured = threading.RLock(), None
    if _is_standard_error(stream):
        captured = ends.enter_context(Captured(show))
    console = Console(file=stream if captured is None else captured.terminal)
    drawn = Live(
        console=console, auto_refresh=False, transient=not stays, redirect_stdout=False, redirect_stderr=False
    )
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


class LiveView:
    """Shows one run: ``with LiveView() as view:`` and :meth:`show` as often as you like, several times a
    second. With a ``graph`` it shows how far that is, else what its stages do.

    Writes to ``stream`` (the standard error stream, so that the program's own output stays clean). On a
    terminal, what is printed meanwhile by this process and by those that it starts appears above what is
    drawn. ``clock`` tells the time that spaces the plain lines.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        graph: Blueprint | None = None,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._graph = graph
        self._lines = Lines(self._stream, self._line, clock)
        self._live: Live | None = None
        self._has_failed = False
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> LiveView:
        with contextlib.ExitStack() as ends:
            with interrupts_deferred():
                if claim(self._stream, ends):
                    if self._graph is not None:
                        start_server()  # it keeps the streams that it begins with, also after our end
                    self._live, self._lock = draw_on(self._stream, self._graph is not None, ends)
            self._ends = ends.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live = None
        with interrupts_deferred():
            self._ends.close()  # what was printed last comes out now

    def show(self, stats: RunStats) -> None:
        """Show ``stats``: at once on a terminal, if a line is due elsewhere."""
        with self._whatever_fails():
            live = self._live
            if live is None:
                self._lines.show(stats)
                return
            width, height = live.console.size
            drawn = (
                _bars(self._graph, stats) if self._graph else _stages(stats, width, max(1, height - AROUND))
            )
            with self._lock:
                live.update(drawn, refresh=True)

    def say(self, line: str) -> None:
        """Write one line above what is drawn."""
        with self._whatever_fails():
            if (live := self._live) is not None:
                with self._lock:
                    live.console.print(line, markup=False, highlight=False)
                return
        with self._whatever_fails():
            self._lines.say(line)

    def _line(self, stats: RunStats) -> str:
        return plain_line(stats) if self._graph is None else bars_line(self._graph, stats)

    @contextlib.contextmanager
    def _whatever_fails(self) -> Iterator[None]:
        """When the view fails, the run has not: it goes on, with plain lines. Those that the stream does not
        take are lost, but it may take the next."""
        try:
            yield
        except Exception as error:
            self._live = None
            if not self._has_failed:
                self._has_failed = True
                log.warning("the live view could not be written: %s", text_of(error))


def _bars(graph: Blueprint, stats: RunStats) -> RenderableType:
    """How far a run is."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    trouble = ", ".join(troubles(stats))
    drawn = Table.grid(expand=True, padding=(0, 1))
    drawn.add_column(no_wrap=True)
    drawn.add_column(ratio=1)
    drawn.add_column(justify="right")
    for bar in bars(graph, stats):
        words = ", ".join(filter(None, [headline(bar), times(bar, stats), trouble]))
        full = ProgressBar(total=bar.total, completed=bar.done, animation_time=stats.elapsed)
        drawn.add_row(Text(bar.stage), full, Text(words))
    return drawn


def _stages(stats: RunStats, width: int, height: int) -> RenderableType:
    """The table, and below it what goes wrong, each in a line that a narrow terminal cuts."""
    from rich.console import Group
    from rich.text import Text

    lines = [Text(f"▶ the {bottleneck_text(stats)}")] if stats.cause or stats.bottleneck else []
    lines += [Text(f"! {trouble}", style="red") for trouble in troubles(stats)]
    if stats.last_error:
        lines.append(Text(f"! last: {' '.join(stats.last_error.split())}", style="red"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(_table(stats, width, height), *lines)


def _table(stats: RunStats, width: int, height: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    chosen, waiting = busiest(stats, height), queues(stats)
    hidden = len(stats.stages) - len(chosen)
    title = f"{stats.graph} · {stats.state} · {stats.elapsed:.1f} s" + (
        f" · {hidden} quieter stages" if hidden else ""
    )
    titles = ("workers", "items", "rate", "busy", "wait in", "wait out", "queue")
    rows = [_cells(stage, waiting.get(stage.name)) for stage in chosen]
    table = Table(
        title=Text(title, style="bold yellow" if stats.state == "stopping" else "bold"),
        title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False,
    )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    left = width - sum(widths) - len(widths)
    table.add_column("stage", no_wrap=True, max_width=max(left, 8))  # the one that may be cut
    for name, wide in zip(titles, widths, strict=True):
        table.add_column(name, justify="left" if name == "queue" else "right", no_wrap=True, min_width=wide)
    for stage, cells in zip(chosen, rows, strict=True):
        slow = stage.name == stats.bottleneck
        style = "red" if stage.failed else "bold yellow" if slow else ""
        table.add_row(Text(f"{'▶' if slow else ' '} {stage.name}"), *map(Text, cells), style=style)
    return table


def _cells(stage: StageStats, queue: tuple[int, int] | None) -> list[str]:
    missing = "" if stage.alive == stage.workers else f"{stage.alive}/"
    return [
        f"{missing}{stage.workers} {stage.on}",
        count(items_of(stage)),
        rate(stage.rate),
        share(stage.busy),
        share(stage.waiting_input),
        share(stage.waiting_output),
        _bar(queue),
    ]


def _bar(queue: tuple[int, int] | None) -> str:
    if queue is None:
        return ""
    inside, capacity = queue
    full = round(4 * inside / capacity) if capacity else 0
    return f"{'█' * full}{'░' * (4 - full)} {count(inside)}/{count(capacity)}"

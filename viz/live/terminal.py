"""Show a run as a table of its stages or as progress bars on a terminal, and as lines elsewhere.

While the drawing is shown, other output must appear above it. The program, its threads, C libraries, worker
processes and their children must not write into the table. The standard streams are therefore redirected to a
pseudoterminal, which a thread reads. A pseudoterminal counts as a terminal. All these writers therefore still
write line by line and in colour.
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
from flowchan.run.observe.report import (
    bottleneck_text,
    count,
    rate,
    recent_text,
    share,
    workers_text,
)
from flowchan.run.observe.what_if import advice
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.stats import RunStats, StageStats
from flowchan.transport.interrupts import interrupts_deferred
from flowchan.viz.live.lines import Lines
from flowchan.viz.live.model import (
    Bar,
    Progress,
    bars_line,
    busiest,
    headline,
    hints,
    items_of,
    plain_line,
    problems,
    queues,
    starting,
    times,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from rich.table import Table

log = logging.getLogger("flowchan.viz")

AROUND = 9
"""Number of terminal lines left for the head of the table and for the lines below it."""
_GRACE_MS = 50
"""Milliseconds to wait for the last output."""
_LAST = 1.0
"""Maximum seconds to read output that a process still prints after the table has closed."""


_PRINTS_ONLY = ("dumb", "unknown")
"""Values of TERM with which rich draws only at the end."""


_drawing = threading.Lock()


def claim(stream: TextIO, ends: contextlib.ExitStack) -> bool:
    """Return True if the stream is a terminal and no other view of this process draws on the terminal.

    If the result is True, the terminal is reserved for the caller until ``ends`` closes.
    """
    if not stream.isatty() or os.environ.get("TERM", "").lower() in _PRINTS_ONLY:
        return False
    if not _drawing.acquire(blocking=False):
        return False
    ends.callback(_drawing.release)
    return True


def draw_on(stream: TextIO, persists: bool, ends: contextlib.ExitStack) -> tuple[Live, threading.RLock]:
    """Return a drawing on ``stream`` that lasts until ``ends`` closes.

    The drawing stays visible if ``persists`` is true.

    If the stream is standard error, the output of this process and its children appears above the drawing.
    The caller must defer interrupts while it calls this function and while it closes ``ends``.

    The caller must hold the returned lock while it draws. rich decides which lines to overwrite before it
    writes. If two threads drew without the lock, the output of one could invalidate the decision of the
    other.
    """
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
        console=console,
        auto_refresh=False,
        transient=not persists,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    ends.callback(_suppressing, drawn.stop)
    drawn.start()
    if captured is not None:
        # Stop the capture before the drawing ends. Otherwise, the last lines would be drawn twice.
        ends.callback(captured.stop)
        captured.start()
    return drawn, lock


def _is_standard_error(stream: TextIO) -> bool:
    """Return True if the stream writes to the standard error of this process."""
    try:
        return stream.fileno() == 2
    except (OSError, ValueError):
        return False


class Captured:
    """Captures the standard streams of this process and its children, if they are terminals.

    While it is open, each line is passed to ``show``. Overwritten parts of a line, such as earlier states of
    a progress bar, are omitted. An exception in ``show`` is ignored. ``terminal`` writes directly to the
    terminal.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def __enter__(self) -> Captured:
        with contextlib.ExitStack() as ends:
            self._ours, terminal_end = os.openpty()
            ends.callback(os.close, self._ours)
            with open(terminal_end, "wb", buffering=0):
                _leave_bytes_alone(terminal_end)
                with contextlib.suppress(OSError):
                    fcntl.ioctl(
                        terminal_end, termios.TIOCSWINSZ, fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(8))
                    )
                self._over, self._end = os.pipe()
                ends.callback(os.close, self._over)
                ends.callback(os.close, self._end)
                # Use the encoding of standard error, and escape characters that it cannot represent.
                encoding = getattr(sys.stderr, "encoding", None)
                self.terminal = open(os.dup(2), "w", 1, encoding=encoding, errors="backslashreplace")
                ends.callback(_suppressing, self.terminal.close)
                self._reader = threading.Thread(target=self._read, name="flowchan terminal", daemon=True)
                self._captures = ends.enter_context(contextlib.ExitStack())
                self._captures.callback(self._end_reader)
                _flush()
                for fd in (1, 2):
                    if os.isatty(fd):
                        _lead(fd, terminal_end, self._captures)
                self._captures.callback(_flush)
            self._ends = ends.pop_all()
        return self

    def start(self) -> None:
        """Start a thread that calls ``show``."""
        self._reader.start()

    def stop(self) -> None:
        """Show all output so far, and then restore the streams."""
        self._captures.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.close()

    def _end_reader(self) -> None:
        if self._reader.ident is not None:
            os.write(self._end, b".")
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
                except OSError:  # all processes have closed their end
                    break
                text = self._pass_on(text + read)
            elif not ready:
                break
        if text:
            self._pass_on(text + b"\n")

    def _pass_on(self, text: bytes) -> bytes:
        """Show all complete lines, and return the visible part of the last, incomplete line."""
        *lines, rest = text.split(b"\n")
        for line in lines:
            _suppressing(self._show, _last_drawn(line).decode(errors="replace"))
        return _last_drawn(rest) + (b"\r" if rest.endswith(b"\r") else b"")


def _last_drawn(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _lead(fd: int, to: int, ends: contextlib.ExitStack) -> None:
    """Redirect ``fd`` to the descriptor ``to`` until ``ends`` closes."""
    kept = os.dup(fd)
    ends.callback(os.close, kept)
    ends.callback(os.dup2, kept, fd)
    os.dup2(to, fd)


def _suppressing(call: Callable[..., object], *args: object) -> None:
    """Call a function and ignore its exceptions, because a broken terminal must not stop the caller."""
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
    """View of a run, written to an output stream such as standard error.

    Use ``with LiveView() as view:`` and call :meth:`show` several times a second.

    Args:
        stream: Stream to write to (default: standard error, so that standard output contains only the
            program's output). If the stream is a terminal, the output of this process and its children
            appears above the drawing.
        clock: Clock that determines when a line is due (default: ``time.monotonic``).
        graph: Graph to show the progress of (default: none; the view then shows the activity of the stages).
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        graph: Blueprint | None = None,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._progress = None if graph is None else Progress(graph)
        self._bars: list[Bar] = []
        self._lines = Lines(self._stream, self._line, clock)
        self._live: Live | None = None
        self._has_failed = False
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> LiveView:
        with contextlib.ExitStack() as ends:
            with interrupts_deferred():
                if claim(self._stream, ends):
                    if self._progress is not None:
                        # Start the fork server now: it keeps the streams that it was started with, even after
                        # this view has closed.
                        start_server()
                    self._live, self._lock = draw_on(self._stream, self._progress is not None, ends)
            self._ends = ends.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live = None
        with interrupts_deferred():
            self._ends.close()  # this also shows the last output

    def show(self, stats: RunStats) -> None:
        """Show ``stats``: immediately on a terminal, and elsewhere as a line if a line is due."""
        with self._whatever_fails():
            if self._progress is not None:
                self._bars = self._progress.bars(stats)
            live = self._live
            if live is None:
                self._lines.show(stats)
                return
            width, height = live.console.size
            drawn = (
                _stages(stats, width, max(1, height - AROUND))
                if self._progress is None
                else _progress_bars(self._bars, stats)
            )
            with self._lock:
                live.update(drawn, refresh=True)

    def print_line(self, line: str) -> None:
        """Write one line, above the drawing if one is shown."""
        with self._whatever_fails():
            if (live := self._live) is not None:
                with self._lock:
                    live.console.print(line, markup=False, highlight=False)
                return
        with self._whatever_fails():
            self._lines.print_line(line)

    def _line(self, stats: RunStats) -> str:
        return plain_line(stats) if self._progress is None else bars_line(self._bars, stats)

    @contextlib.contextmanager
    def _whatever_fails(self) -> Iterator[None]:
        """If drawing the view fails, continue with plain lines, because the run itself has not failed.

        If the stream rejects a line, the line is lost, but the stream may accept the next one.
        """
        try:
            yield
        except Exception as error:
            self._live = None
            if not self._has_failed:
                self._has_failed = True
                log.warning("the live view could not be shown: %s", text_of(error))


def _progress_bars(known: list[Bar], stats: RunStats) -> RenderableType:
    """Return the progress bars of a run, followed by the cause that limits the run and the advice."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    problem = ", ".join([*starting(stats), *problems(stats)])
    drawn = Table.grid(expand=True, padding=(0, 1))
    drawn.add_column(no_wrap=True)
    drawn.add_column(ratio=1)
    drawn.add_column(justify="right")
    for bar in known:
        words = ", ".join(filter(None, [headline(bar), times(bar, stats), problem]))
        full = ProgressBar(total=bar.total, completed=bar.done, animation_time=stats.elapsed)
        drawn.add_row(Text(bar.stage), full, Text(words))
    return Group(drawn, *(Text(words, no_wrap=True, overflow="ellipsis") for words in hints(stats)))


def _stages(stats: RunStats, width: int, height: int) -> RenderableType:
    """Return the table, and below it one line per problem, cut to the width of the terminal."""
    from rich.console import Group
    from rich.text import Text

    lines = [Text(f"▶ the {bottleneck_text(stats)}")] if stats.cause or stats.bottleneck else []
    lines += [Text(f"▶ advice: {text}") for text in filter(None, [advice(stats)])]
    lines += [Text(f"! {problem}", style="red") for problem in problems(stats)]
    lines += [Text(f"! {warning}", style="yellow") for warning in stats.warnings]
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
    title = " · ".join(
        filter(
            None,
            [
                stats.graph, stats.state, f"{stats.elapsed:.1f} s", recent_text(stats),
                f"{hidden} quieter stages" if hidden else "",
            ],
        )
    )  # fmt: skip
    titles = ("workers", "items", "rate", "busy", "wait in", "wait out", "queue")
    rows = [_cells(stage, waiting.get(stage.name)) for stage in chosen]
    table = Table(
        title=Text(title, style="bold yellow" if stats.state == "stopping" else "bold"),
        title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False,
    )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    left = width - sum(widths) - len(widths)
    table.add_column("stage", no_wrap=True, max_width=max(left, 8))  # only this column may be truncated
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
        missing + workers_text(stage),
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

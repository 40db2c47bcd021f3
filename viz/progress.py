"""How far a run is, as bars: on a terminal, in a notebook, and as a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any, Protocol

from flowchan.declare.blueprint import Blueprint
from flowchan.run.report import count, rate
from flowchan.run.starting import start_server
from flowchan.run.stats import RunStats
from flowchan.transport.interrupts import interrupts_deferred
from flowchan.viz.captured import claim, draw_on
from flowchan.viz.live import LivePicture
from flowchan.viz.render import RenderError
from flowchan.viz.terminal import PLAIN_EVERY, troubles
from flowchan.viz.totals import Bar, bars

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

EVERY, PICTURES_EVERY = 0.1, 0.5
"""Seconds between two looks at the run, and between two pictures of it in a notebook."""


class Progress(Protocol):
    """Where the bars are shown."""

    def show(self, bars: list[Bar], stats: RunStats) -> None: ...


class Running(Protocol):
    """A run, as far as it is watched."""

    def wait(self, timeout: float | None = None) -> Any: ...

    def stats(self) -> RunStats: ...


class Watching:
    """Shows how far one run is, whenever it is asked to. ``graph`` is what runs."""

    def __init__(self, graph: Blueprint, progress: Progress) -> None:
        self._graph = graph
        self._progress: Progress | None = progress

    def wait(self, run: Running) -> Any:
        """``run.wait()``, and meanwhile the bars."""
        while True:
            try:
                results = run.wait(EVERY)
            except TimeoutError:
                self.show(run)
            except BaseException:
                self.show(run)
                raise
            else:
                self.show(run)
                return results

    def show(self, run: Running) -> None:
        """Where the run is now. Raises nothing of what the view fails by."""
        if self._progress is None:
            return
        stats = run.stats()
        try:
            self._progress.show(bars(self._graph, stats), stats)
        except Exception:  # the view has failed, the run has not
            self._progress = None


@contextlib.contextmanager
def watching(graph: Blueprint) -> Iterator[Watching]:
    """From before the run starts until it has ended: what is printed meanwhile appears above the bars."""
    with contextlib.ExitStack() as ends:
        with interrupts_deferred():
            progress = _progress(graph, ends)
        try:
            yield Watching(graph, progress)
        finally:
            with interrupts_deferred():
                ends.close()


def _progress(graph: Blueprint, ends: contextlib.ExitStack) -> Progress:
    if in_notebook():
        return Notebook(graph)
    if claim(sys.stderr, ends):
        start_server()  # it keeps the streams that it begins with, and goes on when we have ended
        return Terminal(ends)
    return Lines()


def in_notebook() -> bool:
    """Whether this program is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _headline(bar: Bar) -> str:
    return f"{count(bar.done)}/{'?' if bar.total is None else count(bar.total)} {rate(bar.rate)}"


def _trouble(stats: RunStats) -> str:
    return ", ".join(troubles(stats))


class Lines:
    """A line every few seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PLAIN_EVERY

    def show(self, bars: list[Bar], stats: RunStats) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PLAIN_EVERY
        words = [f"{bar.stage} {_headline(bar)}" for bar in bars] + [_trouble(stats)]
        print(
            f"{stats.elapsed:.0f} s {stats.state}: {' | '.join(filter(None, words))}",
            file=sys.stderr,
            flush=True,
        )


class Terminal:
    """rich's bars. ``ends``: what comes at the end."""

    def __init__(self, ends: contextlib.ExitStack) -> None:
        self._bars, self._lock = draw_on(sys.stderr, _bars_on, ends)
        self._tasks: dict[str, Any] = {}

    def show(self, bars: list[Bar], stats: RunStats) -> None:
        trouble = _trouble(stats)
        with self._lock:  # add_task draws, too
            for bar in bars:
                if bar.stage not in self._tasks:
                    self._tasks[bar.stage] = self._bars.add_task(bar.stage, total=None, told="")
                told = ", ".join(filter(None, [_headline(bar), _times(bar, stats), trouble]))
                self._bars.update(self._tasks[bar.stage], completed=bar.done, total=bar.total, told=told)
            gone = self._tasks.keys() - {bar.stage for bar in bars}  # a nearer one is known now
            for stage in gone:
                self._bars.remove_task(self._tasks.pop(stage))
            self._bars.refresh()


def _bars_on(console: Console) -> RichProgress:
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[told]}", markup=False, justify="right"),
        console=console, auto_refresh=False, expand=True, redirect_stdout=False, redirect_stderr=False,
    )  # fmt: skip


class Notebook:
    """The output of a cell, which is changed in place: the graph with what its stages do, and the bars."""

    def __init__(self, graph: Blueprint) -> None:
        self._shown: Any = None
        self._next = 0.0
        self._picture: LivePicture | None = None
        with contextlib.suppress(RenderError):
            self._picture = LivePicture(graph)

    def show(self, bars: list[Bar], stats: RunStats) -> None:
        from IPython.display import display

        going_on = stats.state in ("running", "stopping")
        if going_on and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + PICTURES_EVERY
        html = "" if self._picture is None else f"<div>{self._picture.at(stats)}</div>"
        html += "".join(self._row(bar, stats) for bar in bars)
        if trouble := _trouble(stats):
            html += f"<div>{escape(trouble)}</div>"
        plain = ", ".join(f"{bar.stage} {_headline(bar)}" for bar in bars)
        both = {"text/html": html, "text/plain": plain}
        if self._shown is None:
            self._shown = display(both, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._shown.update(both, raw=True)

    def _row(self, bar: Bar, stats: RunStats) -> str:
        full = "" if bar.total is None else f' value="{bar.done}" max="{max(bar.total, 1)}"'
        words = f"{escape(bar.stage)} <progress{full}></progress> {_headline(bar)}"
        return f"<div>{words}, {_times(bar, stats)}</div>"


def _times(bar: Bar, stats: RunStats) -> str:
    """How long it has taken, and how long it will take at the rate so far."""
    spent = _clock(stats.elapsed)
    if bar.total is None or not bar.done or stats.state not in ("running", "stopping"):
        return spent
    return f"{spent}, {_clock((bar.total - bar.done) * stats.elapsed / bar.done)} left"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

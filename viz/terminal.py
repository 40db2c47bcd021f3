"""The live view of a run: a table on a terminal, one plain line every few seconds elsewhere. Shows the frozen
values it is given and knows nothing of the run itself."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from flowchan.declare.verbs import VERBS
from flowchan.run.failures import text_of
from flowchan.run.report import count, rate, share
from flowchan.run.stats import LinkStats, RunStats, StageStats
from flowchan.transport.interrupts import interrupts_deferred
from flowchan.viz.captured import claim, draw_on

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table

log = logging.getLogger("flowchan.viz")

PLAIN_EVERY = 5.0
PLAIN_STAGES = 6
AROUND = 9
"""Lines of the terminal that the table's rows leave free: for its head and for what stands below it."""


class LiveView:
    """``with LiveView() as view:`` and :meth:`show` a snapshot as often as you like, several times a second.

    Writes to ``stream`` (the standard error stream, so that the program's own output stays clean). On a
    terminal, what is printed meanwhile by this process and by those that it starts appears above the table.
    ``clock`` tells the time that spaces the plain lines.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._next = clock() + PLAIN_EVERY
        self._live: Live | None = None
        self._has_failed = False
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> LiveView:
        with contextlib.ExitStack() as ends:
            with interrupts_deferred():
                if claim(self._stream, ends):
                    self._live, self._lock = draw_on(self._stream, _table_on, ends)
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
            if self._live is not None:
                width, height = self._live.console.size
                view = _view(stats, width, max(1, height - AROUND))
                with self._lock:
                    self._live.update(view, refresh=True)
            elif self._clock() >= self._next:
                self._next = self._clock() + PLAIN_EVERY
                print(plain_line(stats), file=self._stream, flush=True)

    def say(self, line: str) -> None:
        """Write one line above the table."""
        with self._whatever_fails():
            if self._live is not None:
                with self._lock:
                    self._live.console.print(line, markup=False, highlight=False)
                return
        with self._whatever_fails():
            print(line, file=self._stream, flush=True)

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


def _table_on(console: Console) -> Live:
    from rich.live import Live

    return Live(
        console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    )


def plain_line(stats: RunStats) -> str:
    """One line that says how the run goes: of each stage its items and rate, how busy it is, what waits for
    it and what failed. Of many stages it takes the busiest."""
    chosen = _busiest(stats, PLAIN_STAGES)
    queues = _queues(stats)
    parts = [_plain_stage(stage, queues.get(stage.name), stage.name == stats.bottleneck) for stage in chosen]
    if len(chosen) < len(stats.stages):
        parts.append(f"and {len(stats.stages) - len(chosen)} quieter stages")
    return f"{stats.elapsed:.0f} s {stats.state}: " + " | ".join(parts)


def _plain_stage(stage: StageStats, queue: tuple[int, int] | None, bottleneck: bool) -> str:
    words = f"{stage.name}{' (bottleneck)' if bottleneck else ''} {count(items_of(stage))} {rate(stage.rate)}"
    words += f" busy {share(stage.busy)}"
    if queue:
        words += f" queue {count(queue[0])}/{count(queue[1])}"
    words += f" failed {count(stage.failed)}" if stage.failed else ""
    return words + (f" restarts {count(stage.restarts)}" if stage.restarts else "")


def items_of(stage: StageStats) -> int:
    """What a stage has worked on: what came in, or, at a source, what went out."""
    return stage.items_out if VERBS[stage.kind].begins else stage.items_in


def _busiest(stats: RunStats, most: int) -> list[StageStats]:
    """At most ``most`` stages, the bottleneck and the busiest, in the order of the graph."""
    ranked = sorted(
        stats.stages, key=lambda stage: (stage.name == stats.bottleneck, stage.busy), reverse=True
    )
    kept = {id(stage) for stage in ranked[:most]}
    return [stage for stage in stats.stages if id(stage) in kept]


def _queues(stats: RunStats) -> dict[str, tuple[int, int]]:
    """How many items wait for each stage, and how many could."""
    queues: dict[str, tuple[int, int]] = {}
    for link in stats.links:
        if link.reader is not None:
            queues[link.reader] = _added(queues.get(link.reader, (0, 0)), link)
    return queues


def _added(queue: tuple[int, int], link: LinkStats) -> tuple[int, int]:
    return queue[0] + link.inside, queue[1] + link.capacity


def _view(stats: RunStats, width: int, height: int) -> RenderableType:
    """The table, and below it what goes wrong, each in a line that a narrow terminal cuts."""
    from rich.console import Group
    from rich.text import Text

    lines = [Text(f"▶ the bottleneck: {stats.bottleneck}")] if stats.bottleneck else []
    lines += [Text(f"! {trouble}", style="red") for trouble in troubles(stats)]
    if stats.last_error:
        lines.append(Text(f"! last: {' '.join(stats.last_error.split())}", style="red"))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(_table(stats, width, height), *lines)


def troubles(stats: RunStats) -> Iterator[str]:
    """How many items have failed and were tried again, and how many workers were replaced, by stage."""
    for word, number_of in _TROUBLES.items():
        stages = [f"{count(number_of(stage))} {stage.name}" for stage in stats.stages if number_of(stage)]
        if stages:
            yield f"{word} {', '.join(stages)}"


_TROUBLES: dict[str, Callable[[StageStats], int]] = {
    "failed:": lambda stage: stage.failed + stage.members_failed,
    "retried:": lambda stage: stage.retried,
    "restarts:": lambda stage: stage.restarts,
}


def _table(stats: RunStats, width: int, height: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    chosen, queues = _busiest(stats, height), _queues(stats)
    hidden = len(stats.stages) - len(chosen)
    title = f"{stats.graph} · {stats.state} · {stats.elapsed:.1f} s" + (
        f" · {hidden} quieter stages" if hidden else ""
    )
    titles = ("workers", "items", "rate", "busy", "wait in", "wait out", "queue")
    rows = [_cells(stage, queues.get(stage.name)) for stage in chosen]
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

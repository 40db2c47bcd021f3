"""The live view of a run: a table on a terminal, one plain line every few seconds elsewhere. Shows the frozen
values it is given and knows nothing of the run itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from flowchan.declare.verbs import VERBS
from flowchan.run.report import count, rate, share
from flowchan.run.stats import LinkStats, RunStats, StageStats

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

PLAIN_EVERY = 5.0
PLAIN_STAGES = 6


class LiveView:
    """``with LiveView() as view:`` and :meth:`show` a snapshot as often as you like, several times a second.

    Writes to ``stream`` (the standard error stream, so that the program's own output stays clean). Starts no
    thread. ``clock`` tells the time that spaces the plain lines.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._next = clock() + PLAIN_EVERY
        self._live: Live | None = None

    def __enter__(self) -> LiveView:
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, stats: RunStats) -> None:
        """Show ``stats``: at once on a terminal, if a line is due elsewhere."""
        if self._live is not None:
            self._live.update(_table(stats, max(1, self._live.console.height - 7)), refresh=True)
        elif self._clock() >= self._next:
            self._next = self._clock() + PLAIN_EVERY
            print(plain_line(stats), file=self._stream, flush=True)

    def say(self, line: str) -> None:
        """Write one line above the table."""
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=self._stream, flush=True)


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
    words = f"{stage.name}{' (bottleneck)' if bottleneck else ''} {count(_items(stage))} {rate(stage.rate)}"
    words += f" busy {share(stage.busy)}"
    if queue:
        words += f" queue {count(queue[0])}/{count(queue[1])}"
    return f"{words} failed {count(stage.failed)}" if stage.failed else words


def _items(stage: StageStats) -> int:
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


def _table(stats: RunStats, height: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    chosen, queues = _busiest(stats, height), _queues(stats)
    hidden = len(stats.stages) - len(chosen)
    title = f"{stats.graph} · {stats.state} · {stats.elapsed:.1f} s" + (
        f" · {hidden} quieter stages" if hidden else ""
    )
    titles = ("workers", "items", "rate", "busy", "failed", "queue")
    rows = [_cells(stage, queues.get(stage.name)) for stage in chosen]
    table = Table(
        title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("stage", no_wrap=True)  # the only one that a narrow terminal may shorten
    for name, *cells in zip(titles, *rows, strict=True):
        width = max(map(len, [name, *cells]))
        table.add_column(name, justify="left" if name == "queue" else "right", no_wrap=True, min_width=width)
    for stage, cells in zip(chosen, rows, strict=True):
        slow = stage.name == stats.bottleneck
        style = "bold red" if stage.failed else "bold yellow" if slow else ""
        table.add_row(Text(f"{'▶' if slow else ' '} {stage.name}"), *map(Text, cells), style=style)
    table.caption = Text(f"▶ the bottleneck: {stats.bottleneck}") if stats.bottleneck else None
    table.caption_justify = "left"
    return table


def _cells(stage: StageStats, queue: tuple[int, int] | None) -> list[str]:
    alive = f"{stage.alive}/{stage.workers} {stage.on}"
    return [
        alive,
        count(_items(stage)),
        rate(stage.rate),
        share(stage.busy),
        count(stage.failed),
        _bar(queue),
    ]


def _bar(queue: tuple[int, int] | None) -> str:
    if queue is None:
        return ""
    inside, capacity = queue
    full = round(8 * inside / capacity) if capacity else 0
    return f"{'█' * full}{'░' * (8 - full)} {count(inside)}/{count(capacity)}"

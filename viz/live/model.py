"""Compute what views show: the activity of a run's stages, and the progress if the total is known.

The content consists of text and values. Each view decides how to draw them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from flowchan.declare.blueprint import Blueprint
from flowchan.declare.operators import OPERATORS
from flowchan.declare.values import Stage
from flowchan.run.observe.report import cause_text, count, rate, share
from flowchan.run.observe.what_if import advice
from flowchan.run.policy.explain import starting_text
from flowchan.run.policy.remaining import RemainingTime
from flowchan.run.policy.stats import EdgeStats, RunStats, StageStats

ACTIVE = ("running", "stopping")
"""States of a run that has not ended."""
PLAIN_STAGES = 6
"""Maximum number of stages in one line."""


class ProgressView(Protocol):
    """View that shows a run."""

    def show(self, stats: RunStats) -> None:
        """Show the current state of a run."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Progress of a stage: ``done`` of ``total`` items, at ``rate`` items per second.

    ``left`` is the remaining time in seconds. The total and the remaining time are ``None`` if unknown.
    """

    stage: str
    done: int
    total: int | None
    rate: float
    left: float | None = None


class Progress:
    """Progress of a run, computed from successive statistics."""

    def __init__(self, graph: Blueprint) -> None:
        self._graph = graph
        self._remaining: dict[str, RemainingTime] = {}

    def bars(self, stats: RunStats) -> list[Bar]:
        """Return the bars. While the run is active, they include the remaining time."""
        found = bars(self._graph, stats)
        return [self._timed(bar, stats) for bar in found] if stats.state in ACTIVE else found

    def _timed(self, bar: Bar, stats: RunStats) -> Bar:
        if bar.total is None:
            return bar
        remaining = self._remaining.setdefault(bar.stage, RemainingTime())
        return dataclasses.replace(bar, left=remaining.update(stats.elapsed, bar.done, bar.total))


def bars(graph: Blueprint, stats: RunStats) -> list[Bar]:
    """Return one progress bar for each end of the graph.

    The bar shows the nearest stage before the end whose total is known. Without such a stage, the bar shows
    the nearest stage that combines many items into one. Later stages have little to do until that stage ends.
    Without either kind of stage, the bar shows the end.
    """
    known = _Totals(graph, stats)
    read = {edge.writer for edge in stats.edges if edge.reader is not None}
    ends = [stage.name for stage in graph.stages if stage.name not in read]
    return [known.bar(name) for name in dict.fromkeys(known.nearest(end) for end in ends)]


class _Totals:
    """Totals of a run, derived from one snapshot of the run's statistics."""

    def __init__(self, graph: Blueprint, stats: RunStats) -> None:
        self._stages = {stage.name: stage for stage in graph.stages}
        self._stats = {stage.name: stage for stage in stats.stages}
        self._broken = stats.state in ("failed", "aborted")
        self._into: dict[str, list[EdgeStats]] = {stage.name: [] for stage in graph.stages}
        for edge in stats.edges:
            if edge.reader is not None:
                self._into[edge.reader].append(edge)
        self._given: dict[str, int | None] = {}

    def bar(self, name: str) -> Bar:
        about = self._stats[name]
        done = about.items_in if self._into[name] else about.items_out
        return Bar(name, done, self.total(name), about.rate)

    def nearest(self, end: str) -> str:
        """Search backwards from ``end`` for the nearest stage whose total is known, and return its name.

        If no total is known, return the nearest stage that combines items, or else ``end``.
        """
        now, seen = [end], {end}
        gathers: list[str] = []
        while now:
            for name in now:
                if self.total(name) is not None:
                    return name
            gathers += [name for name in now if self._stages[name].operator.holds_back]
            now = [writer for writer in self._writers(now) if writer not in seen]
            seen.update(now)
        return [*gathers, end][0]

    def _writers(self, names: list[str]) -> list[str]:
        return list(dict.fromkeys(edge.writer for name in names for edge in self._into[name]))

    def total(self, name: str) -> int | None:
        """Return the number of items that a stage will receive or a source will emit; ``None`` if unknown."""
        into = self._into[name]
        return _sum([self._put(edge) for edge in into]) if into else self._gives(self._stages[name])

    def _put(self, edge: EdgeStats) -> int | None:
        """Return the number of items that will be put into a channel; ``None`` if unknown.

        If the writer has ended, return the number of items so far, unless the run was aborted or has failed.
        """
        writer = self._stages[edge.writer]
        if not self._broken and not writer.operator.outside and not self._stats[writer.name].alive:
            return edge.passed + edge.inside
        if edge.name not in [output.name for output in writer.outputs]:
            return None  # the channel carries failures, or the items of only one worker
        return self._gives(writer)

    def _gives(self, stage: Stage) -> int | None:
        if stage.name not in self._given:
            self._given[stage.name] = None  # stays unknown inside a loop
            into = [self._put(edge) for edge in self._into[stage.name]]
            known = [number for number in into if number is not None]
            if stage.operator.expects is not None and len(known) == len(into):
                given = stage.operator.expects(stage.options, known)
                failed = self._stats[stage.name].failed
                self._given[stage.name] = None if given is None else max(0, given - failed)
        return self._given[stage.name]


def _sum(numbers: list[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def bars_line(known: list[Bar], stats: RunStats) -> str:
    """Return one line of text about the progress of a run."""
    words = [", ".join(filter(None, [f"{bar.stage} {headline(bar)}", left_text(bar)])) for bar in known]
    words += [*starting(stats), active_cause(stats), ", ".join(problems(stats))]
    return f"{stats.elapsed:.0f} s {stats.state}: {' | '.join(filter(None, words))}"


def headline(bar: Bar) -> str:
    """Return the number of finished items, the total, and the rate."""
    return f"{count(bar.done)}/{'?' if bar.total is None else count(bar.total)} {rate(bar.rate)}"


def times(bar: Bar, stats: RunStats) -> str:
    """Return the elapsed time, and the remaining time if it is known."""
    return ", ".join(filter(None, [_clock(stats.elapsed), left_text(bar)]))


def left_text(bar: Bar) -> str:
    """Return the remaining time, or an empty string if it is unknown."""
    return "" if bar.left is None else f"{_clock(bar.left)} left"


def active_cause(stats: RunStats) -> str:
    """Return what limits an active run, or an empty string."""
    return cause_text(stats) if stats.state in ACTIVE else ""


def hints(stats: RunStats) -> list[str]:
    """Return a line with the cause that limits an active run, and a line with advice, if they are known."""
    if stats.state not in ACTIVE:
        return []
    advised = advice(stats)
    return list(filter(None, [cause_text(stats), advised and f"advice: {advised}"]))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def plain_line(stats: RunStats) -> str:
    """Return one line of text about a run: items, rate, load, queue and failures of each stage.

    If the graph has many stages, only the busiest are included.
    """
    chosen = busiest(stats, PLAIN_STAGES)
    waiting = queues(stats)
    parts = [_plain_stage(stage, waiting.get(stage.name), stage.name == stats.bottleneck) for stage in chosen]
    if len(chosen) < len(stats.stages):
        parts.append(f"and {len(stats.stages) - len(chosen)} quieter stages")
    if not stats.bottleneck and (cause := active_cause(stats)):
        parts.append(cause)
    return f"{stats.elapsed:.0f} s {stats.state}: " + " | ".join(parts)


def _plain_stage(stage: StageStats, queue: tuple[int, int] | None, bottleneck: bool) -> str:
    words = f"{stage.name}{' (bottleneck)' if bottleneck else ''} {count(items_of(stage))} {rate(stage.rate)}"
    words += f" {starting_text(stage)}" if stage.starting else ""
    words += f" busy {share(stage.busy)}" if stage.state != "starting" else ""
    if queue:
        words += f" queue {count(queue[0])}/{count(queue[1])}"
    words += f" failed {count(stage.failed)}" if stage.failed else ""
    return words + (f" restarts {count(stage.restarts)}" if stage.restarts else "")


def items_of(stage: StageStats) -> int:
    """Return the number of items that a stage has received, or that a source has emitted."""
    return stage.items_out if OPERATORS[stage.kind].begins else stage.items_in


def busiest(stats: RunStats, most: int) -> list[StageStats]:
    """Return at most ``most`` stages, in the order of the graph: the bottleneck and the busiest others."""
    ranked = sorted(
        stats.stages, key=lambda stage: (stage.name == stats.bottleneck, stage.busy), reverse=True
    )
    kept = {id(stage) for stage in ranked[:most]}
    return [stage for stage in stats.stages if id(stage) in kept]


def queues(stats: RunStats) -> dict[str, tuple[int, int]]:
    """Return, for each stage, the number of items waiting for it and the capacity of its input channels."""
    waiting: dict[str, tuple[int, int]] = {}
    for edge in stats.edges:
        if edge.reader is not None:
            inside, capacity = waiting.get(edge.reader, (0, 0))
            waiting[edge.reader] = inside + edge.inside, capacity + edge.capacity
    return waiting


def starting(stats: RunStats) -> Iterator[str]:
    """Yield a text that lists the stages in which no worker has built its callable, if there are any."""
    names = [stage.name for stage in stats.stages if stage.state == "starting"]
    if names:
        yield f"starting: {', '.join(names)}"


def problems(stats: RunStats) -> Iterator[str]:
    """Yield lines with the numbers of failed items, retries and restarts for each stage."""
    for word, number_of in _PROBLEMS.items():
        stages = [f"{count(number_of(stage))} {stage.name}" for stage in stats.stages if number_of(stage)]
        if stages:
            yield f"{word} {', '.join(stages)}"


_PROBLEMS: dict[str, Callable[[StageStats], int]] = {
    "failed:": lambda stage: stage.failed + stage.members_failed,
    "retried:": lambda stage: stage.retried,
    "restarts:": lambda stage: stage.restarts,
}

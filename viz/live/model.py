"""What the views show of a run: how far it is, where that can be known, and what its stages do. Text and
values; how they are drawn is for each view to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from flowchan.declare.blueprint import Blueprint
from flowchan.declare.operators import OPERATORS
from flowchan.declare.values import Stage
from flowchan.run.observe.report import count, rate, share
from flowchan.run.policy.stats import EdgeStats, RunStats, StageStats

PLAIN_STAGES = 6
"""How many stages one line has room for."""


class ProgressView(Protocol):
    """Where a run is shown."""

    def show(self, stats: RunStats) -> None:
        """Show a run at this moment."""


@dataclass(frozen=True, slots=True)
class Bar:
    """``done`` of ``total`` items at a stage, at ``rate`` a second; the total is ``None`` while nobody knows
    it."""

    stage: str
    done: int
    total: int | None
    rate: float


def bars(graph: Blueprint, stats: RunStats) -> list[Bar]:
    """One for each end of the graph: of the stage nearest to it whose total is known; or else that gathers
    items, for what stands behind it has little to do until the end; or else of the end itself."""
    known = _Totals(graph, stats)
    read = {edge.writer for edge in stats.edges if edge.reader is not None}
    ends = [stage.name for stage in graph.stages if stage.name not in read]
    return [known.bar(name) for name in dict.fromkeys(known.nearest(end) for end in ends)]


class _Totals:
    """What is known of one run at one moment."""

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
        """The stage nearest to an end whose total is known, or else that gathers, or else the end."""
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
        """How many items a stage takes in, or gives, if it is a source."""
        into = self._into[name]
        return _sum([self._put(edge) for edge in into]) if into else self._gives(self._stages[name])

    def _put(self, edge: EdgeStats) -> int | None:
        """How many items come into a channel. Whoever has ended has put what it puts, unless the run has
        broken off."""
        writer = self._stages[edge.writer]
        if not self._broken and not writer.operator.outside and not self._stats[writer.name].alive:
            return edge.passed + edge.inside
        if edge.name not in [output.name for output in writer.outputs]:
            return None  # it takes failures, or what a single worker puts
        return self._gives(writer)

    def _gives(self, stage: Stage) -> int | None:
        if stage.name not in self._given:
            self._given[stage.name] = None  # what leads back to itself is not known
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


def bars_line(graph: Blueprint, stats: RunStats) -> str:
    """One line that says how far a run is."""
    words = [*(f"{bar.stage} {headline(bar)}" for bar in bars(graph, stats)), ", ".join(troubles(stats))]
    return f"{stats.elapsed:.0f} s {stats.state}: {' | '.join(filter(None, words))}"


def headline(bar: Bar) -> str:
    """How many items of how many, and how fast."""
    return f"{count(bar.done)}/{'?' if bar.total is None else count(bar.total)} {rate(bar.rate)}"


def times(bar: Bar, stats: RunStats) -> str:
    """How long it has taken, and how long it will take at the rate so far."""
    spent = _clock(stats.elapsed)
    if bar.total is None or not bar.done or stats.state not in ("running", "stopping"):
        return spent
    return f"{spent}, {_clock((bar.total - bar.done) * stats.elapsed / bar.done)} left"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def plain_line(stats: RunStats) -> str:
    """One line that says how the run goes: of each stage its items and rate, how busy it is, what waits for
    it and what failed. Of many stages it takes the busiest."""
    chosen = busiest(stats, PLAIN_STAGES)
    waiting = queues(stats)
    parts = [_plain_stage(stage, waiting.get(stage.name), stage.name == stats.bottleneck) for stage in chosen]
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
    return stage.items_out if OPERATORS[stage.kind].begins else stage.items_in


def busiest(stats: RunStats, most: int) -> list[StageStats]:
    """At most ``most`` stages, the bottleneck and the busiest, in the order of the graph."""
    ranked = sorted(
        stats.stages, key=lambda stage: (stage.name == stats.bottleneck, stage.busy), reverse=True
    )
    kept = {id(stage) for stage in ranked[:most]}
    return [stage for stage in stats.stages if id(stage) in kept]


def queues(stats: RunStats) -> dict[str, tuple[int, int]]:
    """How many items wait for each stage, and how many could."""
    waiting: dict[str, tuple[int, int]] = {}
    for edge in stats.edges:
        if edge.reader is not None:
            inside, capacity = waiting.get(edge.reader, (0, 0))
            waiting[edge.reader] = inside + edge.inside, capacity + edge.capacity
    return waiting


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

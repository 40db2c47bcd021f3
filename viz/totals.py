"""How far a run is, where that can be known: how many items a stage will have taken in at the end."""

from __future__ import annotations

from dataclasses import dataclass

from flowchan.declare.blueprint import Blueprint
from flowchan.declare.values import Stage
from flowchan.run.stats import LinkStats, RunStats


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
    read = {link.writer for link in stats.links if link.reader is not None}
    ends = [stage.name for stage in graph.stages if stage.name not in read]
    return [known.bar(name) for name in dict.fromkeys(known.nearest(end) for end in ends)]


class _Totals:
    """What is known of one run at one moment."""

    def __init__(self, graph: Blueprint, stats: RunStats) -> None:
        self._stages = {stage.name: stage for stage in graph.stages}
        self._stats = {stage.name: stage for stage in stats.stages}
        self._broken = stats.state in ("failed", "aborted")
        self._into: dict[str, list[LinkStats]] = {stage.name: [] for stage in graph.stages}
        for link in stats.links:
            if link.reader is not None:
                self._into[link.reader].append(link)
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
            gathers += [name for name in now if self._stages[name].verb.holds_back]
            now = [writer for writer in self._writers(now) if writer not in seen]
            seen.update(now)
        return [*gathers, end][0]

    def _writers(self, names: list[str]) -> list[str]:
        return list(dict.fromkeys(link.writer for name in names for link in self._into[name]))

    def total(self, name: str) -> int | None:
        """How many items a stage takes in, or gives, if it is a source."""
        into = self._into[name]
        return _sum([self._put(link) for link in into]) if into else self._gives(self._stages[name])

    def _put(self, link: LinkStats) -> int | None:
        """How many items come into a channel. Whoever has ended has put what it puts, unless the run has
        broken off."""
        writer = self._stages[link.writer]
        if not self._broken and not writer.verb.outside and not self._stats[writer.name].alive:
            return link.passed + link.inside
        if link.name not in [output.name for output in writer.outputs]:
            return None  # it takes failures, or what a single worker puts
        return self._gives(writer)

    def _gives(self, stage: Stage) -> int | None:
        if stage.name not in self._given:
            self._given[stage.name] = None  # what leads back to itself is not known
            into = [self._put(link) for link in self._into[stage.name]]
            known = [number for number in into if number is not None]
            if stage.verb.expects is not None and len(known) == len(into):
                given = stage.verb.expects(stage.options, known)
                failed = self._stats[stage.name].failed
                self._given[stage.name] = None if given is None else max(0, given - failed)
        return self._given[stage.name]


def _sum(numbers: list[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None

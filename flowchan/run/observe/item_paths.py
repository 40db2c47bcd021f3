"""Combine the spans, which workers report for sampled items, into paths through the graph.

Algorithm. Workers send their spans at intervals. The last span of an item may therefore arrive before an
earlier span. An item therefore counts as complete only some time after it has reached an end of the graph. An
item that reaches several ends has one path for each of them, which consists of the stages before that end.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flowchan.run.policy.events import ItemSpans, ItemTraced
from flowchan.run.policy.plan import Plan
from flowchan.run.worker.item_recorder import source_of

COMPLETE_AFTER_NS = 1_200_000_000
"""Time to wait for the other spans of an item after one of its spans has reached an end of the graph."""
MOST_ITEMS = 4096
"""Maximum number of items followed at a time. At this limit, the oldest are dropped."""
MOST_SPANS = 200
"""Maximum number of spans kept per item, because an item may go around a loop many times."""

_Placed = tuple[str, int, int, int]  # stage, worker, time of the get, time of the first put


@dataclass(slots=True)
class _Item:
    source: str
    spans: list[_Placed] = field(default_factory=list)


class ItemPaths:
    """Collects the sampled items that are still in the graph of a run. Any thread may call the methods.

    Args:
        plan: Plan of the run.
        tell: Receives the workers' reports and the completed items.
    """

    def __init__(self, plan: Plan, tell: Callable[[Any], None]) -> None:
        self._tell = tell
        self._names = [stage.name for stage in plan.graph.stages]
        self._before = _stages_before(plan)
        # The rank of a stage is greater than the ranks of all stages before it, except those in the same
        # loop.
        self._rank = {stage: len(before) for stage, before in self._before.items()}
        self._writers = _writers(plan)
        self._ends = plan.ends
        self._items: OrderedDict[int, _Item] = OrderedDict()
        self._due: list[
            tuple[int, int, _Placed]
        ] = []  # time at which an item counts as complete, the item's mark, and its last span
        self._lock = threading.Lock()

    def add(self, event: ItemSpans, now: int) -> list[ItemTraced]:
        """Record a report at time ``now`` in nanoseconds, and return the items that are now complete."""
        stage, number = event.worker.stage, event.worker.number
        with self._lock:
            for marks, taken, put in event.spans:
                for mark in marks:
                    placed = (stage, number, taken, put)
                    item = self._items.get(mark)
                    if item is None:
                        item = self._items[mark] = _Item(self._names[source_of(mark)])
                    if len(item.spans) < MOST_SPANS:
                        item.spans.append(placed)
                    if stage in self._ends:
                        self._due.append((now + COMPLETE_AFTER_NS, mark, placed))
            while len(self._items) > MOST_ITEMS:
                self._items.popitem(last=False)
            return self._completed(now)

    def report(self, spans: ItemSpans) -> None:
        """Pass on a worker's report, followed by the items that it completes."""
        self._tell(spans)
        for item in self.add(spans, time.monotonic_ns()):
            self._tell(item)

    def end(self) -> None:
        """Pass on the incomplete items that have reached an end of the graph, because the run has ended."""
        with self._lock:
            items = self._completed(None)
        for item in items:
            self._tell(item)

    def _completed(self, now: int | None) -> list[ItemTraced]:
        due = [one for one in self._due if now is None or one[0] <= now]
        self._due = [] if now is None else [one for one in self._due if one[0] > now]
        found = [self._path(mark, self._items[mark], last) for _, mark, last in due if mark in self._items]
        return [item for item in found if self._is_whole(item)]

    def _is_whole(self, item: ItemTraced) -> bool:
        """Return whether all spans of the path have arrived. Workers may send spans late."""
        first, *others = item.path
        return first == item.source and all(self._writers[stage] & {*item.path} for stage in others)

    def _path(self, mark: int, item: _Item, last: _Placed) -> ItemTraced:
        """Return the path of an item up to its last span. Spans that a dead worker never sent are missing."""
        before, counts = self._before[last[0]], Counter(span[0] for span in item.spans)

        def is_earlier(span: _Placed) -> bool:
            # If the item was in both stages only once, the graph determines their order.
            return span[3] <= last[3] or counts[span[0]] == counts[last[0]] == 1

        spans = {span for span in item.spans if span[0] in before and is_earlier(span)}
        ordered = [*self._ordered(spans), last]
        placed = tuple((stage, worker, taken / 1e9, put / 1e9) for stage, worker, taken, put in ordered)
        return ItemTraced(item.source, mark, placed)

    def _ordered(self, spans: set[_Placed]) -> list[_Placed]:
        """Sort spans by time, but never put a stage before a stage from which its items come.

        The clocks of hosts are not exact. An item may therefore seem to leave a host before it arrives there.
        """
        rank = self._rank
        keys: dict[_Placed, tuple[int, ...]] = {}
        latest: dict[str, int] = {}  # latest time of each stage
        for span in sorted(spans, key=lambda span: (rank[span[0]], *span[2:])):
            stage, _, taken, put = span
            earlier = [
                at for one, at in latest.items() if one in self._before[stage] and rank[one] < rank[stage]
            ]
            at = max([taken, *earlier])
            latest[stage] = max(at, latest.get(stage, at))
            keys[span] = (at, rank[stage], taken, put)
        return sorted(spans, key=keys.__getitem__)


def _writers(plan: Plan) -> dict[str, set[str]]:
    """Return for each stage the stages that put items directly into it."""
    into: dict[str, set[str]] = {stage.name: set() for stage in plan.graph.stages}
    for edge in plan.edges:
        if edge.reader is not None:
            into[edge.reader].add(edge.writer)
    return into


def _stages_before(plan: Plan) -> dict[str, frozenset[str]]:
    """Return for each stage the other stages whose items can reach it."""
    into, found = _writers(plan), {}
    for stage in into:
        before: set[str] = set()
        pending = [stage]
        while pending:
            new = into[pending.pop()] - before
            before |= new
            pending += new
        found[stage] = frozenset(before - {stage})
    return found

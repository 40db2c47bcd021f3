"""Combine the spans that workers report for sampled items into paths through the graph.

Algorithm. Workers send their spans at intervals, so an item's last span may arrive before an earlier one. An
item therefore counts as complete a short time after it has reached an end of the graph. An item that reaches
several ends has one path for each of them, made of the stages before that end.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flowchan.run.policy.events import ItemSpans, ItemTraced
from flowchan.run.policy.plan import Plan
from flowchan.run.worker.item_recorder import source_of

COMPLETE_AFTER_NS = 1_200_000_000
"""Time to wait for an item's other spans after the item has reached an end."""
MOST_ITEMS = 4096
"""Maximum number of items followed at a time. If there are more, the oldest are dropped."""
MOST_SPANS = 200
"""Maximum number of spans kept per item, because an item may go around a loop many times."""

_Placed = tuple[str, int, int, int]  # stage, worker, times of the get and of the first put


@dataclass(slots=True)
class _Item:
    source: str
    spans: list[_Placed] = field(default_factory=list)


class ItemPaths:
    """Sampled items that are still in the graph of a run. Any thread may call the methods.

    Args:
        plan: Plan of the run.
        tell: Receives the workers' reports and the completed items.
    """

    def __init__(self, plan: Plan, tell: Callable[[Any], None]) -> None:
        self._tell = tell
        self._names = [stage.name for stage in plan.graph.stages]
        self._before = _stages_before(plan)
        self._writers = _writers(plan)
        self._ends = plan.ends
        self._items: OrderedDict[int, _Item] = OrderedDict()
        self._due: list[
            tuple[int, int, _Placed]
        ] = []  # when each item is complete, its mark, and its last span
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
        """Pass on a worker's report, and the items that are now complete."""
        self._tell(spans)
        for item in self.add(spans, time.monotonic_ns()):
            self._tell(item)

    def end(self) -> None:
        """Pass on the remaining items that have reached an end, because the run has ended."""
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
        """Return whether no span is missing, for example because a worker has not sent it yet."""
        first, *others = item.path
        return first == item.source and all(self._writers[stage] & {*item.path} for stage in others)

    def _path(self, mark: int, item: _Item, last: _Placed) -> ItemTraced:
        """Return the path of an item up to its last span. Spans of a dead worker may be missing."""
        before = self._before[last[0]]
        spans = [span for span in item.spans if span[0] in before and span[3] <= last[3]]
        ordered = [*sorted({*spans}, key=lambda span: span[2:]), last]
        placed = tuple((stage, worker, taken / 1e9, put / 1e9) for stage, worker, taken, put in ordered)
        return ItemTraced(item.source, mark, placed)


def _writers(plan: Plan) -> dict[str, set[str]]:
    """Return which stages put items directly into each stage."""
    into: dict[str, set[str]] = {stage.name: set() for stage in plan.graph.stages}
    for edge in plan.edges:
        if edge.reader is not None:
            into[edge.reader].add(edge.writer)
    return into


def _stages_before(plan: Plan) -> dict[str, frozenset[str]]:
    """Return, for each stage, the other stages whose items can reach it."""
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

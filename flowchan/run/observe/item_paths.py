"""Combine the spans of sampled items that workers report into the path of each item through the graph.

Algorithm. Workers send their spans at intervals, so the last span of an item may arrive before an earlier
one. An item is therefore complete a moment after it has reached an end of the graph. If it reaches several
ends, each of them has its own path, which consists of the stages before that end.
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
"""Time for which the spans of an item may be on their way after the item has reached an end."""
MOST_ITEMS = 4096
"""Number of items that are followed at a time. If there are more, the oldest are forgotten."""
MOST_SPANS = 200
"""Number of spans that are kept of an item, which may pass the stages of a loop again and again."""

_Placed = tuple[str, int, int, int]  # stage, worker, time of the get and of the first put


@dataclass(slots=True)
class _Item:
    source: str
    spans: list[_Placed] = field(default_factory=list)


class ItemPaths:
    """The sampled items of one run that are on their way. Any thread may call its methods.

    Args:
        plan: Plan of the run.
        tell: Function that receives the reports of the workers, and the items that are complete.
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
        ] = []  # when an item is complete, its mark, and its last span
        self._lock = threading.Lock()

    def add(self, event: ItemSpans, now: int) -> list[ItemTraced]:
        """Take in a report at time ``now`` in nanoseconds, and return the items that are complete."""
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
        """Pass on a report of a worker, and the items that are complete."""
        self._tell(spans)
        for item in self.add(spans, time.monotonic_ns()):
            self._tell(item)

    def end(self) -> None:
        """Pass on the remaining items that have reached an end, because the run is over."""
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
        """Return the path of an item to its last span. A worker that died may have lost its part of it."""
        before = self._before[last[0]]
        spans = [span for span in item.spans if span[0] in before and span[3] <= last[3]]
        ordered = [*sorted({*spans}, key=lambda span: span[2:]), last]
        placed = tuple((stage, worker, taken / 1e9, put / 1e9) for stage, worker, taken, put in ordered)
        return ItemTraced(item.source, mark, placed)


def _writers(plan: Plan) -> dict[str, set[str]]:
    """Return the stages that put items directly into each stage."""
    into: dict[str, set[str]] = {stage.name: set() for stage in plan.graph.stages}
    for edge in plan.edges:
        if edge.reader is not None:
            into[edge.reader].add(edge.writer)
    return into


def _stages_before(plan: Plan) -> dict[str, frozenset[str]]:
    """Return the stages from which items can reach each stage, without the stage itself."""
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

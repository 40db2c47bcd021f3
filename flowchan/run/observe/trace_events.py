"""Build trace events in Chrome's JSON format, which Perfetto can open.

The trace shows each stage as a process in which each worker has two threads: one for its activity, and one
for its sampled items. The run itself is another process, which contains the counters of the channels.

Arguments are monotonic times in nanoseconds. Events contain microseconds since the start of the run.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from itertools import count
from typing import Any

from flowchan.run.observe.worker_spans import SpanKind
from flowchan.run.policy.events import ItemTraced

RUN_PID = 1
FIRST_STAGE_PID = 2
FIRST_TID = 10_001
"""Id of the first thread. It differs from every process id, because an equal id would mark a main thread."""
LABELS: dict[SpanKind, str] = {
    "busy": "busy",
    "input": "waits for input",
    "place": "waits for room",
    "turn": "waits for its turn",
}
MOST_ITEMS = 50_000
"""Number of item spans after which only half as many samples are drawn."""
_encode = json.JSONEncoder(separators=(",", ":")).encode


class TraceEvents:
    """Builds the trace events of one run. Every method returns lines to write, each a JSON object.

    Args:
        graph: Name of the graph.
        stages: Names of the stages, in display order.
        start: Time at which the run started.
    """

    def __init__(self, graph: str, stages: tuple[str, ...], start: int) -> None:
        self.graph, self._start = graph, start
        self._pids = {stage: FIRST_STAGE_PID + place for place, stage in enumerate(stages)}
        self._hosts: dict[tuple[str, int], str] = {}  # host of each worker, by stage and number
        self._tids: dict[tuple[str, int, str, bool], int] = {}
        self._item_end: dict[int, int] = {}  # end of the last item span, by thread
        # Thread and start of each item span, by stage, worker and get time (in seconds).
        self._drawn: dict[tuple[str, int, float], tuple[int, int]] = {}
        self._numbers, self._flows = count(1), count(1)
        self._names: dict[int, int] = {}  # number of each sample, by mark
        self._item_spans, self._every = 0, 1

    def begin(self) -> Iterator[str]:
        """Give names to the run and its stages."""
        yield _meta("process_name", RUN_PID, 0, name=f"run of {self.graph}")
        yield _meta("process_sort_index", RUN_PID, 0, sort_index=0)
        for stage, pid in self._pids.items():
            yield _meta("process_name", pid, 0, name=stage)
            yield _meta("process_sort_index", pid, 0, sort_index=pid)

    def started(self, stage: str, worker: int, host: str) -> None:
        """Show the worker's next spans in tracks that name ``host``, which is empty for this machine."""
        self._hosts[stage, worker] = host

    def span(self, stage: str, worker: int, name: str, begin: int, end: int) -> Iterator[str]:
        """Show what a worker did during an interval."""
        tid = yield from self._tid(stage, worker, False)
        yield self._slice(self._pids[stage], tid, name, begin, end)

    def instant(self, stage: str, worker: int, name: str, at: int, text: str = "") -> Iterator[str]:
        """Show an event of one worker."""
        tid = yield from self._tid(stage, worker, False)
        ts, args = self._us(at), _args(text)
        yield _line(ph="i", s="t", pid=self._pids[stage], tid=tid, name=name, ts=ts, args=args)

    def run_instant(self, name: str, at: int, text: str = "") -> str:
        """Show an event of the whole run."""
        return _line(ph="i", s="p", pid=RUN_PID, tid=RUN_PID, name=name, ts=self._us(at), args=_args(text))

    def counter(self, name: str, at: int, value: float) -> str:
        """Record the value that a counter has from time ``at`` on."""
        # Perfetto shows the name of the event, a space, and the name of the argument. The last word of the
        # counter's name therefore becomes the argument.
        name, _, last = name.rpartition(" ")
        return _line(ph="C", pid=RUN_PID, tid=RUN_PID, name=name, ts=self._us(at), args={last: value})

    def items(self, stage: str, worker: int, marks: tuple[int, ...], begin: int, end: int) -> Iterator[str]:
        """Show that a worker processed sampled items during an interval."""
        drawn = [self._number(mark) for mark in marks if self._is_drawn(mark)]
        if not drawn:
            return
        tid = yield from self._tid(stage, worker, True)
        taken, begin = begin / 1e9, max(begin, self._item_end.get(tid, begin))
        self._item_end[tid] = end = max(end, begin + 1000)
        self._drawn[stage, worker, taken] = tid, begin
        if len(self._drawn) > MOST_ITEMS:
            del self._drawn[next(iter(self._drawn))]
        name = ("item " if len(drawn) == 1 else "items ") + ", ".join(map(str, drawn[:5]))
        name += f" and {len(drawn) - 5} more" if len(drawn) > 5 else ""
        yield self._slice(self._pids[stage], tid, name, begin, end)
        self._item_spans += 1
        if self._item_spans % MOST_ITEMS == 0:
            self._every *= 2
            yield self.run_instant(f"from here on, only 1 of {self._every} sampled items is drawn", end)

    def flow(self, item: ItemTraced) -> Iterator[str]:
        """Connect the spans of a sampled item along its path.

        Viewers reverse an arrow whose second span begins first. Spans can begin in the wrong order because
        the clocks of hosts are not exact. The arrow then skips the second span.
        """
        if not self._is_drawn(item.number):
            return
        steps: list[tuple[str, int, int]] = []
        for stage, worker, taken, _ in item.spans:
            tid, begin = self._drawn.get((stage, worker, taken), (0, -1))
            if begin > (steps[-1][2] if steps else -1):
                steps.append((stage, tid, begin))
        if len(steps) < 2:
            return
        flow, last, name = next(self._flows), len(steps) - 1, f"item {self._number(item.number)}"
        for place, (stage, tid, at) in enumerate(steps):
            kind = {"ph": "s"} if place == 0 else {"ph": "t" if place < last else "f", "bp": "e"}
            pid, ts = self._pids[stage], self._us(at)
            yield _line(**kind, id=flow, cat="item", pid=pid, tid=tid, name=name, ts=ts)

    def _is_drawn(self, mark: int) -> bool:
        return mark % self._every == 0

    def _number(self, mark: int) -> int:
        """Return a short number for a sample. Only the numbers of recent samples are kept."""
        number = self._names.get(mark)
        if number is None:
            number = self._names[mark] = next(self._numbers)
            if len(self._names) > MOST_ITEMS:
                del self._names[next(iter(self._names))]
        return number

    def _tid(self, stage: str, worker: int, items: bool) -> Generator[str, None, int]:
        """Return the ID of the thread that represents a worker in the trace.

        When the ID is first used, yield lines that name the thread.
        """
        host = self._hosts.get((stage, worker), "")
        tid = self._tids.get((stage, worker, host, items))
        if tid is None:
            tid = self._tids[stage, worker, host, items] = FIRST_TID + len(self._tids)
            pid, name = self._pids[stage], f"worker {worker}" if worker else "program"
            name += f" on {host}" if host else ""
            yield _meta("thread_name", pid, tid, name=f"{name}: sampled items" if items else name)
            yield _meta("thread_sort_index", pid, tid, sort_index=2 * worker + items)
        return tid

    def _slice(self, pid: int, tid: int, name: str, begin: int, end: int) -> str:
        length = _rounded(end - begin)
        return _line(ph="X", pid=pid, tid=tid, name=name, ts=self._us(begin), dur=length)

    def _us(self, at: int) -> float:
        return _rounded(at - self._start)


def _rounded(time: int) -> float:
    return round(time / 1000, 3)


def _args(text: str) -> dict[str, str]:
    return {"text": text} if text else {}


def _meta(kind: str, pid: int, tid: int, **args: Any) -> str:
    return _line(ph="M", pid=pid, tid=tid, name=kind, args=args)


def _line(**event: Any) -> str:
    return _encode(event)

"""Follow sampled items through a worker.

Algorithm. A source puts a few items per second into boxes (``SampledItem``), each with a new mark. Every
worker's ports unpack these items and call the worker's recorder. While a worker holds sampled items, its
outputs get the marks of these items. Only the first output into each channel is marked. An item with many
outputs is therefore followed only once. The recorder measures when an item was taken and when its first
output was put. The recorder sends these times at intervals and when the worker ends.

Sampling. If samples come too fast, a source doubles the number of items between two samples. If samples come
too slowly, the source halves that number. This bounds the number of samples per second at any item rate.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

from flowchan import _core
from flowchan.channel.channel import In, Out
from flowchan.errors import Broken, Closed
from flowchan.items.sampled_item import SampledItem
from flowchan.run.policy import seeds
from flowchan.run.policy.events import Event, ItemSpan, ItemSpans, WorkerId
from flowchan.run.worker.opening import Ports

SEND_EVERY_NS = 500_000_000
"""Minimum time between two reports from a worker, unless it has ``MOST_SPANS`` spans."""
MOST_SPANS = 256
"""Number of spans at which a worker sends a report at once."""
CLOSEST_NS, FARTHEST_NS = 100_000_000, 400_000_000
"""A source samples less often if the time between two samples is below the first value, and more often above
the second."""
RAREST = 1 << 20
"""Maximum number of items between two samples of a source."""

MOST_MARKS = 32
"""Maximum number of marks of an item. Dropping the oldest bounds the number of marks in loops."""


class ItemRecorder:
    """Records one worker's sampled items. The native ports call the first four methods.

    Args:
        worker: The worker.
        tell: Sends a report.
        first: Mark for the first sample if the worker is a source, otherwise None.
    """

    def __init__(self, worker: WorkerId, tell: Callable[[Event], None], first: int | None) -> None:
        self._worker, self._tell = worker, tell
        self._next, self._every = first, 1
        self._sampled_at = 0
        self._held: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # marks and time of each get, by port
        self._put_at: dict[int, int] = {}  # time of the first put since ``_held`` was empty, by port
        self._sent_to: set[int] = set()  # ports that already have a marked output for the held items
        self._spans: list[ItemSpan] = []
        self._report_at = 0

    @property
    def is_source(self) -> bool:
        return self._next is not None

    def took(self, port: int, box: SampledItem) -> None:
        """Record that a worker has taken a sampled item from an input port."""
        self._held.setdefault(port, []).append((box.marks, time.monotonic_ns()))

    def finished(self, port: int) -> None:
        """Record that the worker has finished the sampled items of an input port."""
        now = time.monotonic_ns()
        put_at = min(self._put_at.values(), default=now)
        for marks, taken in self._held.pop(port, ()):
            self._spans.append((marks, taken, max(taken, put_at)))
        self._put_at.clear()
        self._sent_to.clear()
        if now >= self._report_at or len(self._spans) >= MOST_SPANS:
            self._send(now)

    def boxed(self, port: int, item: Any) -> Any:
        """Put an output into a box, unless an earlier output of its port already carries the marks."""
        if port in self._sent_to:
            return item
        self._put_at.setdefault(port, time.monotonic_ns())
        if self._held:
            every = (marks for held in self._held.values() for marks, _ in held)
            return SampledItem(item, tuple(sorted({*itertools.chain.from_iterable(every)}))[-MOST_MARKS:])
        return item if self._next is None else SampledItem(item, (self._next,))

    def sent(self, port: int) -> int:
        """Record that a box was put. In a source, return the number of items until the next sample."""
        if self._next is None:
            self._sent_to.add(port)
            return 0
        put_at = self._put_at.pop(port, 0)
        self._spans.append(((self._next,), put_at, put_at))
        self._next += 1
        since, self._sampled_at = put_at - self._sampled_at, put_at
        if since < CLOSEST_NS:
            self._every = min(RAREST, 2 * self._every)
        elif since > FARTHEST_NS:
            self._every = max(1, self._every // 2)
        if put_at >= self._report_at or len(self._spans) >= MOST_SPANS:
            self._send(put_at)
        return self._every

    def end(self) -> None:
        """Treat the items that the worker still holds as finished, and send the remaining spans."""
        for port in list(self._held):
            self.finished(port)
        self._send(time.monotonic_ns())

    def _send(self, now: int) -> None:
        spans, self._spans, self._report_at = tuple(self._spans), [], now + SEND_EVERY_NS
        if spans:
            with contextlib.suppress(Closed, Broken):  # raised after the end of the run
                self._tell(ItemSpans(self._worker, spans))


def follow_items(worker: WorkerId, ports: Ports, tell: Callable[[Event], None]) -> ItemRecorder | None:
    """Follow sampled items through a worker's ports, if the run samples items."""
    stage = ports.shared.sampled
    if stage is None:
        return None
    first = None if ports.inputs else first_mark(stage, worker.number, seeds.worker().incarnation)
    return _follow(ItemRecorder(worker, tell, first), ports.everything())


def _follow(recorder: ItemRecorder, ports: Iterable[In[Any] | Out[Any]]) -> ItemRecorder:
    tracing = _core.ItemTracing(recorder, int(recorder.is_source))
    for port in ports:
        port._trace(tracing)
    return recorder


def follow_at_program(
    place: int, worker: WorkerId, ports: Iterable[In[Any] | Out[Any]], tell: Callable[[Event], None]
) -> None:
    """Follow sampled items through the ports of the program itself.

    For ports that the program writes to, the program acts as a source. ``place`` is the position of the stage
    in the graph.
    """
    for port in ports:
        first = first_mark(place, 0, 0) if isinstance(port, Out) else None
        _follow(ItemRecorder(worker, tell, first), [port])


def first_mark(stage: int, worker: int, incarnation: int) -> int:
    """Return the mark of a worker's first sample. ``stage`` is the position of its stage in the graph."""
    return ((stage << 16 | worker) << 16 | incarnation) << 32


def source_of(mark: int) -> int:
    """Return the source that created a mark, as the source's position in the graph."""
    return mark >> 64


def end_following(recorder: ItemRecorder | None, ports: Ports) -> None:
    """Send the recorder's remaining spans and release it, because the worker is about to end."""
    if recorder is not None:
        recorder.end()
        for port in ports.everything():  # break a reference cycle, because the recorder refers to the run
            port._trace(None)

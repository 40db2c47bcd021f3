"""Split the time of a worker into spans: busy, or waiting for input, for room or for its turn.

Algorithm. The ports add up how long a worker has waited, and a sampler reads these sums every few
milliseconds. The time between two readings is divided in proportion to the waits. The first part continues
the kind of the last span, so that a long wait stays one span. A part that is shorter than ``finest`` is not
drawn, but is carried over to the next reading. For each kind, the spans of a worker therefore add up to its
wait time, to within about ``finest``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

SpanKind = Literal["busy", "input", "place", "turn"]
KINDS: tuple[SpanKind, ...] = ("busy", "input", "place", "turn")
FINEST_NS = 1_000_000
"""Initial minimum length of a span, in nanoseconds."""
MOST_SPANS = 20_000
"""Number of spans after which the minimum length of a span doubles."""


class Span(NamedTuple):
    """Interval in which a worker was busy or waited for one kind of event. Times are in nanoseconds."""

    kind: SpanKind
    begin: int
    end: int


@dataclass(slots=True)
class WorkerSpans:
    """Computes the spans of a worker that begins to work at time ``at``.

    Attributes:
        at: Time of the last reading, in nanoseconds.
        waited: Total waits for input, room and turns at the last reading, in nanoseconds.
        finest: Minimum length of a span, in nanoseconds. This length grows with the number of spans, so that
            a long trace stays small.
    """

    at: int
    waited: tuple[int, int, int] = (0, 0, 0)
    finest: int = FINEST_NS
    _carried: dict[SpanKind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    _kind: SpanKind = "busy"
    _begin: int = 0
    _count: int = 0

    def __post_init__(self) -> None:
        self._begin = self.at

    def read(self, now: int, waited: tuple[int, int, int]) -> Iterator[Span]:
        """Process a reading, and yield the spans that it ends. Ignore a reading that comes too early.

        ``waited`` contains the sums over the open ports of the worker. These sums therefore drop when a port
        closes.
        """
        length = now - self.at
        if length < self.finest:
            return
        waits = [max(0, new - old) for new, old in zip(waited, self.waited, strict=True)]
        self.at, self.waited = now, waited
        owed = dict(zip(KINDS, (length - sum(waits), *waits), strict=True))
        for kind, carried in self._carried.items():
            owed[kind] += carried
        drawn = {kind: time if time >= self.finest else 0 for kind, time in owed.items()}
        largest = max(owed, key=owed.__getitem__)
        drawn[largest] = max(0, drawn[largest] + length - sum(drawn.values()))
        self._carried = {kind: owed[kind] - drawn[kind] for kind in KINDS}
        yield from self._extend(now - length, now, drawn)

    def _extend(self, at: int, until: int, drawn: dict[SpanKind, int]) -> Iterator[Span]:
        for kind in sorted(KINDS, key=lambda kind: kind != self._kind):
            length = min(drawn[kind], until - at)
            if length > 0 and kind != self._kind:
                yield from self._end(at)
                self._kind, self._begin = kind, at
            at += max(0, length)

    def _end(self, at: int) -> Iterator[Span]:
        if at > self._begin:
            yield Span(self._kind, self._begin, at)
            self._count += 1
            if self._count % MOST_SPANS == 0:
                self.finest *= 2

    def end(self, now: int) -> Iterator[Span]:
        """Yield the last span of a worker that has ended."""
        self.at = max(self.at, now)
        yield from self._end(self.at)
        self._begin = self.at

"""Turn the wait times of a worker into spans: busy, and waiting for input, for a place or for its turn.

Algorithm. The ports count how long a worker has waited, and a sampler reads these sums every few
milliseconds. The time between two readings is divided in the same proportions. It begins with the kind of the
last span, so that a long wait stays one span. A part that is shorter than ``finest`` is not drawn. It is
carried over to the next reading instead. The spans of a worker therefore add up to its wait times, with an
error of about ``finest`` for each kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

SpanKind = Literal["busy", "input", "place", "turn"]
KINDS: tuple[SpanKind, ...] = ("busy", "input", "place", "turn")
FINEST_NS = 1_000_000
"""Shortest span of a worker, in nanoseconds."""
MOST_SPANS = 20_000
"""Number of spans after which the shortest span of a worker is doubled."""


class Span(NamedTuple):
    """Time in nanoseconds that a worker spent in one way."""

    kind: SpanKind
    begin: int
    end: int


@dataclass(slots=True)
class WorkerSpans:
    """Spans of one worker, from the moment ``at`` at which it begins to work.

    Attributes:
        at: Time of the last reading, in nanoseconds.
        waited: Wait times at the last reading, in nanoseconds: for input, for a place and for a turn.
        finest: Shortest span, in nanoseconds. It grows with the number of spans, which is bounded.
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
        """Take a reading, and yield the spans that have ended. A reading that comes too early is ignored.

        The sums of ``waited`` are those of the worker's ports, so they may be reset when a port is closed.
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
        """Yield the last span, because the worker has ended."""
        self.at = max(self.at, now)
        yield from self._end(self.at)
        self._begin = self.at

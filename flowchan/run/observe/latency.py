"""Measure the latency of sampled items in a time window, for each path through the graph."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from flowchan.run.policy.events import ItemTraced

MOST_SAMPLES = 1000
"""Maximum number of samples kept for each path. The oldest are dropped."""


@dataclass(frozen=True, slots=True)
class PathLatency:
    """Latency of the sampled items that took the same path.

    Attributes:
        path: Names of the stages on the path.
        count: Number of sampled items in the window.
        p50: Median latency in seconds.
        p99: Latency in seconds that 99 % of the items do not exceed.
    """

    path: tuple[str, ...]
    count: int
    p50: float
    p99: float


class PathLatencies:
    """Keeps the latencies of one run's sampled items.

    Args:
        window: Length of the window in seconds (default: 60).
    """

    def __init__(self, window: float = 60.0) -> None:
        self._window = window
        # Pairs of completion time and latency, by path.
        self._samples: dict[tuple[str, ...], deque[tuple[float, float]]] = {}

    def add(self, item: ItemTraced) -> None:
        """Record a sampled item."""
        samples = self._samples.setdefault(item.path, deque(maxlen=MOST_SAMPLES))
        samples.append((item.spans[-1][3], item.latency))

    def paths(self, now: float) -> tuple[PathLatency, ...]:
        """Return the latency of each path in the window that ends at ``now``, a monotonic time in seconds."""
        found = []
        for path, samples in list(self._samples.items()):
            recent = sorted(latency for at, latency in list(samples) if at >= now - self._window)
            if recent:
                found.append(PathLatency(path, len(recent), _quantile(recent, 0.5), _quantile(recent, 0.99)))
        return tuple(found)


def _quantile(ordered: list[float], share: float) -> float:
    """Return the smallest value such that at least the fraction ``share`` of all values is not larger."""
    return ordered[math.ceil(share * len(ordered)) - 1]

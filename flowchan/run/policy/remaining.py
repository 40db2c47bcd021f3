"""Estimate a run's remaining time from its recent progress.

Algorithm. The estimate is the number of remaining items divided by a recent rate. The rate covers the last
``RECENT_S`` seconds or, in a long run, the last tenth of the run. If fewer than ``FEWEST_ITEMS`` items were
finished in that time, the rate covers a longer time. This time is divided into ``PARTS`` equal parts, and the
rate is the median of the rates in these parts. A burst or pause of one or two parts therefore does not change
the estimate, but a lasting change takes effect after three parts. If items have become so slow that most
parts have none, the rate is the mean over all parts except the fastest.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from dataclasses import dataclass, field

RECENT_S, RECENT_SHARE = 5.0, 0.1
"""Period that the rate covers, in seconds and as a share of the run. The longer of the two applies."""
FEWEST_ITEMS = 10
"""Minimum number of items that must have finished in the period; otherwise, a longer period is used."""
PARTS = 5
SAMPLES = 50
"""Number of samples to keep for the period."""


@dataclass
class RemainingTime:
    """Estimates the remaining time of one stage.

    Example:
        >>> from flowchan.run.policy.remaining import RemainingTime
        >>> remaining = RemainingTime()
        >>> for second in range(11):
        ...     left = remaining.update(elapsed=second, done=10 * second, total=200)
        >>> left
        10.0
    """

    _times: list[float] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)

    def update(self, elapsed: float, done: int, total: int) -> float | None:
        """Record the current progress and return the remaining time.

        Args:
            elapsed: Seconds since the run started.
            done: Number of finished items.
            total: Total number of items.

        Returns:
            Seconds until all items will be finished, or None if no item was finished recently.
        """
        self._keep(elapsed, done)
        if done >= total:
            return 0.0
        rate = self._rate(elapsed, done)
        return (total - done) / rate if rate else None

    def _keep(self, elapsed: float, done: int) -> None:
        """Store the current progress as a sample, unless the last sample is very recent."""
        if not self._times or elapsed - self._times[-1] >= _recent(elapsed) / SAMPLES:
            self._times.append(elapsed)
            self._counts.append(done)

    def _rate(self, elapsed: float, done: int) -> float:
        begin = elapsed - _recent(elapsed)
        first = bisect.bisect_right(self._counts, done - FEWEST_ITEMS) - 1
        begin = max(self._times[0], min(begin, self._times[max(first, 0)]))
        if elapsed <= begin:
            return 0.0
        length = (elapsed - begin) / PARTS
        counts = [self._count(begin + length * part, elapsed, done) for part in range(PARTS + 1)]
        items = [after - before for before, after in itertools.pairwise(counts)]
        usual = statistics.median(items)
        return (usual if usual else (sum(items) - max(items)) / (PARTS - 1)) / length

    def _count(self, at: float, elapsed: float, done: int) -> float:
        """Return the number of items finished by time ``at``, interpolated between samples."""
        place = bisect.bisect_right(self._times, at) - 1
        time, count = self._times[place], self._counts[place]
        last = place + 1 == len(self._times)
        next_time, next_count = (elapsed, done) if last else (self._times[place + 1], self._counts[place + 1])
        share = (at - time) / (next_time - time) if next_time > time else 1.0
        return count + share * (next_count - count)


def _recent(elapsed: float) -> float:
    return max(RECENT_S, RECENT_SHARE * elapsed)

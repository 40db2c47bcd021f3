"""Estimate how far the monotonic clock of an agent's host is ahead of the driver's.

Algorithm. The driver sends its time, and the agent returns it with the host's time. The driver assumes that
the agent answered halfway through the round trip (Cristian's algorithm). The error is at most half the round
trip, so the driver keeps the answer with the shortest one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from flowchan.hosts.agent_messages import ClockReading


@dataclass(slots=True)
class HostClock:
    """A host's clock, compared with the driver's.

    Attributes:
        ahead: Nanoseconds by which the host's clock is ahead of the driver's.
        precision: Maximum error of ``ahead`` in nanoseconds; None before the first comparison.
    """

    ahead: int = 0
    precision: int | None = None

    def answered(self, reading: ClockReading, now: int | None = None) -> None:
        """Update the estimate from an answer that arrived at time ``now`` (default: the current time)."""
        now = time.monotonic_ns() if now is None else now
        precision = (now - reading.asked + 1) // 2
        if self.precision is None or precision < self.precision:
            self.ahead, self.precision = reading.at - (reading.asked + now) // 2, precision

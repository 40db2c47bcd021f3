"""Estimate how far the monotonic clock of an agent's host is ahead of the driver's.

Algorithm. The driver sends its clock time. The agent returns that time together with the host's clock time.
The driver assumes that the agent answered in the middle of the round trip (Cristian's algorithm). The error
is at most half the round-trip time, so the driver keeps the answer with the shortest round trip. The driver
first asks ``FIRST_READINGS`` times in a row, because a single answer may be late on a busy machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from flowchan.hosts.agent_messages import ClockReading

FIRST_READINGS = 8
"""Number of readings that the driver takes in a row before it asks only from time to time."""


@dataclass(slots=True)
class HostClock:
    """A host's clock, compared with the driver's.

    Attributes:
        ahead: Nanoseconds by which the host's clock is ahead of the driver's clock.
        precision: Maximum error of ``ahead`` in nanoseconds; None if the clocks have not been compared.
        answers: Number of answers so far.
    """

    ahead: int = 0
    precision: int | None = None
    answers: int = 0

    @property
    def is_rough(self) -> bool:
        """Return whether the estimate is still rough, so that the driver should ask again immediately."""
        return self.answers < FIRST_READINGS

    def answered(self, reading: ClockReading, now: int | None = None) -> None:
        """Update the estimate from an answer that arrived at time ``now`` (default: the current time)."""
        now = time.monotonic_ns() if now is None else now
        self.answers += 1
        precision = (now - reading.asked + 1) // 2
        if self.precision is None or precision < self.precision:
            self.ahead, self.precision = reading.at - (reading.asked + now) // 2, precision

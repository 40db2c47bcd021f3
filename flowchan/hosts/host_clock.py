"""Difference between the monotonic clocks of the driver and of an agent's host.

Algorithm. The driver sends the time of its clock, and the agent returns it with the time of the host's clock.
The driver assumes that the agent answered in the middle of the round trip (Cristian's algorithm). The error
is at most half of the round trip, so the driver keeps the answer of the quickest round trip.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from flowchan.hosts.agent_messages import ClockReading


@dataclass(slots=True)
class HostClock:
    """Clock of a host, compared with the driver's clock.

    Attributes:
        ahead: Nanoseconds that the host's clock is ahead of the driver's clock.
        precision: Largest error of ``ahead`` in nanoseconds; None if the clocks have not been compared.
    """

    ahead: int = 0
    precision: int | None = None

    def answered(self, reading: ClockReading, now: int | None = None) -> None:
        """Use an answer, which has arrived ``now`` (default: at this moment)."""
        now = time.monotonic_ns() if now is None else now
        precision = (now - reading.asked + 1) // 2
        if self.precision is None or precision < self.precision:
            self.ahead, self.precision = reading.at - (reading.asked + now) // 2, precision

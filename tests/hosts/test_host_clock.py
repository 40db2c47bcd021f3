"""Test the comparison of a host's clock with the driver's clock."""

from __future__ import annotations

from flowchan.hosts.agent_messages import ClockReading
from flowchan.hosts.host_clock import HostClock


def test_clock_assumes_that_agent_answers_in_middle_of_round_trip() -> None:
    clock = HostClock()
    clock.answered(ClockReading(asked=1000, at=51_100), now=1200)
    assert (clock.ahead, clock.precision) == (50_000, 100)


def test_clock_keeps_answer_of_quickest_round_trip() -> None:
    clock = HostClock()
    for asked, at, now in [(0, 900, 1000), (2000, 2510, 2020), (3000, 3900, 4000)]:
        clock.answered(ClockReading(asked, at), now)
    assert (clock.ahead, clock.precision) == (500, 10)


def test_clock_that_was_not_compared_has_no_precision() -> None:
    assert HostClock().precision is None

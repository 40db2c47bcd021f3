"""Test the comparison of a host's clock with the driver's clock."""

from __future__ import annotations

from flowchan.hosts.agent_messages import ClockReading
from flowchan.hosts.host_clock import FIRST_READINGS, HostClock


def test_host_clock_assumes_answer_at_midpoint_of_round_trip() -> None:
    clock = HostClock()
    clock.answered(ClockReading(asked=1000, at=51_100), now=1200)
    assert (clock.ahead, clock.precision) == (50_000, 100)


def test_host_clock_keeps_answer_with_shortest_round_trip() -> None:
    clock = HostClock()
    for asked, at, now in [(0, 900, 1000), (2000, 2510, 2020), (3000, 3900, 4000)]:
        clock.answered(ClockReading(asked, at), now)
    assert (clock.ahead, clock.precision) == (500, 10)


def test_host_clock_has_no_precision_before_first_comparison() -> None:
    assert HostClock().precision is None


def test_host_clock_is_rough_until_it_has_several_answers() -> None:
    clock = HostClock()
    for number in range(FIRST_READINGS):
        assert clock.is_rough
        clock.answered(ClockReading(number, number), now=number + 10)
    assert not clock.is_rough
    assert clock.precision == 5

"""Test the estimate of the remaining time, with scripted progress."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from flowchan.run.policy.remaining import RemainingTime


def shown(
    done: Callable[[float], float], total: int, until: float, every: float = 0.1
) -> Iterator[tuple[float, float | None]]:
    """Yield the time and the estimate at each refresh of a view of a run with this progress."""
    remaining = RemainingTime()
    for number in range(int(until / every)):
        now = number * every
        yield now, remaining.update(now, min(total, int(done(now))), total)


def slow_at_the_end(now: float) -> float:
    """Return the number of items done: 1,000 per second, and 2.5 per second for the last 200."""
    return 1000 * now if now < 10 else 10_000 + 2.5 * (now - 10)


@pytest.mark.parametrize("every", [0.1, 0.25, 1.0])
def test_estimate_reflects_slow_final_items_within_5_seconds(every: float) -> None:
    """The slow items take 80 s, so 75 s are left 5 s after the first slow item."""
    found = {now: left for now, left in shown(slow_at_the_end, 10_200, 20, every) if now >= 15}
    assert all(left is not None and 60 <= left + (now - 10) <= 110 for now, left in found.items())
    assert found[min(found)] >= 60


def test_average_since_the_start_would_be_far_off() -> None:
    """An average since the start would fail the test in which the last items are slow."""
    done = slow_at_the_end(15)
    assert (10_200 - done) * 15 / done < 1


@pytest.mark.parametrize("burst", [50, 500, 5000])
def test_burst_does_not_distort_remaining_time(burst: int) -> None:
    """A burst reduces the number of items left, but must not count as a higher rate."""
    found = [
        left
        for now, left in shown(lambda now: 10 * now + (burst if now > 20 else 0), 10_000, 40)
        if now > 5 and left is not None
    ]
    own = burst / 10  # seconds that these items would take at the usual rate
    assert all(abs(one - other) <= 1 + own for one, other in itertools.pairwise(found))
    assert all(one / other < 2.5 for one, other in itertools.pairwise(found))


def test_short_pause_does_not_distort_remaining_time() -> None:
    found = [left for now, left in shown(lambda now: 10 * (min(now, 20) + max(0, now - 21.5)), 1000, 40)]
    assert all(left is not None and 55 <= left <= 100 for left in found[100:400])


def test_steady_progress_gives_steady_estimate() -> None:
    for now, left in shown(lambda now: 40 * now, 4000, 90):
        if now > 3:
            assert left == pytest.approx(100 - now, rel=0.1, abs=0.5)


def test_estimate_covers_longer_time_if_items_are_rare() -> None:
    """Each item takes 20 seconds."""
    found = {round(now): left for now, left in shown(lambda now: now / 20, 40, 700, 1.0)}
    assert found[400] == pytest.approx(400, rel=0.15)
    assert found[600] == pytest.approx(200, rel=0.15)


def test_estimate_covers_last_tenth_of_long_run() -> None:
    """After 1,000 s, the estimate covers the last 100 s, so 30 s of slower items do not change it."""
    slower = dict(shown(lambda now: 10 * now if now < 1000 else 10_000 + 5 * (now - 1000), 20_000, 1081, 1.0))
    assert slower[1030] == pytest.approx((20_000 - 10_150) / 10, rel=0.02)
    assert slower[1080] == pytest.approx((20_000 - 10_400) / 5, rel=0.02)


def test_remaining_time_is_unknown_before_the_first_item() -> None:
    remaining = RemainingTime()
    assert remaining.update(0.0, 0, 10) is None
    assert remaining.update(3.0, 0, 10) is None


def test_remaining_time_is_zero_once_all_items_are_done() -> None:
    assert RemainingTime().update(1.0, 10, 10) == 0


def test_number_of_samples_grows_logarithmically() -> None:
    remaining = RemainingTime()
    sizes = []
    for number in range(100_000):
        remaining.update(number / 10, number, 10**6)
        if number in (999, 9_999, 99_999):
            sizes.append(len(remaining._times))
    assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0], rel=0.5)

"""Choice of the quickest algorithm of an operation, also when the quickest one changes."""

from __future__ import annotations

import pytest
from building import program, run

pytestmark = pytest.mark.timeout(600)  # a test compiles its program

HALF = 20_000


def shares(before: tuple[int, ...], after: tuple[int, ...]) -> list[list[float]]:
    """Return the share of each algorithm in both halves of a trial.

    ``before`` and ``after`` are the times of each algorithm in ns in the two halves.
    """
    ended = run(program("plain/trial"), *map(str, (HALF, len(before), *before, *after)))
    assert ended.returncode == 0, ended.stderr
    counts = [int(count) / HALF for count in ended.stdout.split()]
    return [counts[: len(before)], counts[len(before) :]]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((100, 50), (100, 50)),
        ((50, 100), (50, 100)),
        ((100, 50), (50, 100)),
        ((50, 100), (100, 50)),
        ((100, 99), (100, 101)),
        ((100, 50, 200, 300, 70, 400), (100, 250, 60, 300, 70, 400)),
        ((100, 101, 102), (102, 101, 100)),
    ],
)
def test_tuner_uses_the_quickest_algorithm_nearly_always(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    for times, found in zip((before, after), shares(before, after), strict=True):
        assert found[times.index(min(times))] > 0.85


def test_tuner_tries_all_algorithms_despite_a_clear_winner() -> None:
    for found in shares((1, 10**6, 10**6), (1, 10**6, 10**6)):
        assert all(0 < share < 0.01 for share in found[1:])


def test_tuner_retries_all_algorithms_when_the_quickest_slows_down() -> None:
    """This must happen long before the next regular trial."""
    _, after = shares((100, 500, 500, 500), (400, 500, 100, 500))
    assert after[2] > 0.99

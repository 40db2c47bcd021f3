"""Check that the tuner finds the fastest of several plans, even when another plan becomes the fastest."""

from __future__ import annotations

import pytest
from building import program, run

pytestmark = pytest.mark.timeout(600)  # a test may have to compile its program

HALF = 20_000


def shares(before: tuple[int, ...], after: tuple[int, ...]) -> list[list[float]]:
    """Return each plan's share of the operations in both halves of a run.

    ``before`` and ``after`` are the plans' times in ns in the first and in the second half.
    """
    ended = run(program("plain/tuner"), *map(str, (HALF, len(before), *before, *after)))
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
def test_nearly_all_operations_use_the_fastest_plan(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    for times, found in zip((before, after), shares(before, after), strict=True):
        assert found[times.index(min(times))] > 0.85


def test_every_plan_is_tried_even_if_one_is_much_faster() -> None:
    for found in shares((1, 10**6, 10**6), (1, 10**6, 10**6)):
        assert all(0 < share < 0.01 for share in found[1:])


def test_every_plan_is_tried_when_the_fastest_becomes_slow() -> None:
    """In this case, all plans are tried long before their next regular trial."""
    _, after = shares((100, 500, 500, 500), (400, 500, 100, 500))
    assert after[2] > 0.99

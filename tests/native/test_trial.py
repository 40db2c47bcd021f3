"""Of two ways to do an allreduce the quicker one is found, also when that changes."""

from __future__ import annotations

import pytest
from building import Builder, run

HALF = 20_000


def share_of_the_second_way(builder: Builder, *times: int) -> list[float]:
    """Of both halves of a trial. ``times``: those of both ways in the first half, and in the second one."""
    ended = run(builder.program("trial.cpp", core=()), *map(str, times), str(HALF))
    assert ended.returncode == 0, ended.stderr
    return [int(count) / HALF for count in ended.stdout.split()]


@pytest.mark.parametrize(
    ("before", "after", "first", "second"),
    [
        ((100, 50), (100, 50), True, True),
        ((50, 100), (50, 100), False, False),
        ((100, 50), (50, 100), True, False),
        ((50, 100), (100, 50), False, True),
        ((100, 99), (100, 101), True, False),
    ],
)
def test_nearly_all_operations_are_done_in_the_quicker_way(
    builder: Builder, before: tuple[int, int], after: tuple[int, int], first: bool, second: bool
) -> None:
    shares = share_of_the_second_way(builder, *before, *after)
    for quicker, share in zip((first, second), shares, strict=True):
        assert (share if quicker else 1 - share) > 0.9


def test_both_ways_are_tried_however_clear_it_is(builder: Builder) -> None:
    assert all(0 < share < 0.01 for share in share_of_the_second_way(builder, 1, 10**6, 1, 10**6))

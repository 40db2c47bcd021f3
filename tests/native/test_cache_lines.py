"""Measure the cost of an item between two cores: the cache lines that move, and how two busy sides take
turns."""

from __future__ import annotations

import re

import pytest
from building import program, run

pytestmark = pytest.mark.timeout(600)  # a test may have to compile its program


def numbers(output: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", output)]


def test_put_and_get_share_two_cache_lines_besides_the_slot() -> None:
    """The shared lines contain the lock and the counts. Each side has its own redo record."""
    ended = run(program("plain/lines"))
    assert ended.returncode == 0, ended.stderr
    *_, in_both, with_the_next = numbers(ended.stdout)
    assert in_both == 2
    assert with_the_next == 3


def turn_taking(one: int, other: int) -> tuple[int, int]:
    """Return how many runs 20,000 operations form, and how many rests they take.

    ``one`` and ``other`` are the ns that each side spends on other work between two operations.
    """
    ended = run(program("plain/turn_taking"), str(one), str(other), "20000")
    assert ended.returncode == 0, ended.stderr
    runs, rests = numbers(ended.stdout)
    return runs, rests


@pytest.mark.parametrize("elsewhere", [0, 100, 150])
def test_busy_reader_and_writer_take_turns_in_long_runs(elsewhere: int) -> None:
    runs, _ = turn_taking(elsewhere, elsewhere)
    assert runs < 20_000 / 12


@pytest.mark.parametrize("elsewhere", [(2_000, 2_000), (5_000, 5_000)])
def test_reader_or_writer_that_rarely_uses_the_channel_never_rests(elsewhere: tuple[int, int]) -> None:
    assert turn_taking(*elsewhere)[1] == 0


@pytest.mark.parametrize("elsewhere", [(400, 400), (600, 600), (100, 2_000), (10_000, 100), (50, 300)])
def test_rests_that_bring_no_benefit_become_rare(elsewhere: tuple[int, int]) -> None:
    runs, rests = turn_taking(*elsewhere)
    assert rests < 20 + runs / 100

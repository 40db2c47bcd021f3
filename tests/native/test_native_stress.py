"""Load the ring without Python, with each sanitizer and with none, and expect exact totals."""

from __future__ import annotations

import re
from typing import Any

import pytest
from building import program, run

pytestmark = pytest.mark.timeout(600)  # the first test may have to compile the program for all tests

OPTIONS = {
    "address": {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"},
    "thread": {"TSAN_OPTIONS": "halt_on_error=1"},
}
"""Sanitizer options by folder of build/native-tests. ``address`` also detects undefined behaviour."""
SANITIZERS = [pytest.param(name, marks=pytest.mark.long) for name in OPTIONS]
"""Only long runs compile the core for each sanitizer, because an unchanged core gives the same result."""
REPORTS = [
    ("address", "PLANT_ASAN", "heap-buffer-overflow"),
    ("address", "PLANT_UBSAN", "runtime error: shift exponent"),
    ("thread", "PLANT_TSAN", "ThreadSanitizer: data race"),
]
"""Faults to plant in builds with these sanitizers, and the reports expected for them."""
planted = pytest.mark.parametrize(
    ("sanitizer", "plant", "report"), [pytest.param(*found, marks=pytest.mark.long) for found in REPORTS]
)


def seeds(number: int) -> Any:
    """Parametrize a test with seeds. Only ``make soak`` runs more than the first seed."""
    more = (pytest.param(seed, marks=pytest.mark.long) for seed in range(1, number))
    return pytest.mark.parametrize("seed", [0, *more])


@pytest.mark.parametrize("who", ["threads", "processes"])
def test_c1_c4_c5_c8_ring_totals_are_exact_under_load(who: str) -> None:
    ended = run(program("plain/stress"), who, "20000")
    assert ended.returncode == 0, ended.stderr
    assert "all totals are exact" in ended.stdout


@seeds(3)
def test_c11_no_item_is_lost_or_repeated_by_random_kills(seed: int) -> None:
    ended = run(program("plain/kills"), str(seed), "2000")
    assert ended.returncode == 0, ended.stderr
    found = re.findall(r"^(ordered|unordered): (\d+) passed, (\d+) kills$", ended.stdout, re.MULTILINE)
    assert [(kind, passed) for kind, passed, _ in found] == [("ordered", "3000"), ("unordered", "3000")]
    assert all(int(kills) > 0 for *_, kills in found)
    print(ended.stdout)


@seeds(4)
def test_c11_random_kills_do_not_overwrite_viewed_or_lent_memory(seed: int) -> None:
    ended = run(program("plain/kills_views"), str(seed), "2000")
    assert ended.returncode == 0, ended.stderr
    found = re.findall(r"^(ordered|unordered): (\d+) passed, (\d+) kills$", ended.stdout, re.MULTILINE)
    assert [(kind, passed) for kind, passed, _ in found] == [("ordered", "2000"), ("unordered", "2000")]
    assert all(int(kills) > 0 for *_, kills in found)
    print(ended.stdout)


@seeds(5)
def test_c2_free_memory_is_found_however_it_is_divided(seed: int) -> None:
    ended = run(program("plain/memory"), str(seed), "5000")
    assert ended.returncode == 0, ended.stderr
    found, not_found = map(int, re.findall(r"\d+", ended.stdout)[:2])
    assert found > 0
    assert not_found > 0
    print(ended.stdout)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_each_sanitizer_reports_no_error_under_stress(sanitizer: str) -> None:
    for who in ("threads",) if sanitizer == "thread" else ("threads", "processes"):
        ended = run(program(f"{sanitizer}/stress"), who, "2000", **OPTIONS[sanitizer])
        assert ended.returncode == 0, ended.stderr
        assert "all totals are exact" in ended.stdout


@planted
def test_each_sanitizer_finds_a_planted_fault(sanitizer: str, plant: str, report: str) -> None:
    # the planted race needs two threads that run at the same moment, which a busy machine may not offer
    for _ in range(10):
        ended = run(program(f"{sanitizer}/stress-{plant}"), "threads", "200", **OPTIONS[sanitizer])
        if ended.returncode != 0:
            break
    assert ended.returncode != 0
    assert report in ended.stderr
    assert "all totals are exact" not in ended.stdout

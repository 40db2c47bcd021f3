"""Run links without Python: under load and breaks, under each sanitizer, and with arbitrary frames."""

from __future__ import annotations

import re

import pytest
from building import program, run
from test_native_stress import OPTIONS, SANITIZERS, planted

pytestmark = pytest.mark.timeout(600)  # the first test may have to compile the program for all tests

# Without this option, the thread sanitizer would report false races. The sanitizer records memory as sent
# only when the call returns. The data may have arrived earlier, and the memory may already be in use again.
ENVIRONMENTS = OPTIONS | {"thread": {"TSAN_OPTIONS": OPTIONS["thread"]["TSAN_OPTIONS"] + ":intercept_send=0"}}
WALKS = [
    ("2", "unordered", "100"),
    ("100", "unordered", "100"),  # has more rings than one thread can sleep on
    ("3", "ordered", "100"),
    ("3", "ordered", "0"),
]


@pytest.mark.parametrize("walk", WALKS, ids=" ".join)
def test_r4_totals_are_exact_over_a_link_that_breaks(walk: tuple[str, ...]) -> None:
    ended = run(program("plain/links"), "3000", *walk)
    assert ended.returncode == 0, ended.stderr
    found = re.fullmatch(r"all totals are exact: 4500 outputs over (\d+) breaks\n", ended.stdout)
    assert found is not None, ended.stdout
    assert (found[1] == "0") == (walk[-1] == "0")


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_each_sanitizer_reports_no_error_in_a_link(sanitizer: str) -> None:
    for walk in WALKS[:3]:
        ended = run(program(f"{sanitizer}/links"), "400", *walk, **ENVIRONMENTS[sanitizer])
        assert ended.returncode == 0, ended.stderr
        assert "all totals are exact" in ended.stdout


@planted
def test_each_sanitizer_finds_a_fault_planted_in_a_link(sanitizer: str, plant: str, report: str) -> None:
    harmed = program(f"{sanitizer}/links-{plant}")
    # the planted race needs two threads that run at the same moment, which a busy machine may not offer
    for _ in range(10):
        ended = run(harmed, "200", "2", "unordered", "0", **ENVIRONMENTS[sanitizer])
        if ended.returncode != 0:
            break
    assert ended.returncode != 0
    assert report in ended.stderr


@pytest.mark.parametrize("copied", [24, 3000, 15_000])
def test_link_frees_sent_bytes_while_more_are_queued(copied: int) -> None:
    """A host that sends faster than its connection must not use ever more memory."""
    ended = run(program("plain/outgoing"), "500", str(copied))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"received all {500 * (copied + 100_000)} bytes\n"


@pytest.mark.timeout(3 * 3600)  # ``--frames`` may ask for any number of frames
@pytest.mark.parametrize("world", ["model", "owner", "worker"])
def test_link_puts_valid_frames_and_disconnects_after_invalid_frames(
    pytestconfig: pytest.Config, long_walk: bool, world: str
) -> None:
    """C1, C4: every valid frame is put, no invalid frame is put, and nothing crashes or hangs."""
    how, seeds, frames = "plain", 2, 2000
    if long_walk:
        how, seeds, frames = "address", 100, pytestconfig.getoption("--frames") // 100
    for seed in range(seeds):
        ended = run(program(f"{how}/frames"), world, str(seed), str(frames), **OPTIONS["address"])
        assert ended.returncode == 0, f"seed {seed}: {ended.stderr}"
        found = re.fullmatch(r"all connections of (\d+) frames have ended\n", ended.stdout)
        assert found is not None, ended.stdout
        assert int(found[1]) >= frames

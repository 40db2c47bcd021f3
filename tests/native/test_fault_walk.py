"""Check C11: a process killed at any instruction, even with a lock, never blocks or harms other processes.

``walk.cpp`` kills a process at every fault point of every operation on a ring. The program also kills a
second process during the recovery: at every fault point with ``--long``, otherwise at every 48th. The chosen
points differ between steps, so each point is tested at some step. After each death, other processes take the
lock, check every invariant of the ring, and read the ring to its end. Each item is read exactly once and in
order, or not at all if its operation had not taken effect.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from building import program, run

pytestmark = pytest.mark.timeout(600)  # the first test may have to compile the program for all tests

OPERATIONS = (
    "put small",
    "put into an empty channel",
    "put large",
    "put runs",
    "put runs with blocks into an empty channel",
    "put, memory grows",
    "put large, closed in between",
    "take small",
    "take with a block",
    "take large",
    "lease and acknowledge",
    "lease large and acknowledge",
    "lease and acknowledge batches",
    "lease and acknowledge runs",
    "lease and acknowledge runs with blocks",
    "put back",
    "put back, large",
    "put back a leased item",
    "close",
    "break without a cause",
    "break, small cause",
    "break, large cause",
    "open and end the last writer",
    "open and end the last reader",
    "open and end one of two writers",
    "open and end one of two readers",
    "give back",
    "give back into an empty channel",
    "give back items taken out of order",
    "end a session, its items finished",
    "sweep up after a dead process",
    "put ordered, parked",
    "put ordered, parked, large",
    "put ordered, at its turn",
    "advance over several groups",
    "advance over large ones",
    "put single, parked",
    "put single, at its turn",
    "put unordered",
    "close with parked outputs",
    "close with large parked outputs",
    "retire a writer",
    "retire a writer, unordered",
    "begin an item of a dead writer",
    "begin an item of a dead writer, large outputs",
    "begin an item of a dead writer, unordered",
    "reserve a suspect",
    "take a suspect",
    "reserve all items",
    "a worker of map",
    "a worker of flat_map",
    "a worker of flat_map, large outputs",
    "a worker of flat_map, unordered",
    "a worker that begins an item again",
    "a worker that begins an item again, unordered",
    "a worker of map with runs",
    "a worker of map with runs, unordered",
    "a worker of map with runs, some recalled",
    "take a view",
    "put back a viewed item",
    "lease a view and acknowledge it",
    "give back viewed items, then drop the views",
    "end a session with views",
    "end a plain session with views",
    "sweep up after a dead viewer",
    "end the session of a dead viewer",
    "take an item that another reader views",
    "lease an item that another reader views",
    "drop a view while another user copies",
    "adopt a port whose former owner has views",
    "loan, put it or drop it",
    "end a port with memory on loan",
    "put a loan, parked",
    "cut memory again, all of it free",
    "cut memory again between used blocks",
    "cut memory again after a death",
    "put fd bundles",
    "receive fd bundles",
)
ONCE = {
    name
    for name in OPERATIONS
    if name.startswith("a worker") or "large o" in name or name.endswith("parked, large")
}
ONCE |= {
    "take a suspect",
    "take a view",
    "put back a viewed item",
    "give back viewed items, then drop the views",
    "take an item that another reader views",
    "lease an item that another reader views",
    "drop a view while another user copies",
    "end a port with memory on loan",
    "put a loan, parked",
    "cut memory again between used blocks",
}
"""Operations that kill only one process, because other operations cover their recovery."""

Points = tuple[int, int]
"""Number of points in an operation that killed a process, and number of points in the recovery that killed
another."""


@pytest.fixture(scope="module")
def walk() -> Path:
    return program("plain/walk")


class Walked:
    """Walks operations on demand. Two processes share twelve operations at a time."""

    TOGETHER = 12

    def __init__(self, walk: Path, every: int) -> None:
        self.walk = walk
        self.every = every
        self.points: dict[str, Points] = {}

    def __getitem__(self, operation: str) -> Points:
        if operation not in self.points:
            begin = OPERATIONS.index(operation) // self.TOGETHER * self.TOGETHER
            self.walk_together(OPERATIONS[begin : begin + self.TOGETHER])
        return self.points[operation]

    def walk_together(self, operations: Sequence[str]) -> None:
        halves = [
            subprocess.Popen(
                [self.walk, str(self.every), *operations[half::2]],
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for half in range(2)
        ]
        failures = []
        for half in halves:
            out, errors = half.communicate()
            if half.returncode != 0:
                failures.append(errors)
            for line in out.splitlines():
                name, _, numbers = line.rpartition(": ")
                points, recoveries = map(int, numbers.split())
                self.points[name] = points, recoveries
        assert not failures, "\n".join(failures)


@pytest.fixture(scope="module")
def walked(walk: Path, long_walk: bool) -> Walked:
    return Walked(walk, every=1 if long_walk else 48)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_c11_death_at_any_step_does_not_affect_other_processes(walked: Walked, operation: str) -> None:
    points, recoveries = walked[operation]
    assert points > 0
    assert recoveries > points / walked.every or operation in ONCE


def test_c11_fault_injection_covers_every_operation(walked: Walked, walk: Path) -> None:
    assert run(walk, "list").stdout.splitlines() == list(OPERATIONS)
    points, recoveries = (sum(numbers) for numbers in zip(*map(walked.__getitem__, OPERATIONS), strict=True))
    print(f"{points} fault points walked, and {recoveries} with a second death in the recovery")


def test_c11_fault_injection_detects_a_put_without_a_redo_record(walk: Path) -> None:
    planted = run(walk, "planted")
    assert planted.returncode == 2
    assert (
        "planted, dead at step 2: after the lock was recovered: slots_used is 3 where 2 was counted"
        in planted.stderr
    )

"""Benchmark a host, to compare the speeds of hosts.

The benchmark keeps all cores busy, because a core is slower while other cores of its host are working. Each
process starts to work before the interval and stops shortly after it, but counts only the rounds within the
interval.
"""

from __future__ import annotations

import os
import time
from typing import NoReturn

INTERVAL_S = 1.0
MARGIN_S = 0.1  # seconds that each process works before and after the measured interval
FORK_S = 0.01  # seconds allowed for one process to start
COUNT_SIZE = 8  # size of a count in bytes


def rounds_per_core(cores: int, interval: float = INTERVAL_S) -> float:
    """Return how many rounds per second each core completes while ``cores`` cores are busy.

    Args:
        cores: Number of processes that work at the same time.
        interval: Seconds in which rounds are counted.

    Returns:
        Mean over the cores.
    """
    begin = time.monotonic() + MARGIN_S + FORK_S * cores
    reading, writing = os.pipe()
    children = []
    for _ in range(cores):
        child = os.fork()
        if child == 0:
            _count_and_exit(writing, begin, interval)
        children.append(child)
    os.close(writing)
    with open(reading, "rb") as counts:
        found = counts.read()  # the pipe ends when all processes have exited
    for child in children:
        os.waitpid(child, 0)
    rounds = [int.from_bytes(found[at : at + COUNT_SIZE], "big") for at in range(0, len(found), COUNT_SIZE)]
    return sum(rounds) / cores / interval


def _count_and_exit(writing: int, begin: float, interval: float) -> NoReturn:
    """Count the rounds (at least 1) in an interval that starts at ``begin``; write the count and exit.

    If the process starts late, its interval also starts late.
    """
    try:
        while time.monotonic() < begin:
            one_round()
        rounds, end = 0, time.monotonic() + interval
        while rounds == 0 or time.monotonic() < end:
            one_round()
            rounds += 1
        while time.monotonic() < end + MARGIN_S:
            one_round()
        os.write(writing, rounds.to_bytes(COUNT_SIZE, "big"))
    finally:
        os._exit(0)


def one_round() -> int:
    """Compute for about 0.1 ms, with integers, function calls, and memory that fits into a CPU cache."""
    numbers = list(range(1000))
    return sum(number * number for number in numbers) + hash(tuple(reversed(numbers)))

"""The benchmark that compares the speed of hosts, on the host.

All cores are busy for the whole measurement, because a core is slower while other cores of its host
work. Each process works before the interval, counts rounds within it, and works on for a while after it.
"""

from __future__ import annotations

import os
import time
from typing import NoReturn

INTERVAL_S = 1.0
MARGIN_S = 0.1  # seconds of work before and after the interval
FORK_S = 0.01  # seconds allowed for the start of one process
COUNT_SIZE = 8  # size of a count in bytes


def rounds_per_core(cores: int, interval: float = INTERVAL_S) -> float:
    """Return how many rounds of the benchmark a core completes per second while ``cores`` cores are busy.

    Args:
        cores: Number of processes that work at once.
        interval: Seconds during which the rounds are counted.

    Returns:
        The mean over the cores.
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
        found = counts.read()  # ends when all processes have ended
    for child in children:
        os.waitpid(child, 0)
    rounds = [int.from_bytes(found[at : at + COUNT_SIZE], "big") for at in range(0, len(found), COUNT_SIZE)]
    return sum(rounds) / cores / interval


def _count_and_exit(writing: int, begin: float, interval: float) -> NoReturn:
    """Write the number of rounds, at least 1, in an interval that starts at ``begin``; end the process.

    The interval starts later if the process does.
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
    """Work for about a tenth of a millisecond with integers, calls, and memory that fits into a cache."""
    numbers = list(range(1000))
    return sum(number * number for number in numbers) + hash(tuple(reversed(numbers)))

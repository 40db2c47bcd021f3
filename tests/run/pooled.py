"""Define stages and functions for the tests of pools."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
from support.waiting import wait_until

from flowchan import (
    Channel,
    Graph,
    WorkerPool,
)
from flowchan.run.crew.pool_processes import PooledProcess


class Square:
    """Stage function that counts its calls and reports its start and end to ``lifecycle``."""

    def __init__(self, lifecycle: Channel[str]) -> None:
        self.lifecycle, self.calls = lifecycle, 0
        lifecycle.put("built")

    def __call__(self, number: int) -> tuple[int, int, int]:
        self.calls += 1
        return number * number, self.calls, os.getpid()

    def close(self) -> None:
        self.lifecycle.put("closed")


def reported(lifecycle: Channel[str]) -> list[str]:
    return lifecycle.get_many(100, timeout=0) if len(lifecycle) else []


def halve(number: int) -> float:
    """Return half of the number; raise for 0 and kill the process for -1."""
    if number == 0:
        raise ZeroDivisionError
    if number == -1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number / 2


def halves() -> tuple[Graph, Callable[[WorkerPool, list[int]], list[float]]]:
    """Return a graph, and a function that runs it in a pool with the given numbers."""
    graph = Graph("halves")
    numbers = graph.input("numbers")
    given = numbers.map(halve, on="process", workers=2, max_deaths=1, name="halve")
    found = given.collect()

    def run(pool: WorkerPool, values: list[int]) -> list[float]:
        with pool.start() as running:
            for value in values:
                running[numbers].put(value)
        return running.wait()[found]

    return graph, run


def pooled_of(pool: WorkerPool) -> dict[str, PooledProcess]:
    """Return the processes of a pool, keyed by the names of their workers."""
    assert pool._pooled is not None
    return {str(id): pooled for id, pooled in list(pool._pooled._known.items())}


def workers_of(pool: WorkerPool) -> dict[str, int]:
    """Return the pids of a pool's processes, keyed by the names of their workers."""
    return {name: pooled.process.pid for name, pooled in pooled_of(pool).items()}


def kill(pool: WorkerPool, name: str) -> None:
    """Kill the process of a worker, and wait until it has ended."""
    process = pooled_of(pool)[name].process
    process.kill()
    wait_until(process.ended)


def ends(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

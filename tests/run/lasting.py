"""What the tests of pools share: a stage that tells of itself, and looks at the processes of a pool."""

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
from flowchan.run.crew.pool_processes import LastingProcess


class Square:
    """Counts its calls, and tells ``life`` of itself."""

    def __init__(self, life: Channel[str]) -> None:
        self.life, self.calls = life, 0
        life.put("built")

    def __call__(self, number: int) -> tuple[int, int, int]:
        self.calls += 1
        return number * number, self.calls, os.getpid()

    def close(self) -> None:
        self.life.put("closed")


def told(life: Channel[str]) -> list[str]:
    return life.get_many(100, timeout=0) if len(life) else []


def halve(number: int) -> float:
    """Fails at 0, and dies at -1."""
    if number == 0:
        raise ZeroDivisionError
    if number == -1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number / 2


def halves() -> tuple[Graph, Callable[[WorkerPool, list[int]], list[float]]]:
    """A graph, and what runs it for these numbers."""
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


def lasting_of(pool: WorkerPool) -> dict[str, LastingProcess]:
    """Those that last, by the names of their workers."""
    assert pool._lasting is not None
    return {str(id): lasting for id, lasting in list(pool._lasting._known.items())}


def workers_of(pool: WorkerPool) -> dict[str, int]:
    """Their pids."""
    return {name: lasting.process.pid for name, lasting in lasting_of(pool).items()}


def kill(pool: WorkerPool, name: str) -> None:
    """Returns once that worker's process is gone."""
    process = lasting_of(pool)[name].process
    process.kill()
    wait_until(process.ended)


def ends(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

"""Stages and helpers for tests of gangs in any placement."""

from __future__ import annotations

import operator
import os
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flowchan import In, Out
from flowchan.collective import Group

T = TypeVar("T")


def in_step(items: In[T], group: Group, out: Out[T]) -> None:
    """Run a gang whose workers synchronise after every item."""
    for item in items:
        group.allreduce_with(1, operator.add)
        out.put(item)
    for _ in group.join(operator.add):
        pass


def few(items: In[Any]) -> None:
    """Run a gang worker that leaves before all items are processed."""
    for place, _ in enumerate(items):
        if place == 5:
            return


def check_each_once(found: list[tuple[int, int, int]]) -> list[int]:
    """Check that no item is missing or repeated. Return how many processes each worker had, sorted.

    Each entry of ``found`` is an item, the worker's number, and its process.
    """
    assert sorted(item for item, *_ in found) == list(range(len(found)))
    processes = defaultdict(set)
    for _, number, pid in found:
        processes[number].add(pid)
    return sorted(map(len, processes.values()))


def kill_worker() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_agent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def once(folder: Path, point: object, deed: Callable[[], Any]) -> None:
    """Call ``deed`` only the first time that a worker reaches this point."""
    try:
        (folder / str(point)).touch(exist_ok=False)
    except FileExistsError:
        return
    deed()

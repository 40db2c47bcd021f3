"""Helpers for tests of runs: gates that block workers, scripts of users, and functions that inspect a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.scripts import run_python as run_python
from support.scripts import script as script
from support.scripts import start as start
from support.waiting import wait_until
from support.worker_latch import Gate as Gate

from flowchan import Graph, In, Out, Run, StageStats

everywhere = pytest.mark.parametrize("on", ["thread", "process"])
"""Parameter for tests that run on both placements."""


def stage_of(run: Run, name: str) -> StageStats:
    """Return the current statistics of one stage."""
    return next(stage for stage in run.stats().stages if stage.name == name)


def waits(run: Run, channel: str, readers: int = 0, writers: int = 0) -> None:
    """Wait until exactly this many workers are waiting at a channel of the run."""

    def reached() -> bool:
        stats = run._ports.channels[channel].stats()
        return (stats.waiting_readers, stats.waiting_writers) == (readers, writers)

    wait_until(reached, what=run.explain)


def feedback(first: Callable[..., Any]) -> Graph:
    """Return a graph with a loop of two stages, each of which waits for items from the other."""

    async def second(numbers: In[int], back: Out[int]) -> None:
        async for number in numbers:
            await back.aput(number)

    graph = Graph("loop")
    back = graph.feedback()
    forward = graph.stage(first, back, name="first")
    back.feed(graph.stage(second, forward, name="second"))
    return graph


def last_calls(text: str) -> list[str]:
    """Return the function names in a stack, with the most recent call last."""
    return [line.rpartition(" in ")[2] for line in text.splitlines() if line.startswith("  File ")]


# --- ways to await several awaitables with asyncio ---


async def one_after_the_other(*waits: Awaitable[Any]) -> None:
    for wait in waits:
        await asyncio.wait_for(wait, None)


async def as_a_group(*waits: Awaitable[Any]) -> None:
    async with asyncio.TaskGroup() as group:
        for wait in waits:
            group.create_task(one_after_the_other(wait))


async def all_of_them(*waits: Awaitable[Any]) -> None:
    await asyncio.wait(map(asyncio.ensure_future, waits))


async def the_first_of_them(*waits: Awaitable[Any]) -> None:
    await asyncio.wait(map(asyncio.ensure_future, waits), return_when=asyncio.FIRST_COMPLETED)


async def shielded(*waits: Awaitable[Any]) -> None:
    await asyncio.gather(*map(asyncio.shield, waits))


async def as_they_come(*waits: Awaitable[Any]) -> None:
    for wait in asyncio.as_completed(waits):
        await wait


together = pytest.mark.parametrize(
    "together",
    [one_after_the_other, as_a_group, all_of_them, the_first_of_them, shielded, as_they_come, asyncio.gather],
)
"""Parameter for tests that run with each function for awaiting several awaitables."""

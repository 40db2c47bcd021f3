"""Test awaiting a run, and iterating over its items with ``async for``."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowchan import Graph, Run, RunError


def test_run_can_be_awaited_while_the_event_loop_runs() -> None:
    async def main() -> Any:
        graph = Graph("awaited")
        numbers: Any = graph.input("numbers")
        total = numbers.reduce(lambda one, other: one + other, 0)
        run = graph.start()
        assert run.state == "running"

        async def fill() -> None:
            for number in range(5):
                await run[numbers].aput(number)
            run[numbers].close()

        results, _ = await asyncio.gather(run, fill())
        assert run.state == "done"
        return results[total], (await run)[total]

    assert asyncio.run(main()) == (10, 10)


def test_awaiting_a_failed_run_raises_its_error() -> None:
    async def main() -> None:
        graph = Graph("awaited")
        graph.source([0]).map(lambda n: 1 // n).sink(abs)
        await graph.start()

    with pytest.raises(RunError):
        asyncio.run(main())


def test_items_arrive_one_by_one_while_the_event_loop_runs() -> None:
    async def main() -> list[int]:
        graph = Graph("iterated")
        numbers: Any = graph.input("numbers")
        doubled = numbers.map(lambda number: 2 * number).collect()
        found = []
        with graph.start() as run:
            await run[numbers].aput(0)
            async for number in run.aiter(doubled):
                found.append(number)
                if len(found) == 5:
                    run[numbers].close()
                else:
                    await run[numbers].aput(len(found))
        return found

    assert asyncio.run(main()) == [0, 2, 4, 6, 8]


def test_wait_returns_at_once_after_an_async_for_ends_early() -> None:
    """The iterator is closed only when the event loop runs again, after the wait."""

    async def main() -> Run:
        graph = Graph("iterated")
        numbers = graph.source(iter(int, 1)).collect()
        run = graph.start()
        async for _ in run.aiter(numbers):
            break
        run.wait(timeout=60)
        return run

    assert asyncio.run(main()).state == "done"


def test_early_end_of_an_async_for_stops_earlier_stages() -> None:
    async def main() -> Run:
        graph = Graph("iterated")
        numbers = graph.source(iter(int, 1)).collect()
        run = graph.start()
        items = run.aiter(numbers)
        async for _ in items:
            break
        await items.aclose()  # type: ignore[attr-defined]
        await run
        return run

    assert asyncio.run(main()).state == "done"

"""Test requests with ``ask()`` to workers on hosts."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Graph, WorkerDied
from flowchan.hosts import local
from flowchan.hosts.hosts_part import HostsPart

Calls: list[Any] = []  # filled in the worker's process


@pytest.mark.parametrize("batch", [False, True])
def test_cancelled_requests_are_dropped_on_hosts(batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()

    def answer(item: Any) -> Any:
        Calls.append(item)
        return gate.wait(item) if item in ("held", ["held"]) else [list(Calls)] if batch else list(Calls)

    cancelled = []
    real = HostsPart.cancel_request

    def cancel_request(self: HostsPart, question: int) -> None:
        real(self, question)
        cancelled.append(question)

    monkeypatch.setattr(HostsPart, "cancel_request", cancel_request)

    async def main() -> Any:
        graph = Graph("asked")
        questions: Any = graph.input("questions")
        stream = questions.batch(1) if batch else questions
        stream.map(answer, on=local(1), name="there").collect()
        with graph.start() as run:
            asks = [asyncio.ensure_future(run.ask(questions, item)) for item in ("held", "late", "gone")]
            await asyncio.to_thread(gate.wait_held)
            asks[2].cancel()
            with pytest.raises(TimeoutError):
                await run.ask(questions, "too late", timeout=0.01)
            await asyncio.to_thread(wait_until, lambda: len(cancelled) == 2)
            (part,) = run._crew.remote
            # until the host has handled the cancellations
            await asyncio.to_thread(wait_until, part.all_reported)
            gate.open()
            last = await run.ask(questions, "last")
            await asyncio.gather(*asks[:2])
            return last

    seen = asyncio.run(main())
    assert [item[0] if batch else item for item in seen] == ["held", "late", "last"]


class Bomb:
    """An item that ends any worker process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (7,)


def test_item_that_kills_a_remote_worker_fails_its_request() -> None:
    async def main() -> None:
        graph = Graph("asked")
        questions: Any = graph.input("questions")
        questions.map(lambda item: item, on=local(1), max_deaths=2).collect()
        with graph.start() as run:
            with pytest.raises(WorkerDied, match="each exited with code 7"):
                await run.ask(questions, Bomb())
            assert await run.ask(questions, 4) == 4

    asyncio.run(main())

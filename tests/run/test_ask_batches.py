"""Test requests for items in a batch that fails or is in several branches."""

from __future__ import annotations

import asyncio
from typing import Any

from runs import stage_of
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Graph, Run


def test_requests_of_a_failed_batch_count_as_failed_once() -> None:
    async def main() -> Run:
        graph = Graph("ask_in_graph")
        sieved, batches = (graph.input(name) for name in ("sieved", "batches"))
        sieved.filter(lambda number: False, name="sieve").collect()
        batches.batch(3).map(fail_all, name="all").collect()
        with graph.start() as run:
            ask_in_graph = [*(run.ask(batches, number) for number in range(3)), run.ask(sieved, 1)]
            await asyncio.gather(*ask_in_graph, return_exceptions=True)
        return run

    run = asyncio.run(main())
    found = [stage_of(run, name) for name in ("sieve", "all")]
    assert [(stage.failed, stage.members_failed) for stage in found] == [(0, 0), (1, 0)]


def fail_all(numbers: list[int]) -> list[int]:
    raise ValueError(numbers)


def test_batch_in_one_branch_is_unchanged_by_another_branch() -> None:
    """One branch drops an item of the batch while a function in the other branch is still using it."""
    first, second = Gate(), Gate()

    def hold(numbers: list[int]) -> list[int]:
        first.wait()
        return numbers

    async def main() -> Run:
        graph = Graph("ask_in_graph")
        questions: Any = graph.input("questions")
        one, other = questions.batch(2).tee(2)
        one.map(hold, name="hold").sink(id)
        other.filter(lambda numbers: second.wait(True), name="held").sink(len, name="end")
        with graph.start() as run:
            ask_in_graph = [asyncio.create_task(run.ask(questions, number)) for number in range(2)]
            for gate in (first, second):
                await asyncio.to_thread(gate.wait_held)
            ask_in_graph[1].cancel()
            await asyncio.gather(ask_in_graph[1], return_exceptions=True)
            second.open()
            await asyncio.to_thread(wait_until, lambda: stage_of(run, "end").items_out == 1)
            first.open()
            await ask_in_graph[0]
        return run

    assert stage_of(asyncio.run(main()), "hold").failed == 0

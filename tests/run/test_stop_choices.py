"""Test R5: the program chooses how long stopping may take, and whether queued items are finished."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from runs import Gate, everywhere, stage_of, waits
from support.waiting import wait_until
from test_item_counts_after_failures import accounts_for_every_item

from flowchan import Graph, Run
from flowchan.run.policy import decisions
from flowchan.run.policy.plan import plan


def same(item: Any) -> Any:
    return item


def in_progress(gate: Gate, on: Any, **options: Any) -> tuple[Graph, Any]:
    """Return a graph and its result. The graph's first stage holds its items until the gate opens."""

    def hold(item: int) -> int:
        gate.wait()
        return item

    graph = Graph("stopped")
    numbers = graph.source(itertools.count, capacity=8, name="numbers")
    return graph, numbers.map(hold, on=on, name="hold", **options).map(same, on=on, name="next").collect()


@everywhere
@pytest.mark.parametrize(
    "options", [{}, {"workers": 3}, {"workers": 3, "ordered": False}], ids=["one", "ordered", "unordered"]
)
def test_stop_without_queued_items_finishes_only_current_items(on: str, options: dict[str, Any]) -> None:
    gate = Gate()
    graph, result = in_progress(gate, on, **options)
    workers = options.get("workers", 1)
    with graph.start() as run:
        gate.wait_held(workers)
        waits(run, "numbers", writers=1)
        run.stop(finish_queued=False)
        wait_until(lambda: run.stats().edges[0].inside == 0 and run.state == "stopping")
        gate.open()
    assert sorted(run.wait()[result]) == list(range(workers))
    assert run.state == "stopped"
    accounts_for_every_item(run)
    assert (stage_of(run, "hold").items_in, stage_of(run, "hold").items_out) == (workers, workers)
    assert run.stats().edges[0].left >= 8 - workers


@everywhere
def test_stop_finishes_queued_items_by_default(on: str) -> None:
    gate = Gate()
    graph, result = in_progress(gate, on)
    with graph.start() as run:
        gate.wait_held()
        waits(run, "numbers", writers=1)
        put = run.stats().edges[0].put
        run.stop()
        wait_until(lambda: run.state == "stopping")
        gate.open()
    assert run.wait()[result] == list(range(put))
    assert sum(edge.left for edge in run.stats().edges) == 0


@everywhere
def test_stop_does_not_discard_a_slow_item(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "STOP_NOTICE_S", 0.05)
    gate = Gate()
    graph, result = in_progress(gate, on)
    with graph.start() as run:
        gate.wait_held()
        run.stop()
        wait_until(lambda: bool(run.stats().warnings))
        assert "is still processing items in " in run.stats().warnings[0]
        assert run.state == "stopping"
        gate.open()
    assert run.wait()[result] == list(range(stage_of(run, "hold").items_in))
    assert run.state == "stopped"


@everywhere
def test_stop_with_a_timeout_aborts_a_run_that_continues(on: str) -> None:
    gate = Gate()
    graph, result = in_progress(gate, on)
    run = graph.start()
    gate.wait_held()
    run.stop()
    run.stop(timeout=0.05)
    wait_until(lambda: run.state == "aborted")
    gate.open()
    assert run.wait().get(result) is None
    accounts_for_every_item(run)


def test_stop_keeps_finished_results_and_failures() -> None:
    gate, begun = Gate(), Gate()

    def half(item: int) -> int:
        if item % 2:
            raise ValueError("odd")
        return item // 2

    def hold(failed: Any) -> int:
        begun.wait()
        gate.wait()
        number: int = failed.item
        return number

    graph = Graph("stopped")
    halves = graph.source(range(20)).map(half)
    even, odd = halves.collect(), halves.errors.map(hold).collect()
    with graph.start() as run:
        begun.wait_held()
        wait_until(lambda: run.stats().edges[0].passed == 20)
        begun.open()
        gate.wait_held()
        run.stop(finish_queued=False)
        wait_until(lambda: run.state == "stopping")
        gate.open()
    results = run.wait()
    assert results[even] == list(range(10))
    assert results[odd] == list(range(1, 20, 2))


def test_stop_keeps_items_that_a_zip_pairs() -> None:
    gate = Gate()
    graph = Graph("stopped")
    left, right = graph.source(range(100), capacity=8).tee(2)
    pairs = (
        left.map(lambda number: gate.wait(number), on="process", capacity=8).zip(right).map(same).collect()
    )
    with graph.start() as run:
        gate.wait_held()
        run.stop(finish_queued=False)
        wait_until(lambda: run.state == "stopping")
        gate.open()
    found = run.wait()[pairs]
    assert found == [(number, number) for number in range(len(found))]
    assert len(found) > 0


def test_queues_to_drop_exclude_results_failures_and_joined_items() -> None:
    graph = Graph("stopped")
    halves = graph.source(range(4), name="numbers").map(same, name="halves")
    halves.errors.sink(same, name="failures")
    merged = graph.merge(halves, graph.source(range(4), name="more"))
    merged.map(same, name="mapped").collect()
    first, second = graph.source(range(4), name="pairs").tee(2)
    first.map(same, name="first").zip(second).map(same, name="paired").sink(same)
    assert plan(graph, 1, 1).queues() == ("numbers", "halves", "more", "merge", "zip", "paired")


def test_caller_of_a_dropped_request_gets_an_error() -> None:
    gate = Gate()

    async def main(run: Run) -> list[Any]:
        calls = [asyncio.ensure_future(run.ask(questions, number)) for number in range(3)]
        await asyncio.to_thread(gate.wait_held)
        while run.stats().edges[0].put < 3:
            await asyncio.sleep(0.001)
        run.stop(finish_queued=False)
        while run.state != "stopping" or run.stats().edges[0].inside:
            await asyncio.sleep(0.001)
        gate.open()
        return await asyncio.gather(*calls, return_exceptions=True)

    graph = Graph("service")
    questions = graph.input("questions")
    questions.map(lambda number: gate.wait(number), on="process").collect()
    with graph.start() as run:
        first, *others = asyncio.run(main(run))
    assert first == 0
    assert [type(error) for error in others] == [RuntimeError, RuntimeError]
    assert "ended without an answer" in str(others[0])


@pytest.mark.parametrize(
    ("options", "error"),
    [({"timeout": 0}, ValueError), ({"timeout": "1"}, TypeError), ({"finish_queued": 1}, TypeError)],
)
def test_wrong_arguments_of_stop_are_rejected(options: dict[str, Any], error: type[Exception]) -> None:
    graph = Graph("stopped")
    graph.input().sink(same)
    with graph.start() as run, pytest.raises(error, match="stop: "):
        run.stop(**options)

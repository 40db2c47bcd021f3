"""Test R14: a run with ``resume=path`` skips the source items that have left the graph in earlier runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from resuming import ITEMS, finished
from runs import Gate, everywhere, stage_of
from support.waiting import wait_until

from flowchan import Failed, Graph, RunError, Stream, Unreadable
from flowchan.run.resume_file import HEADER_BYTES

FAILING = 10


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "progress"


def repeated(number: int) -> list[int]:
    return [number] * (number % 3)


async def repeated_later(number: int) -> AsyncIterator[int]:
    for _ in range(number % 3):
        yield number


async def same_later(number: int) -> int:
    return number


async def source_later() -> AsyncIterator[int]:
    for number in range(ITEMS):
        yield number


def total(numbers: list[int]) -> int:
    return sum(numbers)


PIPELINES: dict[str, Callable[[Stream[int], str], Stream[Any]]] = {
    "map": lambda numbers, on: numbers.map(lambda number: number, on=on),
    "workers": lambda numbers, on: numbers.map(lambda number: number, on=on, workers=3, ordered=False),
    "async map": lambda numbers, on: numbers.map(same_later, on=on, workers=2),
    "filter": lambda numbers, on: numbers.filter(lambda number: number % 2 == 0, on=on),
    "flat_map": lambda numbers, on: numbers.flat_map(repeated, on=on),
    "async flat_map": lambda numbers, on: numbers.flat_map(repeated_later, on=on),
    "batch": lambda numbers, on: numbers.batch(5).map(list, on=on).unbatch(),
    "batch of batches": lambda numbers, on: numbers.batch(2).batch(3).map(list, on=on).unbatch().unbatch(),
    "joined batch": lambda numbers, on: numbers.batch(5).map(total, on=on),
    "batch in parts": lambda numbers, on: numbers.batch(5).map(tuple, on=on).flat_map(list, on=on),
    "tee": lambda numbers, on: numbers.graph.merge(*numbers.tee(2)),
    "tee of batches": lambda numbers, on: numbers.graph.merge(*numbers.batch(3).tee(2)).unbatch(),
    "partition": lambda numbers, on: numbers.graph.merge(*numbers.partition(lambda n: n % 3, 3, on=on)),
}


def outcome(build: Callable[[Stream[int], str], Stream[Any]], on: str, begin: int = 0) -> list[Any]:
    """Return the results of a run without ``resume=`` for the items from ``begin`` onwards."""
    graph = Graph()
    results = build(graph.source(range(begin, ITEMS)), on).collect()
    return sorted(graph.run()[results])


@everywhere
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_r14_run_records_every_item_of_each_operator(pipeline: str, on: str, path: Path) -> None:
    graph = Graph()
    results = PIPELINES[pipeline](graph.source(range(ITEMS)), on).collect()
    assert sorted(graph.run(resume=path)[results]) == outcome(PIPELINES[pipeline], on)
    assert finished(path) == list(range(ITEMS))
    assert graph.run(resume=path)[results] == []


@everywhere
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_r14_resumed_run_processes_only_unfinished_items(pipeline: str, on: str, path: Path) -> None:
    graph = Graph()
    results = PIPELINES[pipeline](graph.source(range(ITEMS)), on).collect()
    graph.run(resume=path)
    with path.open("r+b") as file:  # the first 16 items are finished
        file.truncate(HEADER_BYTES + 2)
    assert sorted(graph.run(resume=path)[results]) == outcome(PIPELINES[pipeline], on, 16)
    assert finished(path) == list(range(ITEMS))


# --- which items are finished ---


@everywhere
def test_r14_item_that_ended_the_run_is_processed_again(on: str, path: Path) -> None:
    fixed = path.with_name("fixed")

    def fails_at_first(number: int) -> None:
        if number == FAILING and not fixed.exists():
            raise ValueError(number)

    graph = Graph()
    graph.source(range(ITEMS), capacity=1).sink(fails_at_first, on=on)
    with pytest.raises(RunError):
        graph.run(resume=path)
    assert finished(path) == list(range(FAILING))
    fixed.touch()
    graph.run(resume=path)
    assert finished(path) == list(range(ITEMS))


def fails_for_odd(number: int) -> int:
    if number % 2:
        raise ValueError(number)
    return number


def fails_after_parts(number: int) -> Iterator[int]:
    yield from range(number % 3)
    raise ValueError(number)


async def fails_after_parts_later(number: int) -> AsyncIterator[int]:
    for part in range(number % 3):
        yield part
    raise ValueError(number)


def fails_for_members(numbers: list[int]) -> list[Any]:
    return [ValueError(number) if number % 2 else number for number in numbers]


FAILURES: dict[str, Callable[[Stream[int], str], Any]] = {
    "map": lambda numbers, on: numbers.map(fails_for_odd, on=on, retries=1),
    "filter": lambda numbers, on: numbers.filter(fails_for_odd, on=on),
    "members": lambda numbers, on: numbers.batch(4).map(fails_for_members, on=on),
    "batch": lambda numbers, on: numbers.batch(4).map(lambda numbers: fails_for_odd(numbers[0] + 1), on=on),
    "flat_map": lambda numbers, on: numbers.flat_map(fails_after_parts, retries=1),
    "async flat_map": lambda numbers, on: numbers.flat_map(fails_after_parts_later, retries=1),
}


@everywhere
@pytest.mark.parametrize("failure", FAILURES)
def test_r14_failed_items_are_finished_when_their_errors_are_handled(
    failure: str, on: str, path: Path
) -> None:
    graph = Graph()
    stream = FAILURES[failure](graph.source(range(ITEMS)), on)
    handled, kept = stream.errors.collect(), stream.collect()
    results = graph.run(resume=path)
    assert all(type(one) is Failed for one in results[handled])
    assert results[handled]
    assert all(type(one) in (int, list) for one in results[kept])
    assert finished(path) == list(range(ITEMS))


def test_r14_failed_item_is_unfinished_until_its_error_is_handled(path: Path) -> None:
    def refuse(failed: Failed[int]) -> None:
        raise failed.error

    graph = Graph()
    stream = graph.source([0, 2, 3], capacity=1).flat_map(fails_after_parts, capacity=1)
    stream.errors.sink(refuse)
    stream.sink(lambda _: None)
    with pytest.raises(RunError):
        graph.run(resume=path)
    assert finished(path, 3) == []


def test_r14_parts_of_a_failed_item_keep_it_unfinished(path: Path) -> None:
    handled = threading.Event()

    def refuse(_: int) -> None:
        assert handled.wait(60)
        raise ValueError

    graph = Graph()
    stream = graph.source([1, 3]).flat_map(fails_after_parts)
    errors = stream.errors
    errors.map(lambda failed: failed.item).filter(lambda item: item == 3).sink(lambda _: handled.set())
    stream.sink(refuse)
    with pytest.raises(RunError):
        graph.run(resume=path)
    assert finished(path, 2) == [1]


def test_r14_failed_member_is_unfinished_until_its_error_is_handled(path: Path) -> None:
    processed = threading.Event()

    def refuse(_: Failed[int]) -> None:
        assert processed.wait(60)
        raise ValueError

    graph = Graph()
    batches = graph.source(range(3)).batch(2).map(fails_for_members)
    batches.errors.sink(refuse)
    batches.sink(lambda numbers: processed.set() if numbers == [2] else None)
    with pytest.raises(RunError):
        graph.run(resume=path)
    assert finished(path, 3)[0] == 0
    assert 1 not in finished(path, 3)


def test_r14_item_that_fails_in_flat_map_process_stays_unfinished(path: Path) -> None:
    graph = Graph()
    stream = graph.source(range(3)).flat_map(fails_after_parts, on="process")
    handled, _ = stream.errors.collect(), stream.collect()
    for _ in range(2):
        assert sorted(one.item for one in graph.run(resume=path)[handled]) == [0, 1, 2]
    assert finished(path, 3) == []


def test_r14_item_that_cannot_be_unpickled_stays_unfinished(path: Path) -> None:
    class Wrong:
        def __reduce__(self) -> tuple[Any, ...]:
            return int, ("x",)

    graph = Graph()
    shown = graph.source([Wrong(), 1]).map(str, on="process")
    failed, kept = shown.errors.collect(), shown.collect()
    results = graph.run(resume=path)
    assert [type(one.item) for one in results[failed]] == [Unreadable]
    assert results[kept] == ["1"]
    assert finished(path, 2) == [1]


def test_r14_iter_finishes_an_item_when_taking_the_next(path: Path) -> None:
    graph = Graph()
    numbers = graph.source(range(ITEMS)).collect()
    with graph.start(resume=path) as run:
        for number in run.iter(numbers):
            assert finished(path) == list(range(number))
    assert finished(path) == list(range(ITEMS))


def test_r14_aiter_finishes_an_item_when_taking_the_next(path: Path) -> None:
    graph = Graph()
    numbers = graph.source(range(ITEMS)).collect()

    async def follow() -> None:
        with graph.start(resume=path) as run:
            async for number in run.aiter(numbers):
                assert finished(path) == list(range(number))

    asyncio.run(follow())
    assert finished(path) == list(range(ITEMS))


def test_r14_loop_left_early_does_not_finish_its_last_item(path: Path) -> None:
    graph = Graph()
    numbers = graph.source(range(ITEMS)).collect()
    with graph.start(resume=path) as run:
        for number in run.iter(numbers):
            if number == FAILING:
                break
    assert finished(path) == list(range(FAILING))
    assert graph.run(resume=path)[numbers] == list(range(FAILING, ITEMS))


def test_r14_loop_finishes_the_items_gathered_before_it(path: Path) -> None:
    graph = Graph()
    numbers = graph.source(range(ITEMS), capacity=1).collect()
    with graph.start(resume=path) as run:
        run._supervisor.take_in(frozenset(worker.id for worker in run._plan.workers if worker.gathers))
        run._gathering._gathered[numbers.stage].thread.join()
        assert finished(path) == []
        for number in run.iter(numbers):
            assert finished(path) == list(range(number))
    assert finished(path) == list(range(ITEMS))


def test_r14_gathered_items_without_a_loop_are_results(path: Path) -> None:
    graph = Graph()
    numbers = graph.source(range(ITEMS), capacity=1).collect()
    with graph.start(resume=path) as run:
        run._supervisor.take_in(frozenset(worker.id for worker in run._plan.workers if worker.gathers))
        run._gathering._gathered[numbers.stage].thread.join()
    assert run.wait()[numbers] == list(range(ITEMS))
    assert finished(path) == list(range(ITEMS))


def test_r14_run_after_a_stopped_run_processes_the_other_items(path: Path) -> None:
    graph = Graph()
    processed: list[int] = []
    reached = threading.Event()

    def process(number: int) -> None:
        processed.append(number)
        if number == FAILING:
            reached.set()

    graph.source(range(10_000), capacity=1).sink(process)
    run = graph.start(resume=path)
    assert reached.wait(60)
    run.stop()
    run.wait()
    graph.run(resume=path)
    assert processed == list(range(10_000))


# --- sources and workers ---


@pytest.mark.parametrize("restartable", [False, True])
@pytest.mark.parametrize("items", [(range, ITEMS), (source_later,)], ids=["function", "async generator"])
@everywhere
def test_r14_each_kind_of_source_skips_finished_items(
    items: tuple[Any, ...], restartable: bool, on: str, path: Path
) -> None:
    graph = Graph()
    numbers = graph.source(*items, on=on, restartable=restartable).collect()
    assert graph.run(resume=path)[numbers] == list(range(ITEMS))
    with path.open("r+b") as file:
        file.truncate(HEADER_BYTES + 2)
    assert graph.run(resume=path)[numbers] == list(range(16, ITEMS))


def test_r14_each_of_several_sources_skips_its_own_items(path: Path) -> None:
    def run(length: int) -> list[Any]:
        graph = Graph()
        numbers, letters = graph.source(range(3)), graph.source("abcdefgh"[:length])
        merged = graph.merge(numbers, letters).collect()
        return sorted(map(str, graph.run(resume=path)[merged]))

    assert run(5) == ["0", "1", "2", "a", "b", "c", "d", "e"]
    assert run(8) == ["f", "g", "h"]


def test_r14_killed_workers_leave_no_item_unfinished(path: Path) -> None:
    deaths = path.with_name("deaths")
    deaths.mkdir()

    def die_once(number: int) -> Iterator[int]:
        yield number
        with contextlib.suppress(FileExistsError):
            (deaths / str(number)).mkdir()
            os.kill(os.getpid(), signal.SIGKILL)
        yield number

    graph = Graph()
    pairs = graph.source(range(5)).flat_map(die_once, on="process", workers=2, restarts=100)
    numbers = pairs.map(int, on="process").collect()
    assert sorted(graph.run(resume=path)[numbers]) == sorted([*range(5), *range(5)])
    assert finished(path, 5) == list(range(5))


def test_r14_only_the_deadly_member_of_a_batch_fails(path: Path) -> None:
    def deadly(numbers: list[int]) -> list[int]:
        if FAILING in numbers:
            os.kill(os.getpid(), signal.SIGKILL)
        return numbers

    graph = Graph()
    mapped = graph.source(range(ITEMS)).batch(8).map(deadly, on="process")
    failed, lists = mapped.errors.collect(), mapped.unbatch().collect()
    results = graph.run(resume=path)
    assert [one.item for one in results[failed]] == [FAILING]
    assert sorted(results[lists]) == [number for number in range(ITEMS) if number != FAILING]
    assert finished(path) == list(range(ITEMS))


@everywhere
def test_r14_added_workers_track_their_items(on: str, path: Path) -> None:
    graph = Graph()
    gate = Gate()
    numbers = graph.source(range(ITEMS)).map(gate.wait, name="wait", on=on).collect()
    with graph.start(resume=path) as run:
        run.scale("wait", 3)
        wait_until(lambda: stage_of(run, "wait").alive == 3, what=run.report)
        gate.open()
        assert run.wait()[numbers] == list(range(ITEMS))
    assert finished(path) == list(range(ITEMS))


def test_r14_pool_runs_can_be_resumed(path: Path) -> None:
    graph = Graph()
    numbers = graph.source(range(ITEMS), on="process").map(int, on="process").collect()
    with graph.pool() as pool:
        assert pool.run()[numbers] == list(range(ITEMS))
        assert pool.run(resume=path)[numbers] == list(range(ITEMS))
        assert pool.run(resume=path)[numbers] == []
        assert pool.run()[numbers] == list(range(ITEMS))

"""Test R14: a run with ``resume=path`` skips the source items that have left the graph in earlier runs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Gate, everywhere, script, stage_of, start
from support.waiting import wait_until

from flowchan import Failed, Graph, GraphError, Run, RunError, Stream, Unreadable
from flowchan.run.policy.lineage import FinishedItems
from flowchan.run.resume_file import HEADER_BYTES, PAGE_BYTES

ITEMS = 24
FAILING = 10
SECONDS = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "progress"


def finished(path: Path, items: int = ITEMS) -> list[int]:
    """Return the numbers of the finished items of a graph with one source."""
    done = FinishedItems(bits=path.read_bytes()[HEADER_BYTES:])
    return [number for number in range(items) if done.is_finished(number)]


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
    """Return what a run without ``resume=`` yields for the items from ``begin`` on."""
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


def test_r14_left_loop_does_not_finish_its_last_item(path: Path) -> None:
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

    def stop(number: int) -> None:
        processed.append(number)
        if number == FAILING:
            runs[0].stop()

    graph.source(range(1000), capacity=1).sink(stop)
    runs: list[Run] = []
    started = threading.Event()

    def begin() -> Run:
        run = graph.start(resume=path)
        runs.insert(0, run)
        started.set()
        return run

    begin().wait()
    assert len(processed) < 1000
    begin().wait()
    assert processed == list(range(1000))


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


# --- the file ---


def squares(items: int = ITEMS) -> tuple[Graph, Stream[list[int]]]:
    graph = Graph("squares")
    return graph, graph.source(range(items)).map(lambda number: number**2, name="square").collect()


def test_r14_every_prefix_of_the_file_is_valid(path: Path) -> None:
    graph, results = squares()
    graph.run(resume=path)
    whole = path.read_bytes()
    for length in (*range(HEADER_BYTES + 5), PAGE_BYTES - 1):
        path.write_bytes(whole[:length])
        done = set(finished(path))
        assert graph.run(resume=path)[results] == [n**2 for n in range(ITEMS) if n not in done]
        assert path.read_bytes() == whole


def test_r14_any_subset_of_the_bits_is_valid(path: Path) -> None:
    graph, results = squares()
    graph.run(resume=path)
    whole = path.read_bytes()
    for lost in range(HEADER_BYTES, HEADER_BYTES + 3):
        path.write_bytes(whole[:lost] + b"\x5a" + whole[lost + 1 :])
        done = set(finished(path))
        assert graph.run(resume=path)[results] == [n**2 for n in range(ITEMS) if n not in done]
        assert path.read_bytes() == whole


def test_r14_file_needs_one_bit_per_item(path: Path) -> None:
    graph, _ = squares(80_000)
    graph.run(resume=path)
    assert path.stat().st_size == -(-(HEADER_BYTES + 10_000) // PAGE_BYTES) * PAGE_BYTES


def test_r14_file_with_other_contents_is_refused_and_kept(path: Path) -> None:
    path.write_text("name,age\n")
    with pytest.raises(GraphError, match=r"'.*/progress' is not a resume file; resume from another path"):
        squares()[0].run(resume=path)
    assert path.read_text() == "name,age\n"


def test_r14_path_that_cannot_be_opened_is_refused(path: Path) -> None:
    with pytest.raises(GraphError, match=r"'.*/inner' could not be used: .*No such file or directory"):
        squares()[0].run(resume=path / "inner")


@pytest.mark.parametrize("path", [1, b"bytes", True])
def test_r14_resume_must_be_a_path(path: Any) -> None:
    with pytest.raises(TypeError, match="run: resume must be a path or None, got"):
        squares()[0].run(resume=path)


def test_r14_file_of_another_graph_is_refused(path: Path) -> None:
    squares()[0].run(resume=path)
    graph = Graph("squares")
    graph.source(range(ITEMS)).map(lambda number: number**2, name="power").collect()
    with pytest.raises(GraphError, match="belongs to a graph with other stage names, operators or streams"):
        graph.run(resume=path)


def test_r14_changed_settings_do_not_change_the_graph(path: Path) -> None:
    squares()[0].run(resume=path)
    graph = Graph("renamed")
    source = graph.source(range(ITEMS + 1), capacity=3)
    results = source.map(lambda number: -number, name="square", workers=3, on="process").collect()
    assert graph.run(resume=path)[results] == [-ITEMS]


def test_r14_shorter_source_is_refused_by_name(path: Path) -> None:
    squares()[0].run(resume=path)
    with pytest.raises(GraphError, match=r"'source': the source must have at least the 24 items .*, got 23"):
        squares(ITEMS - 1)[0].run(resume=path)


def test_r14_longer_source_continues_with_its_new_items(path: Path) -> None:
    squares()[0].run(resume=path)
    graph, results = squares(ITEMS + 2)
    assert graph.run(resume=path)[results] == [ITEMS**2, (ITEMS + 1) ** 2]


def test_r14_path_of_an_active_run_is_refused(path: Path) -> None:
    graph, results = squares()
    with graph.start(resume=path) as run:
        with pytest.raises(
            GraphError, match=r"'.*/progress' is used by another run; wait until it has ended"
        ):
            squares()[0].run(resume=path)
        assert run.wait()[results] == [n**2 for n in range(ITEMS)]


def test_r14_path_of_a_run_in_another_program_is_refused(path: Path, tmp_path: Path) -> None:
    program = script(
        tmp_path,
        """
        import sys
        from flowchan import Graph

        graph = Graph("squares")
        graph.source(range(24)).map(lambda number: number**2, name="square").collect()
        graph.run(resume=sys.argv[1])
        """,
    )
    graph, _ = squares()
    with graph.start(resume=path), start(program, str(path)) as process:
        _, err = process.communicate(timeout=SECONDS)
    assert "is used by another run" in err
    with start(program, str(path)) as process:
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err


def test_r14_failed_start_releases_the_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = squares()
    with monkeypatch.context() as patched:
        patched.setattr(Graph, "_begin", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            graph.run(resume=path)
    graph.run(resume=path)


def test_r14_failed_run_releases_the_path(path: Path) -> None:
    graph = Graph()
    graph.source([1]).sink(fails_for_odd)
    with pytest.raises(RunError):
        graph.run(resume=path)
    with pytest.raises(RunError):
        graph.run(resume=path)


@everywhere
def test_r14_run_fails_if_the_file_cannot_be_written(
    on: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph()
    graph.source(range(8 * PAGE_BYTES)).sink(int, on=on)

    def is_full(file: int, start: int, length: int) -> None:
        if length > PAGE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", is_full)
        with pytest.raises(RunError) as raised:
            graph.run(resume=path)
    (error,) = raised.value.exceptions
    assert re.search(r"'source' could not be recorded in resume='.*': .*No space left", str(error))


# --- what is refused ---

REFUSED: dict[str, tuple[Callable[[Graph], Any], str]] = {
    "input": (lambda graph: graph.input().sink(int), r"'input': .*an input, .*; use source\(\)"),
    "take": (lambda graph: graph.source([1]).take(1).sink(int), r"'take': .*a take, .*another graph"),
    "zip": (
        lambda graph: graph.source([1]).zip(graph.source([1])).sink(print),
        r"'zip': .*a zip, .*another graph",
    ),
    "reduce": (lambda graph: graph.source([1]).reduce(max), r"'max': .*a reduce, .*save the items"),
    "collect": (
        lambda graph: graph.source([1]).collect(name="all").sink(len),
        r"'all': .*a collect that another stage reads",
    ),
    "allreduce": (
        lambda graph: graph.source([1]).allreduce().sink(print),
        r"'allreduce': .*a allreduce, .*another graph",
    ),
}


@pytest.mark.parametrize("stage", REFUSED)
def test_r14_stage_that_loses_the_origin_of_items_is_refused(stage: str, path: Path) -> None:
    graph = Graph()
    declare, message = REFUSED[stage]
    declare(graph)
    with pytest.raises(GraphError, match=message) as refused:
        graph.run(resume=path)
    assert [problem.rule for problem in refused.value.problems] == ["resume"]
    assert not path.exists()


def test_r14_run_without_resume_has_plain_items() -> None:
    graph = Graph()
    numbers = graph.source([1], capacity=1).map(int, name="number", capacity=1)
    numbers.collect()
    with graph.start() as run:
        assert run._plan.finished is None
        assert all(ports.finished is None for ports in run._ports.ports.values())

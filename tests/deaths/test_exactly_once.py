"""Test C11 and R4: when SIGKILL ends workers at a chosen point, no item is lost, repeated or reordered."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from kill_points import Deaths, stage_of
from support.waiting import wait_until

from flowchan import Channel, Graph, Run, RunError, WorkerDied
from flowchan.run.crew.process import WorkerProcess

ITEMS = 60
PLACEMENTS = [0, 7, 8, ITEMS - 1]
"""Items during which a worker is killed: the first, two consecutive ones, and the last."""

anyhow = pytest.mark.parametrize(("workers", "ordered"), [(1, True), (3, True), (3, False)])


def ended(graph: Graph) -> tuple[Run, Any]:
    """Run a graph to its end, and return the run and its results."""
    run = graph.start()
    return run, run.wait()


def same(found: list[Any], expected: list[Any], ordered: bool) -> bool:
    return found == expected if ordered else Counter(found) == Counter(expected)


@anyhow
@pytest.mark.parametrize("payload", [0, 100_000])
def test_c11_killed_map_loses_and_repeats_nothing(workers: int, ordered: bool, payload: int) -> None:
    deaths = Deaths(*PLACEMENTS)

    def work(item: int) -> tuple[int, bytes]:
        deaths.at(item)
        return item, bytes(payload)

    graph = Graph("c11")
    numbers = graph.source(range(ITEMS), capacity=4)
    out = numbers.map(work, on="process", workers=workers, ordered=ordered, capacity=4, name="work").collect()
    run, results = ended(graph)
    assert same(results[out], [(item, bytes(payload)) for item in range(ITEMS)], ordered)
    assert stage_of(run, "work").restarts == deaths.total


@anyhow
@pytest.mark.parametrize("payload", [0, 100_000])
def test_c11_flat_map_killed_between_outputs_repeats_nothing(
    workers: int, ordered: bool, payload: int
) -> None:
    deaths = Deaths((0, 0), (7, 1), (8, 2), (20, 3), (30, 0), (30, 1), (ITEMS - 1, 3))

    def work(item: int) -> Iterator[tuple[int, int, bytes]]:
        for number in range(3):
            deaths.at((item, number))
            yield item, number, bytes(payload)
        deaths.at((item, 3))

    graph = Graph("c11")
    numbers = graph.source(range(ITEMS), capacity=4)
    out = numbers.flat_map(
        work, on="process", workers=workers, ordered=ordered, capacity=4, name="work"
    ).collect()
    run, results = ended(graph)
    expected = [(item, number, bytes(payload)) for item in range(ITEMS) for number in range(3)]
    assert same(results[out], expected, ordered)
    assert stage_of(run, "work").restarts == deaths.total


@anyhow
def test_c11_killed_filter_loses_and_repeats_nothing(workers: int, ordered: bool) -> None:
    deaths = Deaths(*PLACEMENTS)

    def odd(item: int) -> bool:
        deaths.at(item)
        return item % 2 == 1

    graph = Graph("c11")
    numbers = graph.source(range(ITEMS), capacity=4)
    out = numbers.filter(
        odd, on="process", workers=workers, ordered=ordered, capacity=4, name="work"
    ).collect()
    run, results = ended(graph)
    assert same(results[out], list(range(1, ITEMS, 2)), ordered)
    assert stage_of(run, "work").restarts == deaths.total


@pytest.mark.parametrize("workers", [1, 3])
def test_c11_killed_partition_loses_and_repeats_nothing(workers: int) -> None:
    deaths = Deaths(*PLACEMENTS)

    def key(item: int) -> int:
        deaths.at(item)
        return item

    graph = Graph("c11")
    numbers = graph.source(range(ITEMS), capacity=4)
    branches = numbers.partition(key, 3, on="process", workers=workers, capacity=4, name="work")
    outs = [branch.collect() for branch in branches]
    run, results = ended(graph)
    for number, out in enumerate(outs):
        assert same(results[out], list(range(number, ITEMS, 3)), workers == 1)
    assert stage_of(run, "work").restarts == deaths.total


@pytest.mark.parametrize("workers", [1, 3])
def test_r4_killed_sink_repeats_only_its_current_item(workers: int) -> None:
    deaths = Deaths(*PLACEMENTS)
    done: Channel[int] = Channel(4 * ITEMS, across="processes")

    def work(item: int) -> None:
        done.put(item)
        deaths.at(item)

    graph = Graph("c11")
    graph.source(range(ITEMS), capacity=4).sink(work, on="process", workers=workers, name="work")
    run, _ = ended(graph)
    done.close()
    assert Counter(done) == Counter([*range(ITEMS), *PLACEMENTS])
    assert stage_of(run, "work").restarts == deaths.total


@pytest.mark.parametrize("payload", [0, 100_000])
def test_c11_restarted_source_continues_after_its_last_output(payload: int) -> None:
    deaths = Deaths(0, 1, 30, ITEMS)

    def numbers() -> Iterator[tuple[int, bytes]]:
        for item in range(ITEMS):
            deaths.at(item)
            yield item, bytes(payload)
        deaths.at(ITEMS)

    graph = Graph("c11")
    out = graph.source(numbers, on="process", restartable=True, capacity=4, name="numbers").collect()
    run, results = ended(graph)
    assert results[out] == [(item, bytes(payload)) for item in range(ITEMS)]
    assert stage_of(run, "numbers").restarts == deaths.total


@anyhow
def test_c11_kills_in_every_stage_lose_and_repeat_nothing(workers: int, ordered: bool) -> None:
    all_deaths = [Deaths(*PLACEMENTS) for _ in range(4)]

    def numbers() -> Iterator[int]:
        for item in range(ITEMS):
            all_deaths[0].at(item)
            yield item

    def double(item: int) -> int:
        all_deaths[1].at(item)
        return 2 * item

    def twice(item: int) -> Iterator[tuple[int, int]]:
        yield item, 0
        all_deaths[2].at(item // 2)
        yield item, 1

    def first_or_odd(item: tuple[int, int]) -> bool:
        if item[1] == 1:
            all_deaths[3].at(item[0] // 2)
        return item[0] % 4 == 2 or item[1] == 0

    graph = Graph("c11")
    options: Any = {"on": "process", "workers": workers, "ordered": ordered, "capacity": 3}
    source = graph.source(numbers, on="process", restartable=True, capacity=2, name="numbers")
    out = source.map(double, **options).flat_map(twice, **options).filter(first_or_odd, **options).collect()
    run, results = ended(graph)
    expected = [(2 * item, n) for item in range(ITEMS) for n in range(2) if item % 2 == 1 or n == 0]
    assert same(results[out], expected, ordered)
    restarts = [stage_of(run, name).restarts for name in ("numbers", "double", "twice", "first_or_odd")]
    assert restarts == [deaths.total for deaths in all_deaths]


@pytest.mark.parametrize("workers", [2, 3])
def test_c11_allreduce_uses_each_output_in_exactly_one_round(workers: int) -> None:
    """Only the replacement gets the dead worker's item, because no channel has all of its outputs."""
    deaths = Deaths((0, 0), (7, 1), (8, 2), (20, 3), (30, 0), (30, 1), (ITEMS - 1, 3))

    def work(item: int) -> Iterator[str]:
        for number in range(3):
            deaths.at((item, number))
            yield f"{item}.{number} "
        deaths.at((item, 3))

    graph = Graph("c11")
    numbers = graph.source(range(ITEMS), capacity=4)
    worked = numbers.flat_map(work, on="process", workers=workers, capacity=4, name="work")
    out = worked.allreduce("sum", capacity=1).collect()
    run, results = ended(graph)
    given = [output for one in results[out] for output in one.value.split()]
    assert Counter(given) == Counter(f"{item}.{number}" for item in range(ITEMS) for number in range(3))
    assert [one.round for one in results[out]] == list(range(len(results[out])))
    assert stage_of(run, "work").restarts == deaths.total


def test_c11_allreduce_worker_killed_between_outputs_repeats_nothing() -> None:
    """The worker dies in flowchan's code, so its item is not suspect, but only the replacement gets it."""
    graph = Graph("c11")
    worked = graph.source(range(20), capacity=1).flat_map(
        lambda item: [f"{item}.{number} " for number in range(5)],
        on="process", workers=2, capacity=2, max_deaths=9, name="work",
    )  # fmt: skip
    out = worked.allreduce("sum", capacity=1).collect()
    with graph.start() as run:
        channels = [run._ports.channels[name] for name in ("work 1", "work 2")]
        for _ in range(3):
            wait_until(lambda: all(channel.stats().waiting_writers == 1 for channel in channels))
            kill_one(run, "work")
        found = run.wait()[out]
    given = [output for one in found for output in one.value.split()]
    assert Counter(given) == Counter(f"{item}.{number}" for item in range(20) for number in range(5))


def test_c11_failed_items_reach_the_errors_stream_once() -> None:
    deaths = Deaths(*PLACEMENTS)

    def work(item: int) -> int:
        if item % 2:
            raise ValueError(str(item))
        deaths.at(item)
        return item

    def reported(failed: Any) -> Any:
        deaths.at(failed.item)
        return failed.item

    graph = Graph("c11")
    worked = graph.source(range(ITEMS), capacity=4).map(work, on="process", workers=2, capacity=4)
    out = worked.collect()
    failed = worked.errors.map(reported, on="process").collect()
    results = graph.run()
    assert results[out] == list(range(0, ITEMS, 2))
    assert sorted(results[failed]) == list(range(1, ITEMS, 2))


@anyhow
def test_r4_only_the_poison_item_is_blamed(workers: int, ordered: bool) -> None:
    poison = {5, 30}

    def work(item: int) -> int:
        if item in poison:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    graph = Graph("poison")
    numbers = graph.source(range(ITEMS), capacity=4)
    worked = numbers.map(
        work, on="process", workers=workers, ordered=ordered, capacity=4, max_deaths=2, name="work"
    )
    out, failed = worked.collect(), worked.errors.collect()
    run, results = ended(graph)
    assert same(results[out], [item for item in range(ITEMS) if item not in poison], ordered)
    assert sorted(failure.item for failure in results[failed]) == sorted(poison)
    for failure in results[failed]:
        assert failure.attempts == 2
        assert isinstance(failure.error, WorkerDied)
    assert stage_of(run, "work").restarts == 2 * len(poison)


def test_r4_poison_item_keeps_its_earlier_outputs() -> None:
    def work(item: int) -> Iterator[tuple[int, int]]:
        yield item, 0
        if item == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        yield item, 1

    graph = Graph("poison")
    worked = graph.source(range(9), capacity=2).flat_map(
        work, on="process", workers=2, capacity=4, max_deaths=2
    )
    out, failed = worked.collect(), worked.errors.collect()
    results = graph.run()
    assert results[out] == [
        (item, number) for item in range(9) for number in range(2) if (item, number) != (5, 1)
    ]
    assert [failure.item for failure in results[failed]] == [5]


def test_r4_poison_item_ends_the_run_if_errors_are_unread() -> None:
    def work(item: int) -> int:
        if item == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    graph = Graph("poison")
    graph.source(range(9)).map(work, on="process", max_deaths=2, name="work").sink(id)
    with pytest.raises(RunError) as caught:
        graph.run()
    (error,) = caught.value.exceptions
    assert (error.stage, error.item) == ("work", "5")
    assert "2 workers died one after another while processing this item" in str(error)


def test_r4_restart_limit_ends_the_run_with_the_reason() -> None:
    graph = Graph("limit")
    graph.input().map(abs, on="process", restarts=3, name="work").sink(id)
    run = graph.start()
    channel = run._ports.channels["input"]
    for _ in range(3):
        wait_until(lambda: channel.stats().waiting_readers == 1)
        kill_one(run, "work")
    wait_until(lambda: stage_of(run, "work").pids and channel.stats().waiting_readers == 1)
    os.kill(stage_of(run, "work").pids[0], signal.SIGKILL)
    with pytest.raises(RunError) as caught:
        run.wait()
    (error,) = caught.value.exceptions
    assert error.stage == "work"
    assert "killed by SIGKILL" in str(error)
    assert "3 of 3 restarts were used in 60 s" in str(error)
    assert stage_of(run, "work").restarts == 3
    assert "has used 2 of 3 restarts in 60 s" in run.report()


def test_r4_deaths_while_processing_items_do_not_count_as_restarts() -> None:
    deaths = Deaths(*range(9))

    def work(item: int) -> int:
        deaths.at(item)
        return item

    graph = Graph("limit")
    out = graph.source(range(9)).map(work, on="process", restarts=3, name="work").collect()
    run, results = ended(graph)
    assert results[out] == list(range(9))
    assert stage_of(run, "work").restarts == deaths.total == 9
    assert run.stats().warnings == ()


def kill_one(run: Run, name: str) -> None:
    """Kill the first worker of a stage as soon as its process exists, and wait until the run notices this."""

    def running() -> list[WorkerProcess]:
        with contextlib.suppress(RuntimeError, ValueError):  # a worker is being replaced
            processes = run._crew.local.processes.items()
            return [p for id, p in processes if (id.stage, id.number) == (name, 1) and not p.ended()]
        return []

    wait_until(lambda: bool(running()))
    before = stage_of(run, name).restarts
    running()[0].kill()
    wait_until(lambda: stage_of(run, name).restarts == before + 1)


def test_c11_worker_killed_while_waiting_for_an_item_loses_nothing() -> None:
    graph = Graph("c11")
    numbers = graph.input()
    out = numbers.map(abs, on="process", name="work").collect()
    with graph.start() as run:
        channel = run._ports.channels["input"]
        for item in range(3):
            wait_until(lambda: channel.stats().waiting_readers == 1)
            kill_one(run, "work")
            run[numbers].put(item)
        run[numbers].close()
        assert run.wait()[out] == [0, 1, 2]


def test_c11_worker_killed_while_waiting_for_room_loses_nothing() -> None:
    graph = Graph("c11")
    numbers = graph.source(range(20))
    out = numbers.map(abs, on="process", workers=2, capacity=2, max_deaths=9, name="work").collect()
    with graph.start() as run:
        channel = run._ports.channels["work"]
        for _ in range(3):
            wait_until(lambda: channel.stats().waiting_writers == 2)
            kill_one(run, "work")
        assert run.wait()[out] == list(range(20))


def test_r4_idle_worker_may_use_all_its_restarts() -> None:
    """Many deaths without a leased item do not mean that the worker cannot start."""
    graph = Graph("idle")
    numbers = graph.input()
    out = numbers.map(abs, on="process", name="work").collect()
    with graph.start() as run:
        channel = run._ports.channels["input"]
        for _ in range(5):
            wait_until(lambda: channel.stats().waiting_readers == 1)
            kill_one(run, "work")
        run[numbers].put(-1)
        run[numbers].close()
        assert run.wait()[out] == [1]


def test_counter_that_restarts_in_a_replacement_is_reported() -> None:
    class Count:
        def __init__(self) -> None:
            self.seen = 0

        def __call__(self, item: int) -> int:
            deaths.at(item)
            self.seen += 1
            return self.seen

    deaths = Deaths(50)
    graph = Graph("counted")
    counted = graph.source(range(100)).map(Count, on="process", name="work").collect()
    run, results = ended(graph)
    assert results[counted] == [*range(1, 51), *range(1, 51)]
    (warning,) = run.stats().warnings
    assert warning.startswith("worker work 1 was replaced and has a new Count; the state of")
    assert f"warning: {warning}" in run.report().splitlines()

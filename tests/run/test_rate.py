"""Test ``rate=``: the starts of a stage's items are evenly spaced over all of its workers.

A start may be late but never early, so the tests check only the earliest time of each start. Start number n,
counted from 0, comes at least n intervals after the run began.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from runs import stage_of
from support.waiting import wait_until

from flowchan import Broken, Graph
from flowchan.run.worker.pace import Pace, SharedPace

RATE = 50
ITEMS = 8


def now(_: Any) -> float:
    return time.monotonic()


async def now_later(_: Any) -> float:
    await asyncio.sleep(0)
    return time.monotonic()


def assert_spaced(starts: list[float], began: float, rate: float = RATE) -> None:
    for number, start in enumerate(sorted(starts)):
        assert start >= began + number / rate, f"start {number} of {len(starts)} is too early"


@pytest.mark.parametrize("on", ["thread", "process"])
@pytest.mark.parametrize("function", [now, now_later], ids=["function", "coroutine"])
def test_item_starts_of_all_workers_are_evenly_spaced(function: Any, on: Any) -> None:
    graph = Graph("limited")
    starts = graph.source(range(ITEMS)).map(function, on=on, workers=3, rate=RATE).collect()
    began = time.monotonic()
    found = graph.run()[starts]
    assert len(found) == ITEMS
    assert_spaced(found, began)


@pytest.mark.usefixtures("_method")
def test_worker_processes_share_the_rate_under_each_start_method() -> None:
    graph = Graph("limited")
    starts = graph.source(range(ITEMS)).map(now, on="process", workers=2, rate=RATE).collect()
    began = time.monotonic()
    assert_spaced(graph.run()[starts], began)


def test_idle_time_does_not_allow_a_later_burst() -> None:
    pace = Pace(10.0)
    first = pace.take_start()
    pace._next = first - 1000.0  # as after a long time without an item
    second = pace.take_start()
    assert second >= first
    assert pace.take_start() == second + 10.0


@pytest.mark.parametrize("how", ["filter", "flat_map", "sink", "partition"])
def test_rate_limits_operators_other_than_map(how: str) -> None:
    starts: list[float] = []

    def note(item: int) -> Any:
        starts.append(time.monotonic())
        return [item] if how == "flat_map" else item

    graph = Graph("limited")
    numbers = graph.source(range(ITEMS))
    if how == "partition":
        for branch in numbers.partition(note, 2, rate=RATE):
            branch.sink(abs)
    else:
        out = getattr(numbers, how)(note, rate=RATE)
        if out is not None:
            out.sink(abs)
    began = time.monotonic()
    graph.run()
    assert len(starts) == ITEMS
    assert_spaced(starts, began)


def test_rate_limits_an_async_flat_map() -> None:
    async def twice(item: int) -> Any:
        start = time.monotonic()
        yield start
        yield start

    graph = Graph("limited")
    starts = graph.source(range(ITEMS)).flat_map(twice, workers=4, rate=RATE).collect()
    began = time.monotonic()
    found = graph.run()[starts]
    assert len(found) == 2 * ITEMS
    assert_spaced(list(dict.fromkeys(found)), began)


@pytest.mark.parametrize("how", ["thread", "coroutine"])
def test_retry_counts_as_another_start_for_the_rate(how: str) -> None:
    starts: list[float] = []

    def fail(item: int) -> int:
        starts.append(time.monotonic())
        if len(starts) < ITEMS:
            raise ValueError(item)
        return item

    async def fail_later(item: int) -> int:
        return fail(item)

    graph = Graph("retried")
    function: Any = fail if how == "thread" else fail_later
    result = graph.source([7]).map(function, retries=ITEMS, rate=RATE).collect()
    began = time.monotonic()
    assert graph.run()[result] == [7]
    assert_spaced(starts, began)


@pytest.mark.parametrize(("function", "on"), [(now, "process"), (now_later, "thread")])
def test_waiting_for_the_rate_does_not_count_towards_timeout(function: Any, on: Any) -> None:
    graph = Graph("patient")
    starts = graph.source(range(3)).map(function, on=on, workers=3, rate=1, timeout=0.5).collect()
    assert len(graph.run()[starts]) == 3  # the last worker has waited 2 s


def test_aborted_run_does_not_wait_for_the_rate() -> None:
    calls: list[int] = []
    graph = Graph("slow")
    graph.source(range(9)).map(calls.append, rate=1e-6, workers=3, name="slow").sink(str)
    run = graph.start()
    wait_until(lambda: stage_of(run, "slow").in_hand == 3 and calls != [])
    run.abort()
    run.wait()
    assert len(calls) == 1


class KillsOnce:
    """Function that returns the time of its call, but kills its process at the first call with item 2."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, item: int) -> float:
        start = time.monotonic()
        if item == 2 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return start


def test_killed_worker_neither_blocks_nor_exceeds_the_rate(tmp_path: Path) -> None:
    graph = Graph("killed")
    mapped = graph.source(range(ITEMS)).map(
        KillsOnce(tmp_path / "mark"), on="process", workers=3, rate=RATE, name="kills"
    )
    starts = mapped.collect()
    began = time.monotonic()
    with graph.start() as run:
        found = run.wait()[starts]
    assert stage_of(run, "kills").restarts == 1
    assert len(found) == ITEMS
    assert_spaced(found, began)


def test_worker_killed_while_waiting_does_not_block_other_workers() -> None:
    graph = Graph("killed")
    starts = graph.source(range(6)).map(now, on="process", workers=2, rate=4, name="limited").collect()
    began = time.monotonic()
    with graph.start() as run:
        wait_until(lambda: stage_of(run, "limited").in_hand == 2)
        os.kill(stage_of(run, "limited").pids[0], signal.SIGKILL)
        found = run.wait()[starts]
    assert len(found) == 6
    assert_spaced(found, began, rate=4)


def test_process_killed_while_holding_the_lock_does_not_block_others() -> None:
    pace = SharedPace(1.0)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        fcntl.lockf(pace._file.fd, fcntl.LOCK_EX)
        os.write(writing, b"locked")
        signal.pause()
    assert os.read(reading, 6) == b"locked"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    first = pace.take_start()
    assert pace.take_start() == first + 1.0


def test_unpickled_pace_takes_turns_with_the_original() -> None:
    pace = SharedPace(1.0)
    received = pickle.loads(pickle.dumps(pace))
    first = pace.take_start()
    assert received.take_start() == first + 1.0
    assert pace.take_start() == first + 2.0


def test_unpickled_pace_refuses_a_different_file(tmp_path: Path) -> None:
    pace = SharedPace(1.0)
    received = pickle.loads(pickle.dumps(pace))
    other = tmp_path / "other"
    other.write_text("untouched")
    with open(other, "r+b") as file:
        os.dup2(file.fileno(), pace._file.fd, inheritable=False)
        with pytest.raises(Broken, match=r"^the run has ended$"):
            received.take_start()
    assert other.read_text() == "untouched"


def test_rate_limit_includes_added_workers() -> None:
    graph = Graph("scaled")
    items = graph.input()
    starts = items.map(now, rate=RATE, name="limited").collect()
    began = time.monotonic()
    with graph.start() as run:
        run.scale("limited", 3)
        wait_until(lambda: stage_of(run, "limited").working == 3)
        run[items].put_many(range(ITEMS))
    assert_spaced(run.wait()[starts], began)


def test_rate_limit_applies_to_each_run_of_a_pool() -> None:
    graph = Graph("pooled")
    starts = graph.source(range(ITEMS)).map(now, on="process", workers=2, rate=RATE).collect()
    with graph.pool() as pool:
        for _ in range(2):
            began = time.monotonic()
            assert_spaced(pool.run()[starts], began)


def test_run_with_a_rate_leaves_no_descriptor_open() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def once() -> None:
        graph = Graph("limited")
        graph.source(range(2)).sink(now, on="process", rate=1000)
        graph.run()

    once()  # the first run also opens resources that stay open
    before = descriptors()
    for _ in range(3):
        once()
    wait_until(lambda: descriptors() <= before, what=lambda: (before, descriptors()))


def test_report_names_the_rate_limit_of_the_bottleneck() -> None:
    graph = Graph("limited")
    graph.source(range(30)).map(now, rate=RATE, name="limited").sink(str)
    with graph.start() as run:
        run.wait()
    assert stage_of(run, "limited").rate_limit == RATE
    assert f" of at most {RATE}/s)" in run.report()

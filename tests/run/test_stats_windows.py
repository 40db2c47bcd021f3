"""Test the counters of workers, and the rates and shares in a window of a run."""

from __future__ import annotations

import dataclasses
import os
import select as waiting_for
import signal
import time
from typing import Any

import pytest
from runs import Gate, everywhere, stage_of
from support.waiting import wait_until

from flowchan import Channel, Graph, RunStats
from flowchan.run.observe.windows import EVERY_S, History, between
from flowchan.run.policy.stats import StageStats, WorkSeconds


def same(item: int) -> int:
    return item


def slow(item: int) -> int:
    waiting_for.select([], [], [], 0.02)
    return item


def burn(item: int) -> int:
    ends = time.thread_time() + 0.01
    while time.thread_time() < ends:
        pass
    return item


def counted(elapsed: float, items: int, seconds: WorkSeconds) -> RunStats:
    """Return the statistics of a run that has one stage."""
    stage = StageStats(
        "work", "map", "thread", 2, 2, items, items, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, seconds=seconds
    )
    return RunStats("graph", "running", elapsed, (stage,), (), None)


def test_window_is_the_difference_of_two_snapshots() -> None:
    before = counted(10.0, 1000, WorkSeconds(20.0, 5.0, 5.0, 0.0, 3.0, 0.0))
    now = between(before, counted(12.0, 1100, WorkSeconds(24.0, 6.0, 5.0, 1.0, 4.0, 0.0)))
    (stage,) = now.stages
    assert now.window == 2.0
    assert (stage.rate, stage.cores) == (50.0, 0.5)
    assert (stage.busy, stage.waiting_input, stage.waiting_output, stage.waiting_turn) == (
        0.5,
        0.25,
        0.25,
        0.25,
    )
    assert stage.seconds == WorkSeconds(24.0, 6.0, 5.0, 1.0, 4.0, 0.0)  # the counters begin with the run


def test_whole_run_is_a_window_from_its_start() -> None:
    now = between(None, counted(10.0, 1000, WorkSeconds(20.0, 5.0, 5.0, 0.0)))
    assert (now.window, now.stages[0].rate, now.stages[0].busy) == (10.0, 100.0, 0.5)
    assert now.stages[0].cores is None


@everywhere
def test_stats_counters_are_separate_for_each_worker(on: Any) -> None:
    graph, gate = Graph("counted"), Gate()
    graph.source(range(40)).map(slow, on=on, workers=2, name="work").sink(gate.wait, name="held")
    with graph.start() as run:
        wait_until(lambda: stage_of(run, "work").items_out >= 20)
        stage = stage_of(run, "work")
        assert [worker.number for worker in stage.per_worker] == [1, 2]
        assert stage.working == 2
        parts = [worker.seconds for worker in stage.per_worker]
        assert stage.seconds.working == pytest.approx(sum(one.working for one in parts))
        assert stage.seconds.input == pytest.approx(sum(one.input for one in parts), abs=0.05)
        assert stage.seconds.work > 0.2
        assert all(one.cpu is not None and one.ready is not None for one in parts)
        gate.open()
        run.wait()
    ended = stage_of(run, "work")
    assert (ended.working, ended.per_worker) == (0, ())
    assert ended.seconds.working >= stage.seconds.working


@everywhere
def test_cpu_seconds_include_work_but_not_sleep(on: Any) -> None:
    graph = Graph("cpu")
    graph.source(range(20)).map(burn, on=on, name="burn").map(slow, on=on, name="wait").sink(same)
    run = graph.start()
    run.wait()
    burnt, waited = stage_of(run, "burn").seconds.cpu, stage_of(run, "wait").seconds.cpu
    assert burnt is not None
    assert waited is not None
    assert burnt == pytest.approx(0.2, abs=0.15)
    assert waited < burnt


def test_cpu_seconds_of_async_stages_are_counted_once() -> None:
    async def work(item: int) -> int:
        return burn(item)

    graph = Graph("cpu")
    graph.source(range(20)).map(work, workers=4, name="burn").sink(same)
    run = graph.start()
    run.wait()
    burnt = stage_of(run, "burn").seconds.cpu
    assert burnt == pytest.approx(0.2, abs=0.15)


def test_stats_distinguish_waits_for_input_place_and_turn() -> None:
    gate = Gate()
    graph = Graph("waits")
    graph.source(range(10), capacity=1, name="puts").map(gate.wait, name="holds").sink(same, name="gets")
    with graph.start() as run:
        gate.wait_held()
        wait_until(lambda: stage_of(run, "puts").seconds.place > 0.1)
        wait_until(lambda: stage_of(run, "gets").seconds.input > 0.1)
        wait_until(lambda: stage_of(run, "holds").seconds.work > 0.1)
        for name in ("puts", "holds", "gets"):
            assert stage_of(run, name).seconds.turn == 0
        gate.open()
        run.wait()


@everywhere
def test_stats_of_ordered_workers_show_turn_instead_of_place(on: Any) -> None:
    graph, gate = Graph("turns"), Gate()
    numbers = graph.source(range(10))
    numbers.map(FirstWaits(gate.channel), workers=3, capacity=1, on=on, name="work").sink(same)
    with graph.start() as run:
        gate.wait_held()
        wait_until(lambda: stage_of(run, "work").seconds.turn > 0.2)
        stage = stage_of(run, "work")
        assert stage.waiting_turn > 0
        assert stage.seconds.place < 0.1
        gate.open()
        run.wait()
    assert stage_of(run, "work").seconds.turn >= stage.seconds.turn


class FirstWaits:
    """Function that blocks at item 0."""

    def __init__(self, gate: Channel[Any]) -> None:
        self.gate = gate

    def __call__(self, item: int) -> int:
        if item == 0:
            for _ in self.gate:
                pass
        return item


@pytest.mark.parametrize("ordered", [True, False])
def test_stats_of_writers_before_a_slow_reader_show_place(ordered: bool) -> None:
    """In an ordered stage, other writers may wait for the turn of the writer that waits for room."""
    graph, gate = Graph("places"), Gate()
    numbers = graph.source(range(20)).map(same, workers=3, capacity=1, ordered=ordered, name="work")
    numbers.sink(gate.wait)
    with graph.start() as run:
        gate.wait_held()
        wait_until(lambda: stage_of(run, "work").seconds.place > 0.2)
        assert ordered or stage_of(run, "work").seconds.turn == 0
        gate.open()
        run.wait()


def test_time_of_a_replaced_worker_counts_for_its_stage() -> None:
    graph, gate = Graph("replaced"), Gate()
    graph.source(range(3)).map(gate.wait, on="process", restarts=1, name="work").sink(same)
    with graph.start() as run:
        gate.wait_held()
        wait_until(lambda: stage_of(run, "work").seconds.working > 0.3)
        (pid,) = stage_of(run, "work").pids
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: stage_of(run, "work").restarts == 1 and stage_of(run, "work").working == 1)
        stage = stage_of(run, "work")
        assert stage.seconds.working > 0.3
        assert stage.per_worker[0].seconds.working < stage.seconds.working
        gate.open()
        run.wait()


def test_worker_that_is_being_built_is_not_working() -> None:
    gate = Gate()

    class Built:
        def __init__(self) -> None:
            gate.wait()

        def __call__(self, item: int) -> int:
            return item

    graph = Graph("built")
    graph.source(range(3)).map(Built, name="built").sink(same)
    with graph.start() as run:
        gate.wait_held()
        stage = stage_of(run, "built")
        assert (stage.alive, stage.working, stage.seconds) == (
            1,
            0,
            dataclasses.replace(stage.seconds, working=0.0),
        )
        gate.open()
        run.wait()


def test_stats_with_a_window_cover_only_that_window() -> None:
    graph = Graph("window")
    numbers = graph.input()
    numbers.map(same, name="work").sink(same)
    with graph.start() as run:
        for number in range(100):
            run[numbers].put(number)
        wait_until(lambda: run.stats().elapsed > 3 * EVERY_S)
        wait_until(lambda: run.stats(window=EVERY_S).stages[1].rate == 0)
        assert EVERY_S <= run.stats(window=EVERY_S).window < run.stats().window
        assert run.stats().stages[1].rate > 0
        assert run.stats(window=600).window == pytest.approx(run.stats().elapsed, abs=0.2)


@pytest.mark.parametrize("window", [0, -1, "long"])
def test_window_must_be_a_number_of_seconds(window: Any) -> None:
    graph = Graph("short")
    graph.source([1]).sink(same)
    run = graph.start()
    with pytest.raises((ValueError, TypeError), match="stats: window must be"):
        run.stats(window=window)
    run.wait()


def test_history_keeps_older_statistics_at_longer_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    history = History()
    for step in range(1000):
        clock[0] = step * EVERY_S
        history.sample(lambda: counted(clock[0], 0, WorkSeconds()))
    now = counted(clock[0], 0, WorkSeconds())
    assert len(history._samples) < 80
    for window in (1.0, 10.0, 100.0):
        before = history.before(now, window)
        assert before is not None
        assert window <= now.elapsed - before.elapsed <= 1.5 * window + EVERY_S
    assert history.before(now, 1000.0) is None

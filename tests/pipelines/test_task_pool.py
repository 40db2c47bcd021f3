"""Test ``TaskPool`` and ``BackgroundTask``: tasks as in ``concurrent.futures``, on threads and processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, as_completed, wait
from typing import Any

import numpy as np
import pytest
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Channel, WorkerDied
from flowchan.pipelines import BackgroundTask, TaskPool

everywhere = pytest.mark.parametrize("on", ["thread", "process"])


def fail(number: int) -> None:
    raise LookupError(number)


# BackgroundTask


@everywhere
def test_result_can_be_read_several_times(on: Any) -> None:
    task = BackgroundTask(lambda a, b, c: (a, [b], {"c": c}), 1, None, c="x", on=on)
    assert task.result() == task.result() == (1, [None], {"c": "x"})
    task.close()


@everywhere
def test_a_task_can_be_polled(on: Any) -> None:
    gate = Gate()
    task = BackgroundTask(gate.wait, 42, on=on)
    gate.wait_held()
    assert not task.done()
    gate.open()
    wait_until(task.done)
    assert task.result() == 42
    task.close()


@everywhere
def test_task_without_result_returns_none(on: Any) -> None:
    task = BackgroundTask(lambda: None, on=on)
    assert task.result() is None
    task.close()


@everywhere
def test_failed_task_raises_in_every_caller_and_is_done(on: Any) -> None:
    gate = Gate()
    task: BackgroundTask[None] = BackgroundTask(lambda: fail(gate.wait(8)), on=on)
    gate.wait_held()
    assert task.done() is False
    gate.open()
    wait_until(task.done)
    assert task.done() is True
    for _ in range(2):
        with pytest.raises(LookupError, match="8"):
            task.result()
    assert isinstance(task.exception(), LookupError)
    task.close()
    task.close()


def test_background_tasks_work_with_as_completed() -> None:
    tasks = [BackgroundTask(abs, -number) for number in range(4)]
    assert sorted(task.result() for task in as_completed(tasks)) == [0, 1, 2, 3]
    for task in tasks:
        task.close()


# TaskPool


@everywhere
def test_all_results_arrive_with_many_more_tasks_than_workers(on: Any) -> None:
    workers = 20 if on == "thread" else 2
    with TaskPool(workers, on=on) as pool:
        assert isinstance(pool, Executor)
        futures = [pool.submit(pow, number, 2) for number in range(1000)]
        assert [future.result() for future in futures] == [number**2 for number in range(1000)]


@everywhere
def test_all_workers_are_used_at_once(on: Any) -> None:
    arrived = Channel[int](3, across="processes")

    def meet(number: int) -> tuple[int, int]:
        arrived.put(number)
        while arrived.stats().items_in < 3:
            os.sched_yield()
        return os.getpid(), threading.get_native_id()

    with TaskPool(3, on=on) as pool:
        where = set(pool.map(meet, range(3)))
    assert len(where) == 3
    assert ({process for process, _ in where} == {os.getpid()}) == (on == "thread")


@everywhere
def test_more_tasks_than_workers_can_be_polled(on: Any) -> None:
    gate = Gate()
    with TaskPool(2, on=on) as pool:
        futures = [pool.submit(gate.wait, number) for number in range(13)]
        gate.wait_held(2)
        assert not any(future.done() for future in futures)
        gate.open()
        wait_until(lambda: all(future.done() for future in futures))
        assert [future.result() for future in futures] == list(range(13))


@everywhere
def test_failed_task_does_not_affect_other_tasks(on: Any) -> None:
    def eighth_fails(number: int) -> int:
        return fail(number) or 0 if number % 8 == 0 else number

    with TaskPool(2, on=on) as pool:
        for number, future in enumerate([pool.submit(eighth_fails, number) for number in range(40)]):
            if number % 8:
                assert future.result() == number
            else:
                with pytest.raises(LookupError, match=str(number)):
                    future.result()


@everywhere
def test_futures_work_with_wait_and_as_completed(on: Any) -> None:
    gate = Gate()
    with TaskPool(2, on=on) as pool:
        held, free = pool.submit(gate.wait, "held"), pool.submit(str, "free")
        done, not_done = wait([held, free], return_when=FIRST_COMPLETED)
        assert (done, not_done) == ({free}, {held})
        completed = as_completed([held, free])
        assert next(completed) is free
        gate.open()
        assert next(completed) is held


@everywhere
def test_map_keeps_the_order(on: Any) -> None:
    with TaskPool(2, on=on) as pool:
        assert list(pool.map(pow, range(50), range(50))) == [number**number for number in range(50)]


@everywhere
def test_callbacks_run_when_a_task_ends(on: Any) -> None:
    heard = Channel[Any]()
    with TaskPool(1, on=on) as pool:
        pool.submit(abs, -3).add_done_callback(lambda future: heard.put(future.result()))
        assert heard.get() == 3


@everywhere
def test_coroutines_can_await_tasks(on: Any) -> None:
    async def main(pool: TaskPool) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, abs, -3)

    with TaskPool(1, on=on) as pool:
        assert asyncio.run(main(pool)) == 3


@everywhere
def test_task_that_has_not_started_can_be_cancelled(on: Any) -> None:
    gate, called = Gate(), Channel[int](8, across="processes")
    with TaskPool(1, on=on) as pool:
        held = pool.submit(gate.wait)
        gate.wait_held()
        if on == "process":  # the next task counts as started while it is waiting for a worker
            following = pool.submit(abs, 0)
            wait_until(following.running)
        waiting = [pool.submit(called.put, number) for number in range(3)]
        assert waiting[1].cancel()
        assert not held.cancel()
        gate.open()
        assert waiting[2].result() is None
        assert wait(waiting).not_done == set()
    assert called.get_many(8) == [0, 2]
    assert waiting[1].cancelled()
    with pytest.raises(CancelledError):
        waiting[1].result()


@everywhere
def test_close_waits_for_tasks_and_rejects_new_ones(on: Any) -> None:
    pool = TaskPool(2, on=on)
    futures = [pool.submit(abs, -number) for number in range(20)]
    pool.close()
    assert all(future.done() for future in futures)
    with pytest.raises(RuntimeError):
        pool.submit(abs, 1)
    pool.close()


@everywhere
def test_shutdown_can_cancel_tasks_and_skip_waiting(on: Any) -> None:
    gate = Gate()
    pool = TaskPool(1, on=on)
    held = pool.submit(gate.wait, "held")
    gate.wait_held()
    waiting = [pool.submit(abs, number) for number in range(5)]
    pool.shutdown(wait=False, cancel_futures=True)
    gate.open()
    assert held.result() == "held"
    pool.shutdown()
    assert sum(future.cancelled() for future in waiting) >= 4
    assert all(future.done() for future in waiting)


@everywhere
def test_pool_without_references_finishes_its_tasks(on: Any) -> None:
    gate = Gate()
    pool = TaskPool(1, on=on)
    futures = [pool.submit(gate.wait, number) for number in range(3)]
    del pool
    gc.collect()
    gate.open()
    assert [future.result() for future in futures] == [0, 1, 2]


def test_process_is_replaced_after_max_tasks() -> None:
    """No task is lost, run twice, or delayed by the pause after a death.

    Each process calls the initializer.
    """
    begun = Channel[int](across="processes")
    with TaskPool(1, on="process", initializer=lambda: begun.put(os.getpid()), max_tasks_per_child=2) as pool:
        where = [future.result() for future in [pool.submit(os.getpid) for _ in range(7)]]
    counted = Counter(where)
    assert list(counted.values()) == [2, 2, 2, 1]
    begun.close()
    assert list(begun) == list(counted)


def test_killed_worker_fails_only_its_task() -> None:
    with TaskPool(2, on="process") as pool:
        before = [pool.submit(abs, -number) for number in range(10)]
        killed = pool.submit(lambda: os.kill(os.getpid(), signal.SIGKILL))
        after = [pool.submit(abs, -number) for number in range(10)]
        with pytest.raises(WorkerDied):
            killed.result()
        assert [future.result() for future in [*before, *after]] == [*range(10), *range(10)]


def test_pool_survives_more_deaths_than_it_has_workers() -> None:
    with TaskPool(1, on="process") as pool:
        futures = [pool.submit(os._exit, 3) for _ in range(4)]
        for future in futures:
            with pytest.raises(WorkerDied):
                future.result()
        assert pool.submit(abs, -1).result() == 1


def test_unpicklable_argument_fails_only_its_task() -> None:
    with TaskPool(1, on="process") as pool:
        there = pool.submit(print, threading.Lock())
        back = pool.submit(threading.Lock)
        fine = pool.submit(abs, -1)
        for future in (there, back):
            with pytest.raises(TypeError, match="pickle"):
                future.result()
        assert fine.result() == 1


@everywhere
def test_task_that_raises_system_exit_keeps_its_worker(on: Any) -> None:
    def leave() -> None:
        raise SystemExit(3)

    with TaskPool(1, on=on) as pool:
        left: Future[None] = pool.submit(leave)
        with pytest.raises(SystemExit):
            left.result()
        assert pool.submit(abs, -1).result() == 1


@everywhere
def test_arrays_can_be_arguments_and_results(on: Any) -> None:
    array = np.arange(300_000.0)
    with TaskPool(1, on=on) as pool:
        assert np.array_equal(pool.submit(np.negative, array).result(), -array)


def test_tasks_can_submit_tasks() -> None:
    with TaskPool(2) as pool:
        assert pool.submit(lambda: pool.submit(abs, -5).result()).result() == 5


def test_wrong_arguments_raise_at_the_call() -> None:
    with pytest.raises(TypeError, match="callable"):
        BackgroundTask(42)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="TaskPool: workers must be at least 1, got 0"):
        TaskPool(0)
    with pytest.raises(TypeError, match="TaskPool: workers must be an int of at least 1, got '2'"):
        TaskPool("2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='"thread", "process"'):
        TaskPool(1, on="processes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_tasks_per_child must be at least 1"):
        TaskPool(1, on="process", max_tasks_per_child=0)
    with pytest.raises(
        ValueError, match="max_tasks_per_child must be None with on='thread', got 1; use on='process'"
    ):
        TaskPool(1, max_tasks_per_child=1)
    with TaskPool(1) as pool, pytest.raises(TypeError, match="callable"):
        pool.submit(42)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["time.sleep, 1000, on='process'", "channel.get, on='thread'"])
def test_program_ends_without_waiting_for_background_task(task: str) -> None:
    program = f"""
import time
from flowchan import Channel
from flowchan.pipelines import BackgroundTask
channel = Channel()
task = BackgroundTask({task})
while not task.running():
    time.sleep(0)
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")

"""Test ``TaskPool`` with the cases from CPython 3.11's tests of ``concurrent.futures``.

The tests run with threads and with processes. Tasks that crash, exit or cannot be pickled, and ``wait`` and
``as_completed``, have their own files. Each test has the name of the original test but none of its code. The
following original tests have no counterpart here, or give a different result:

``test_max_workers_too_large``
    The original test is only for Windows.
``test_threads_terminate``, ``test_processes_terminate``
    They count private threads and processes. Here, a check for leftovers follows each test.
``test_thread_names_default``
    Threads are named after the pool, and the pool's ``name=`` has a default.
``test_idle_thread_reuse``, ``test_idle_process_reuse_*``
    All workers start with the pool.
``test_max_tasks_per_child_defaults_to_spawn_context``
    Worker processes use multiprocessing's start method.
``test_killed_child``
    A task fails with ``WorkerDied`` if its worker dies, and the pool continues; CPython's pool is then
    broken.
``test_traceback``
    The worker's traceback is a note on the exception rather than its cause.
``FutureTests``
    They test ``Future``, and flowchan uses Python's own class.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from concurrent import futures
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
from executors import WORKERS, Thing
from support.waiting import wait_freed, wait_until
from support.worker_latch import Gate

from flowchan import Channel, WorkerDied
from flowchan.pipelines import TaskPool

everywhere = pytest.mark.parametrize("on", ["thread", "process"])


# Defines a task that outlives the program's own code.
LATE = """
import threading
from flowchan import Channel
from flowchan.pipelines import TaskPool
over = Channel(1, across="processes")
threading._register_atexit(over.close)
def late(word):
    list(over)
    print(word, flush=True)
"""


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)


# --- ExecutorShutdownTest ---


def test_run_after_shutdown(pool: TaskPool) -> None:
    pool.shutdown()
    with pytest.raises(RuntimeError):
        pool.submit(pow, 2, 5)


@everywhere
@pytest.mark.parametrize(
    "end", ["", "pool.shutdown(wait=False)"], ids=["interpreter_shutdown", "hang_gh83386"]
)
def test_interpreter_shutdown_and_hang_gh83386(on: str, end: str) -> None:
    done = python(f"""
{LATE}
pool = TaskPool(3, on={on!r})
pool.submit(late, "apple")
{end}
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "apple\n", "")


@everywhere
def test_submit_after_interpreter_shutdown(on: str) -> None:
    done = python(f"""
import atexit
from flowchan.pipelines import TaskPool
@atexit.register
def last():
    for pool in pools:
        try:
            pool.submit(id, None)
        except RuntimeError as error:
            print(error)
pools = [TaskPool(1, on={on!r}), TaskPool(1, on={on!r})]
pools[0].submit(id, 42).result()
""")
    refused = "cannot schedule new futures after interpreter shutdown\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, 2 * refused, "")


def test_hang_issue12364(pool: TaskPool) -> None:
    results = [pool.submit(abs, -number) for number in range(50)]
    pool.shutdown()
    assert [future.result() for future in results] == list(range(50))


def test_cancel_futures(pool: TaskPool, gate: Gate) -> None:
    asked = [pool.submit(gate.wait) for _ in range(50)]
    gate.wait_held(WORKERS)
    pool.shutdown(wait=False, cancel_futures=True)
    gate.open()
    pool.shutdown()
    left = [future for future in asked if not future.cancelled()]
    # two more tasks may already be on their way to a worker process
    assert WORKERS <= len(left) <= WORKERS + 2
    assert all(future.done() and future.exception() is None for future in left)


@everywhere
def test_cancel_futures_wait_false(on: str) -> None:
    done = python(f"""
{LATE}
import time
pool = TaskPool(1, on={on!r})
future = pool.submit(late, "apple")
while not future.running():
    time.sleep(0)
pool.shutdown(wait=False, cancel_futures=True)
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "apple\n", "")


@everywhere
def test_hang_gh94440(on: Any) -> None:
    """A task is cancelled right before the shutdown."""
    pool = TaskPool(1, on=on)
    pool.submit(int).result()
    pool.submit(int).cancel()
    pool.shutdown(wait=True)


# --- ThreadPoolShutdownTest, ProcessPoolShutdownTest ---


@everywhere
def test_context_manager_shutdown(on: Any) -> None:
    with TaskPool(WORKERS, on=on) as pool:
        assert list(pool.map(abs, range(-5, 5))) == [5, 4, 3, 2, 1, 0, 1, 2, 3, 4]


@everywhere
def test_del_shutdown(on: Any) -> None:
    pool = TaskPool(WORKERS, on=on)
    results = pool.map(abs, range(-5, 5))
    del pool
    gc.collect()
    assert list(results) == [5, 4, 3, 2, 1, 0, 1, 2, 3, 4]


@everywhere
def test_shutdown_no_wait(on: Any) -> None:
    pool = TaskPool(WORKERS, on=on)
    results = pool.map(abs, range(-5, 5))
    pool.shutdown(wait=False)
    with pytest.raises(RuntimeError):
        pool.submit(abs, 1)
    assert list(results) == [5, 4, 3, 2, 1, 0, 1, 2, 3, 4]


def initialised(channel: Channel[Any], *words: str) -> None:
    channel.put(words)


@everywhere
def test_initializer(on: Any) -> None:
    """Each worker calls the initializer once, before its first task."""
    calls: Channel[Any] = Channel(9, across="processes")
    with TaskPool(2, on=on, initializer=initialised, initargs=(calls, "a", "b")) as pool:
        assert list(pool.map(abs, range(-20, 0))) == list(range(20, 0, -1))
    found = calls.get_many(9, timeout=0)
    assert 1 <= len(found) <= 2
    assert set(found) == {("a", "b")}


def failing() -> None:
    raise ArithmeticError("not today")


@everywhere
def test_failing_initializer(on: Any) -> None:
    with TaskPool(1, on=on, initializer=failing) as pool:
        first, second = pool.submit(abs, -1), pool.submit(abs, -2)
        for future in (first, second):
            with pytest.raises(futures.BrokenExecutor, match="raised ArithmeticError: not today") as raised:
                future.result()
            assert isinstance(raised.value.__cause__, ArithmeticError)
        with pytest.raises(futures.BrokenExecutor, match="not today"):
            pool.submit(abs, -3)


def test_initializer_also_runs_in_a_replacement_worker() -> None:
    calls: Channel[Any] = Channel(9, across="processes")
    with TaskPool(1, on="process", initializer=initialised, initargs=(calls,)) as pool:
        dead = pool.submit(os.kill, pool.submit(os.getpid).result(), signal.SIGKILL)
        with pytest.raises(WorkerDied):
            dead.result()
        assert pool.submit(abs, -1).result() == 1
    assert calls.get_many(9, timeout=0) == [(), ()]


def test_default_workers() -> None:
    """All workers wait at a barrier, so one more task would find no free worker."""
    workers = min(32, len(os.sched_getaffinity(0)) + 4)
    meeting = threading.Barrier(workers)
    with TaskPool() as pool:
        assert sorted(pool.map(lambda _: meeting.wait(), range(workers))) == list(range(workers))
        assert sum("tasks/call" in thread.name for thread in threading.enumerate()) == workers
    with TaskPool(on="process") as pool:
        assert pool.submit(abs, -1).result() == 1


@pytest.mark.parametrize("initializer", [7, "word"])
def test_initializer_that_cannot_be_called(initializer: Any) -> None:
    with pytest.raises(TypeError, match="initializer must be callable or None, got"):
        TaskPool(1, initializer=initializer)


def test_thread_names_assigned() -> None:
    with TaskPool(2, name="special") as pool:
        assert "special" in pool.submit(lambda: threading.current_thread().name).result()


# --- ExecutorTest ---


def test_submit(pool: TaskPool) -> None:
    assert pool.submit(pow, 2, 8).result() == 256


def test_submit_keyword(pool: TaskPool) -> None:
    assert pool.submit(pow, 2, exp=4).result() == 16
    assert pool.submit(dict, self=1, fn=2).result() == {"self": 1, "fn": 2}
    with pytest.raises(TypeError):
        pool.submit(fn=dict, arg=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        pool.submit(arg=1)  # type: ignore[call-arg]


def test_map(pool: TaskPool) -> None:
    expected = [number**number for number in range(10)]
    assert list(pool.map(pow, range(10), range(10))) == expected
    assert list(pool.map(pow, range(10), range(10), chunksize=3)) == expected


def test_map_exception(pool: TaskPool) -> None:
    results = pool.map(divmod, [1, 1, 1, 1], [2, 3, 0, 5])
    assert next(results) == (0, 1)
    assert next(results) == (0, 1)
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_map_timeout(pool: TaskPool, gate: Gate) -> None:
    def held(third: bool) -> None:
        if third:
            gate.wait()
        passed.put(None)

    passed = Channel[None](8, across="processes")
    results = pool.map(held, [False, False, True], timeout=0.5)
    passed.get(), passed.get()
    wait_until(lambda: pool._tasks.keys() == {3})  # both results have arrived before the iterator moves on
    assert [next(results), next(results)] == [None, None]
    with pytest.raises(futures.TimeoutError):
        next(results)


@everywhere
def test_executor_map_current_future_cancel(on: Any, gate: Gate) -> None:
    """An iterator that times out cancels the tasks that have not started."""
    called = Channel[int](64, across="processes")

    def held(number: int) -> None:
        called.put(number)
        gate.wait()

    with TaskPool(1, on=on) as pool:
        results = pool.map(held, range(40), timeout=0)
        gate.wait_held()
        with pytest.raises(futures.TimeoutError):
            next(results)
        gate.open()
    # Two more tasks may already be on their way to a worker process.
    assert called.get_many(64) in ([0], [0, 1], [0, 1, 2])


@everywhere
def test_shutdown_race_issue12456(on: Any) -> None:
    pool = TaskPool(WORKERS, on=on)
    pool.map(str, [2] * (WORKERS + 1))
    pool.shutdown()


def test_no_stale_references(pool: TaskPool) -> None:
    """Nothing waits for the task's future."""
    thing = Thing()
    gone = weakref.ref(thing)
    pool.submit(thing.method)
    del thing
    wait_freed(gone)


@pytest.mark.parametrize("workers", [0, -1])
def test_max_workers_negative(workers: int) -> None:
    with pytest.raises(ValueError, match="workers"):
        TaskPool(workers)


def made(_: int) -> Thing:
    return Thing()


def test_free_reference(pool: TaskPool) -> None:
    for thing in pool.map(made, range(10)):
        gone = weakref.ref(thing)
        del thing
        wait_freed(gone)


# --- ThreadPoolExecutorTest, ProcessPoolExecutorTest ---


def test_map_submits_without_iteration() -> None:
    finished: list[int] = []
    with TaskPool(WORKERS) as pool:
        pool.map(finished.append, range(10))
    assert sorted(finished) == list(range(10))


def test_saturation(pool: TaskPool, gate: Gate) -> None:
    asked = [pool.submit(gate.wait, number) for number in range(15 * WORKERS)]
    gate.wait_held(WORKERS)
    gate.open()
    assert [future.result() for future in asked] == list(range(15 * WORKERS))


def test_killed_child(processes: TaskPool, gate: Gate) -> None:
    pids = Channel[int](across="processes")
    killed = processes.submit(lambda: (pids.put(os.getpid()), gate.wait()))
    os.kill(pids.get(), signal.SIGTERM)
    with pytest.raises(WorkerDied):
        killed.result()
    assert processes.submit(pow, 2, 8).result() == 256


def test_map_chunksize(processes: TaskPool) -> None:
    expected = [number**number for number in range(40)]
    for size in (6, 40, 50):
        assert list(processes.map(pow, range(40), range(40), chunksize=size)) == expected
    with pytest.raises(ValueError, match="-1"):
        processes.map(pow, range(40), range(40), chunksize=-1)
    with pytest.raises(ZeroDivisionError):
        list(processes.map(divmod, [1, 1, 1], [1, 0, 1], chunksize=2))


def fails() -> None:
    raise RuntimeError(123)  # the traceback shows this line


def test_traceback(pool: TaskPool) -> None:
    error = pool.submit(fails).exception()
    assert type(error) is RuntimeError
    assert error.args == (123,)
    assert "raise RuntimeError(123)  # the traceback shows this line" in "".join(
        traceback.format_exception(error)
    )


class CollectionReporter:
    """An object that reports when it is collected, in any process except the one that created it."""

    def __init__(self, pids: Channel[int]) -> None:
        self.pids, self.maker = pids, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.maker:
            self.pids.put(os.getpid())


def test_ressources_gced_in_workers(processes: TaskPool) -> None:
    pids = Channel[int](across="processes")
    processes.submit(id, CollectionReporter(pids)).result()
    assert pids.get() != os.getpid()


def test_max_tasks_per_child() -> None:
    """CPython replaces a worker after its last task; TaskPool replaces it when the next task arrives."""
    with TaskPool(1, on="process", max_tasks_per_child=3) as pool:
        first = [pool.submit(os.getpid).result() for _ in range(3)]
        assert len(set(first)) == 1
        assert pool.submit(os.getpid).result() not in first
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="max_tasks_per_child"):
            TaskPool(1, on="process", max_tasks_per_child=wrong)


def test_max_tasks_early_shutdown() -> None:
    with TaskPool(3, on="process", max_tasks_per_child=1) as pool:
        asked = [pool.submit(pow, number, 2) for number in range(6)]
    assert [future.result() for future in asked] == [number**2 for number in range(6)]


# --- FutureTests ---


def test_future_is_pythons_own(pool: TaskPool, gate: Gate) -> None:
    held = [pool.submit(gate.wait) for _ in range(20)]
    assert {type(future) for future in held} == {Future}
    assert held[-1].cancel()
    with pytest.raises(CancelledError):
        held[-1].result(timeout=0)


# --- additional tests ---


@pytest.mark.parametrize(("on", "pools"), [("thread", 60), ("process", 12)])
def test_many_pools_at_once(on: Any, pools: int) -> None:
    made = [TaskPool(1, on=on) for _ in range(pools)]
    asked = [pool.submit(pow, number, 2) for pool in made for number in range(5)]
    assert [future.result() for future in asked] == [number**2 for number in range(5)] * pools
    for pool in made:
        pool.shutdown(wait=False)
    for pool in made:
        pool.shutdown()

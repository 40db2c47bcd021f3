"""Test ``TaskPool`` on processes with the cases from CPython 3.11's ``ExecutorDeadlockTest``.

Tasks crash their worker, exit, or cannot be pickled or unpickled. Each test has the name of the original test
but none of its code. After such a task, CPython's pool is broken or fails other tasks, whereas a TaskPool
continues.

A task raises ``WorkerDied`` if its worker dies. If unpickling the task or its result raises, the task raises
the same exception. If pickling raises, the task raises a ``TypeError`` that contains the part and the reason.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pickle import PicklingError, UnpicklingError
from typing import Any

import pytest
from support.worker_latch import Gate

from flowchan import WorkerDied
from flowchan.pipelines import TaskPool


class Bad:
    """An object that calls ``there`` when it is pickled and ``here`` when it is unpickled."""

    def __init__(self, there: Callable[[], object] = int, here: Callable[[], object] = int) -> None:
        self.there, self.here = there, here

    def __reduce__(self) -> Any:
        self.there()
        return self.here, ()


def crash() -> None:
    faulthandler.disable()  # prevents output from the crash
    os.kill(os.getpid(), signal.SIGSEGV)


def fails() -> None:
    raise RuntimeError(123)


def leave() -> None:
    sys.exit(1)


def not_pickled() -> None:
    raise PicklingError("not here")


def not_unpickled() -> None:
    raise UnpicklingError("not there")


DEADLOCKS: dict[str, tuple[Callable[[TaskPool], Future[Any]], type[BaseException]]] = {
    "test_error_at_task_pickle": (lambda pool: pool.submit(id, Bad(not_pickled)), TypeError),
    "test_exit_at_task_unpickle": (lambda pool: pool.submit(id, Bad(here=leave)), SystemExit),
    "test_error_at_task_unpickle": (lambda pool: pool.submit(id, Bad(here=not_unpickled)), UnpicklingError),
    "test_crash_at_task_unpickle": (lambda pool: pool.submit(id, Bad(here=crash)), WorkerDied),
    "test_crash_during_func_exec_on_worker": (lambda pool: pool.submit(crash), WorkerDied),
    "test_exit_during_func_exec_on_worker": (lambda pool: pool.submit(leave), SystemExit),
    "test_error_during_func_exec_on_worker": (lambda pool: pool.submit(fails), RuntimeError),
    "test_crash_during_result_pickle_on_worker": (lambda pool: pool.submit(Bad, crash), WorkerDied),
    "test_exit_during_result_pickle_on_worker": (lambda pool: pool.submit(Bad, leave), SystemExit),
    "test_error_during_result_pickle_on_worker": (lambda pool: pool.submit(Bad, not_pickled), TypeError),
    "test_error_during_result_unpickle_in_result_handler": (
        lambda pool: pool.submit(Bad, int, not_unpickled),
        UnpicklingError,
    ),
    "test_exit_during_result_unpickle_in_result_handler": (
        lambda pool: pool.submit(Bad, int, leave),
        SystemExit,
    ),
}


@pytest.mark.parametrize("name", DEADLOCKS)
def test_deadlock(processes: TaskPool, name: str) -> None:
    """Run the original tests, each selected by its name."""
    submit, error = DEADLOCKS[name]
    with pytest.raises(error):
        submit(processes).result()
    assert processes.submit(abs, -1).result() == 1


def test_shutdown_deadlock(gate: Gate) -> None:
    with TaskPool(2, on="process") as pool:
        dying = pool.submit(lambda: (gate.wait(), crash()))
        gate.wait_held()
        pool.shutdown(wait=False)
        gate.open()
        pool.shutdown(wait=True)
        with pytest.raises(WorkerDied):
            dying.result()


def test_shutdown_deadlock_pickle() -> None:
    with TaskPool(2, on="process") as pool:
        pool.submit(id, 42).result()
        failing = pool.submit(id, Bad(not_pickled))
        pool.shutdown(wait=False)
        with pytest.raises(TypeError, match="not here"):
            failing.result()


def test_crash_big_data(processes: TaskPool) -> None:
    """The worker dies while it is about to receive tasks that are larger than any pipe."""
    data = "a" * 8_192_000
    asked = [processes.submit(crash), processes.submit(len, data), processes.submit(len, data)]
    with pytest.raises(WorkerDied):
        asked[0].result()
    assert [future.result() for future in asked[1:]] == [len(data)] * 2

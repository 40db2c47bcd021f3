"""Test ``TaskPool``: an error in a task affects only its future, and a failed pool reports the cause.

Idle workers keep no objects alive.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from pathlib import Path
from pickle import PicklingError, UnpicklingError
from typing import Any

import numpy as np
import pytest
from support.waiting import wait_until

from flowchan import Channel, WorkerDied
from flowchan.pipelines import BackgroundTask, TaskPool

everywhere = pytest.mark.parametrize("on", ["thread", "process"])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    sys.exit(3)


def refuse(error: type[Exception]) -> None:
    raise error("not this one")


class Pickles:
    """Object that calls ``there`` when pickled and ``here`` when unpickled."""

    def __init__(self, there: Callable[[], object] = int, here: Callable[[], object] = int) -> None:
        self.there, self.here = there, here

    def __reduce__(self) -> Any:
        self.there()
        return self.here, ()


not_pickled, not_made = functools.partial(refuse, PicklingError), functools.partial(refuse, UnpicklingError)


@pytest.mark.parametrize(
    ("task", "error"),
    [
        (lambda: (id, Pickles(here=die)), WorkerDied),
        (lambda: (id, Pickles(here=leave)), SystemExit),
        (lambda: (id, Pickles(here=not_made)), UnpicklingError),
        (lambda: (id, Pickles(there=not_pickled)), TypeError),
        (lambda: (id, Pickles(there=leave)), SystemExit),
        (lambda: (Pickles, die), WorkerDied),
        (lambda: (Pickles, leave), SystemExit),
        (lambda: (Pickles, not_pickled), TypeError),
        (lambda: (Pickles, int, leave), SystemExit),
        (lambda: (Pickles, int, not_made), UnpicklingError),
    ],
    ids=[
        "unpickling the task kills the worker", "unpickling the task exits", "the task can't be unpickled",
        "the task can't be pickled", "pickling the task exits", "pickling the result kills the worker",
        "pickling the result exits", "the result can't be pickled", "unpickling the result exits",
        "the result can't be unpickled",
    ],
)  # fmt: skip
def test_unpicklable_value_fails_only_its_future(task: Any, error: type[BaseException]) -> None:
    with TaskPool(1, on="process") as pool:
        for _ in range(3):
            failed, fine = pool.submit(*task()), pool.submit(abs, -1)
            with pytest.raises(error):
                failed.result()
            assert fine.result() == 1


def test_task_with_arrays_that_kills_its_worker_fails() -> None:
    with TaskPool(1, on="process") as pool:
        array = np.zeros(100_000)
        killed = [pool.submit(lambda array: die(), array), pool.submit(id, [array, Pickles(here=die)])]
        for future in killed:
            with pytest.raises(WorkerDied):
                future.result()
        assert pool.submit(np.sum, array).result() == 0


def test_oversized_task_fails_its_own_future(monkeypatch: pytest.MonkeyPatch) -> None:
    # pretend that the machine has one megabyte of memory
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 10)
    with TaskPool(1, on="process") as pool:
        there, back = pool.submit(len, bytes(3 << 20)), pool.submit(bytes, 3 << 20)
        for future in (there, back):
            with pytest.raises(ValueError, match="bytes"):
                future.result()
        assert pool.submit(abs, -1).result() == 1


@everywhere
def test_every_keyword_is_passed_to_the_function(on: Any) -> None:
    with TaskPool(1, on=on) as pool:
        assert pool.submit(dict, fn=1, self=2, args=3).result() == {"fn": 1, "self": 2, "args": 3}
    task = BackgroundTask(dict, fn=1, on=on)
    assert task.result() == {"fn": 1}
    task.close()


@everywhere
def test_callback_that_raises_system_exit_leaves_pool_usable(
    on: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with TaskPool(1, on=on) as pool:
        start = Channel[int](across="processes")
        future = pool.submit(start.get)
        future.add_done_callback(lambda _: sys.exit(3))
        start.put(2)
        assert future.result() == 2
        assert pool.submit(abs, -3).result() == 3
    assert "such as SystemExit" in caplog.text
    caplog.clear()  # the logged traceback would keep the pool's frames alive


@everywhere
def test_externally_finished_future_leaves_the_pool_usable(on: Any) -> None:
    with TaskPool(1, on=on) as pool:
        start = Channel[None](across="processes")
        future = pool.submit(start.get)
        wait_until(future.running)
        future.set_result(None)
        start.put(None)
        assert pool.submit(abs, -3).result() == 3


# Objects that idle workers must not keep


class ReportsItsEnd:
    """Object that reports when it is freed, in any process."""

    def __init__(self, reported: Channel[str], word: str) -> None:
        self.reported, self.word = reported, word

    def __del__(self) -> None:
        self.reported.put(f"{self.word} {os.getpid()}")


class ReportingError(Exception):
    def __init__(self, reported: Channel[str]) -> None:
        super().__init__(reported)
        self.last_words = ReportsItsEnd(reported, "exception")


def answer(reported: Channel[str], argument: Any) -> tuple[int, ReportsItsEnd]:
    return os.getpid(), ReportsItsEnd(reported, "result")


def fail(reported: Channel[str], argument: Any) -> None:
    raise ReportingError(reported)


def test_idle_process_frees_arguments_results_and_exceptions() -> None:
    reported = Channel[str](across="processes")
    with TaskPool(1, on="process") as pool:
        pid, _ = pool.submit(answer, reported, ReportsItsEnd(reported, "argument")).result()
        expected = {f"argument {pid}", f"result {pid}"}
        while expected:
            expected.discard(reported.get(timeout=60))
        failed = pool.submit(fail, reported, ReportsItsEnd(reported, "argument"))
        assert isinstance(failed.exception(), ReportingError)
        expected = {f"argument {pid}", f"exception {pid}"}
        while expected:
            expected.discard(reported.get(timeout=60))


class Thing:
    def itself(self) -> Any:
        return self

    def fails(self) -> None:
        raise SilentError(self)


class SilentError(Exception):
    pass


@everywhere
@pytest.mark.parametrize("method", ["__init__", "itself", "fails"])
def test_idle_pool_frees_arguments_results_and_exceptions(on: Any, method: str) -> None:
    with TaskPool(1, on=on) as pool:
        thing = Thing()
        reference = weakref.ref(thing)
        future = pool.submit(getattr(thing, method))
        del thing
        wait_until(future.done)
        ended = future.exception() if method == "fails" else future.result()
        reference = reference if ended is None else weakref.ref(ended)
        del future, ended
        gc.collect()
        wait_until(lambda: reference() is None)


# Pools that have ended


@everywhere
def test_submit_after_shutdown_raises_pythons_own_message(on: Any) -> None:
    pool = TaskPool(1, on=on)
    pool.shutdown()
    with pytest.raises(RuntimeError, match=r"^cannot schedule new futures after shutdown$") as caught:
        pool.submit(abs, 1)
    assert not isinstance(caught.value, BrokenExecutor)
    assert caught.value.__cause__ is None


def test_failed_pool_breaks_futures_and_rejects_tasks(tmp_path: Path) -> None:
    """The workers cannot start: each worker imports the program, and the program creates another pool."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import multiprocessing
from concurrent.futures import BrokenExecutor
from flowchan.pipelines import TaskPool

multiprocessing.set_start_method("spawn", force=True)
pool = TaskPool(1, on="process")
pending = [pool.submit(abs, -1) for _ in range(5)]
for future in pending:
    error = future.exception()
    print(isinstance(error, BrokenExecutor), error.__cause__ is not None)
try:
    pool.submit(abs, -1)
except BrokenExecutor as error:
    print("refused", error.__cause__ is not None)
pool.shutdown()
"""
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "True True\n" * 5 + "refused True\n"), done.stderr


@pytest.mark.parametrize("on", ["thread", "process"])
def test_program_exit_waits_for_pool_tasks(on: str) -> None:
    program = f"""
import threading
from flowchan import Channel
from flowchan.pipelines import TaskPool

over = Channel(1, across="processes")
threading._register_atexit(over.close)

def say(number):
    list(over)
    print(number, flush=True)

pool = TaskPool(1, on={on!r})
for number in range(3):
    pool.submit(say, number)
forgotten = TaskPool(1, on={on!r})
forgotten.submit(print, 3, flush=True).result()
del forgotten
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, sorted(done.stdout.split()), done.stderr) == (0, ["0", "1", "2", "3"], "")

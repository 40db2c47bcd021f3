"""Test R10 with ``max_deaths=1``: whenever a worker dies, no item is processed twice."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import Gate, waits
from support.waiting import wait_until

from flowchan import Failed, Graph, In, Out, WorkerDied
from flowchan.pipelines import TaskPool

ONCE: Any = {"on": "process", "workers": 1, "restarts": 10**6, "max_deaths": 1}


def noted(folder: Path, number: int) -> int:
    with (folder / str(number)).open("a") as file:
        file.write("called ")
    return number


def calls(folder: Path) -> dict[int, int]:
    return {int(path.name): len(path.read_text().split()) for path in folder.iterdir()}


def test_death_before_the_output_is_put_fails_the_item(tmp_path: Path) -> None:
    gate = Gate()

    def passes(items: In[int], out: Out[int]) -> None:
        gate.wait()
        for item in items:
            out.put(item)

    graph = Graph("once")
    done = graph.source(range(6)).map(lambda item: noted(tmp_path, item), name="work", capacity=1, **ONCE)
    good, bad = graph.stage(passes, done).collect(), done.errors.collect()
    with graph.start() as run:
        waits(run, "work", writers=1)
        (process,) = run._crew.local.processes.values()
        process.kill()
        gate.open()
        results = run.wait()
    (failed,) = results[bad]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, WorkerDied)
    assert sorted([*results[good], failed.item]) == list(range(6))
    assert calls(tmp_path) == dict.fromkeys(range(6), 1)


def test_error_for_a_single_death_uses_the_singular() -> None:
    graph = Graph("once")
    mapped = graph.source([1]).map(lambda _: os._exit(7), **ONCE)
    bad = mapped.errors.collect()
    mapped.sink(abs)
    (failed,) = graph.run()[bad]
    assert str(failed.error) == (
        "1 worker died while it was processing this item: exited with code 7 without finishing"
    )


class KillsBehind:
    """An item that arrives as a number. Dropping the original kills the process that put it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return int, (self.number,)

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_death_after_the_output_was_put_fails_no_item(tmp_path: Path) -> None:
    def work(item: int) -> Any:
        noted(tmp_path, item)
        return KillsBehind(item) if item == 2 else item

    graph = Graph("once")
    done = graph.source(range(6)).map(work, **ONCE)
    good, bad = done.collect(), done.errors.collect()
    results = graph.run()
    assert (results[good], results[bad]) == (list(range(6)), [])
    assert calls(tmp_path) == dict.fromkeys(range(6), 1)


@pytest.mark.parametrize("workers", [1, 3])
def test_task_of_a_pool_never_runs_twice(tmp_path: Path, workers: int) -> None:
    """The task's future gets a result or an error about the death."""
    with TaskPool(workers, on="process") as pool:
        tasks = [pool.submit(noted, tmp_path, number) for number in range(300)]
        for number in range(0, 300, 30):
            wait_until(tasks[number].done)
            with contextlib.suppress(IndexError, psutil.NoSuchProcess):
                psutil.Process().children()[0].kill()
    ended = [task.exception() or task.result() for task in tasks]
    assert all(end == number or isinstance(end, WorkerDied) for number, end in enumerate(ended))
    assert max(calls(tmp_path).values()) == 1  # a worker may die before it writes its file

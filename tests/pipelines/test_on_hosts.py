"""Test patterns with workers on other hosts, using a pool as their placement."""

from __future__ import annotations

import gc
import importlib
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import WAIT_LIMIT_S, wait_until

from flowchan import RunError, WorkerDied, pipelines, worker
from flowchan.hosts import local
from flowchan.hosts.hosts_part import HostsPart
from flowchan.run.crew.recovery import deaths_over_item


def where(number: int) -> tuple[int, str | None]:
    return number, worker().host


def fail_at(number: int) -> int:
    if number == 2:
        raise ValueError("two")
    return number


def test_map_on_a_host_pool_returns_results_in_worker_order() -> None:
    results = pipelines.map(4, where, on=local(2)).join()
    assert [number for number, _ in results] == [1, 2, 3, 4]
    assert {host for _, host in results} <= {"local-1", "local-2"}


def test_join_raises_the_error_from_a_worker_on_a_host() -> None:
    workers = pipelines.map(3, fail_at, on=local(1))
    with pytest.raises(RunError) as caught:
        workers.join()
    assert repr(caught.value.exceptions[0].__cause__) == "ValueError('two')"


def test_task_pool_on_hosts_returns_results_and_errors() -> None:
    with pipelines.TaskPool(3, on=local(2)) as pool:
        assert list(pool.map(math.factorial, range(20))) == [math.factorial(number) for number in range(20)]
        with pytest.raises(ValueError, match="not defined for negative"):
            pool.submit(math.factorial, -1).result()


def test_error_names_the_missing_module_and_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def use(): pass")
    with pipelines.TaskPool(1, on=local(1)) as pool:
        assert pool.submit(abs, -1).result() == 1  # wait until the agent is connected
        monkeypatch.syspath_prepend(tmp_path)
        task = pool.submit(importlib.import_module("only_here").use)
        with pytest.raises(ModuleNotFoundError, match="No module named 'only_here'") as caught:
            task.result()
    note = caught.value.__notes__[0]
    assert note.startswith("raised on host 'local-1': the objects in a task must be importable there, or")


def test_remote_process_is_replaced_after_max_tasks() -> None:
    with pipelines.TaskPool(2, on=local(2), max_tasks_per_child=2) as pool:
        where = [future.result() for future in [pool.submit(os.getpid) for _ in range(7)]]
    assert max(map(where.count, where)) <= 2


def test_worker_death_on_host_fails_only_its_task() -> None:
    with pipelines.TaskPool(2, on=local(2)) as pool:
        dead = pool.submit(os._exit, 9)
        after = [pool.submit(math.factorial, number) for number in range(5)]
        with pytest.raises(WorkerDied):
            dead.result()
        assert [future.result() for future in after] == [1, 1, 2, 6, 24]


HOLD = """
import os, pathlib, threading
folder = pathlib.Path({0!r})
(folder / f"held {{os.getpid()}}").touch()
while not (folder / "go").exists():
    threading.Event().wait(0.01)
"""
"""Program that reports its process and continues when the file ``go`` exists."""


def hold_one(text: str, number: int) -> int:
    if number == 1:
        exec(text)
    return number


@pytest.mark.parametrize("kind", ["map", "TaskPool"])
def test_call_on_lost_host_fails_and_is_not_repeated(tmp_path: Path, kind: str) -> None:
    """The call may already have had effects, so it is not repeated.

    Other calls continue on the agent's replacement.
    """
    text, error = HOLD.format(str(tmp_path)), None
    if kind == "map":
        workers = pipelines.map(2, hold_one, text, on=local(2))
        lose_host(tmp_path)
        with pytest.raises(RunError) as caught:
            workers.join()
        error = caught.value.exceptions[0].__cause__
        assert workers.join() == [2]
    else:
        with pipelines.TaskPool(2, on=local(2)) as pool:
            lost = pool.submit(exec, text)
            lose_host(tmp_path)
            error = lost.exception()
            assert [pool.submit(math.factorial, number).result() for number in (2, 3)] == [2, 6]
    assert isinstance(error, WorkerDied)
    assert "was lost with host 'local-" in str(error)
    assert len([*tmp_path.glob("held *")]) == 1


def lose_host(folder: Path) -> None:
    """Kill the agent of a started call, once this process knows that the call has started."""
    wait_until(lambda: [*folder.glob("held *")] != [])
    wait_until(lambda: any(map(has_begun, gc.get_objects())))
    (held,) = folder.glob("held *")
    psutil.Process(int(held.name.split()[1])).parent().kill()
    (folder / "go").touch()


def has_begun(crew: object) -> bool:
    """Return True if this process knows that a remote worker is running user code (R10)."""
    return isinstance(crew, HostsPart) and any(
        deaths_over_item(crew._ports.ports[id]) for id in [*crew._streams]
    )


def test_ctrl_c_ends_program_that_waits_for_remote_calls(tmp_path: Path) -> None:
    """Only a second Ctrl-C ends the program, because the calls never return."""
    script = tmp_path / "interrupted.py"
    script.write_text(
        textwrap.dedent("""
            import pathlib, sys, threading
            from flowchan import pipelines
            from flowchan.hosts import local

            folder = pathlib.Path(sys.argv[1])

            def hold(number):
                (folder / f"held {number}").touch()
                threading.Event().wait()

            pipelines.map(2, hold, on=local(2)).join()
        """)
    )
    with subprocess.Popen(
        [sys.executable, script, tmp_path], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        wait_until(lambda: len([*tmp_path.glob("held *")]) == 2)
        others = psutil.Process(process.pid).children(recursive=True)
        assert len(others) == 5  # one fork server, two agents, two workers
        for line in ("flowchan: stopping", "flowchan: aborted"):
            process.send_signal(signal.SIGINT)
            while line not in (message := process.stderr.readline()):
                assert message, line
        process.communicate()
    assert process.returncode == -signal.SIGINT
    _, left = psutil.wait_procs(others, timeout=WAIT_LIMIT_S)
    assert not left


def test_workers_on_hosts_serve_a_work_queue() -> None:
    queue = pipelines.workqueue(capacity=4, across="hosts")

    def serve(number: int) -> int:
        return sum(queue.put((question, question**2)) is None for question in queue)

    workers = pipelines.map(2, serve, on=local(2))
    queue.put_many(range(100))
    queue.close()
    assert sorted(queue) == [(number, number**2) for number in range(100)]
    assert sum(workers.join()) == 100


def test_unanswered_question_of_a_killed_remote_worker_goes_to_another() -> None:
    queue = pipelines.workqueue(across="hosts")

    def serve(number: int) -> None:
        for question in queue:
            if number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            queue.put(question)

    first = pipelines.map(1, serve, on=local(1))
    queue.put_many(range(10))
    with pytest.raises(RunError, match="1 of 1 workers"):
        first.join()
    queue.close()
    second = pipelines.map(2, serve_none_as_first, serve, on=local(1))
    assert sorted(queue) == list(range(10))
    second.join()


def serve_none_as_first(serve: Any, number: int) -> None:
    serve(number + 1)

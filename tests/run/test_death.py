"""Test R4 (Death): the death of a worker is noticed, and reported with its signal or exit code."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import Gate, run_python, script
from support.waiting import wait_until

from flowchan import Graph, In, Out, Run, RunError, StageError
from flowchan.run import supervisor
from flowchan.run.crew import watch
from flowchan.run.policy import break_cause, deadlock


def workers_of(run: Run) -> list[psutil.Process]:
    """Return the run's worker processes, which are children of this process."""
    return [psutil.Process(process.pid) for process in run._crew.local.processes.values()]


def failure_of(run: Run) -> StageError:
    with pytest.raises(RunError) as caught:
        run.wait()
    (error,) = caught.value.exceptions
    return error


@pytest.fixture
def killed_by_hangup() -> Iterator[None]:
    """Let SIGHUP kill workers, even if ``nohup`` has started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("killed_by_hangup")
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_killed_worker_is_reported_with_its_signal(signum: signal.Signals) -> None:
    gate = Gate()
    graph = Graph("r4")
    graph.source(itertools.count).map(lambda _: gate.wait(), on="process", name="victim", restarts=0).sink(id)
    run = graph.start()
    gate.wait_held()
    (worker,) = workers_of(run)
    worker.send_signal(signum)
    error = failure_of(run)
    assert (error.stage, error.worker) == ("victim", "victim 1")
    assert f"killed by {signum.name}" in str(error)


@pytest.mark.parametrize("code", [0, 1, 77])
def test_worker_that_exits_is_reported_with_its_code(code: int) -> None:
    graph = Graph("r4")
    graph.source([1]).map(lambda _: os._exit(code), on="process", name="victim", restarts=0).sink(id)
    error = failure_of(graph.start())
    assert error.stage == "victim"
    assert f"exited with code {code}" in str(error)


def test_killed_source_is_reported() -> None:
    def source() -> Any:
        yield 1
        os.kill(os.getpid(), signal.SIGKILL)

    graph = Graph("r4")
    graph.source(source, on="process", name="victim").sink(id)
    error = failure_of(graph.start())
    assert (error.stage, error.item) == ("victim", None)
    assert "killed by SIGKILL" in str(error)


def test_killed_general_stage_is_reported() -> None:
    def stage(items: In[int], out: Out[int]) -> None:
        for item in items:
            out.put(item)
            os.kill(os.getpid(), signal.SIGKILL)

    graph = Graph("r4")
    graph.stage(stage, graph.source(range(9)), on="process", name="victim").sink(id)
    assert "killed by SIGKILL" in str(failure_of(graph.start()))


def test_worker_killed_while_waiting_for_an_item_is_reported() -> None:
    graph = Graph("r4")
    numbers = graph.input()
    numbers.map(abs, on="process", restarts=0).sink(id)
    run = graph.start()
    wait_until(lambda: run._ports.channels["input"].stats().waiting_readers == 1)
    workers_of(run)[0].kill()
    assert "killed by SIGKILL" in str(failure_of(run))


def test_death_ends_the_other_workers() -> None:
    gate = Gate()
    graph = Graph("r4")
    held = graph.source(itertools.count, on="process").map(
        lambda _: gate.wait(), on="process", workers=3, restarts=0
    )
    held.sink(id, on="process")
    run = graph.start()
    gate.wait_held(3)
    processes = workers_of(run)
    victim = next(process for process in processes if process.is_running())
    victim.kill()
    gate.open()
    with pytest.raises(RunError):
        run.wait()
    assert not any(process.is_running() for process in processes)


def test_process_that_dies_during_its_start_is_reported() -> None:
    class Deadly:
        def __init__(self) -> None:
            os._exit(9)

        def __call__(self, item: int) -> int:
            return item

    graph = Graph("r4")
    graph.source([1]).map(Deadly, on="process", restarts=0).sink(id)
    error = failure_of(graph.start())
    assert "exited with code 9" in str(error)


def test_death_is_noticed_without_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every polling interval is set to an hour."""
    for module, name in (
        (watch, "POLL_INTERVAL_S"),
        (supervisor, "POLL_INTERVAL_S"),
        (deadlock, "STILL"),
        (break_cause, "POLL_INTERVAL_S"),
    ):
        monkeypatch.setattr(module, name, 3600.0)
    gate = Gate()
    graph = Graph("r4")
    result = graph.source(range(3)).map(gate.wait, on="process", name="victim").collect()
    run = graph.start()
    gate.wait_held()
    (worker,) = run._crew.local.processes.values()
    worker.kill()
    wait_until(lambda: [*run._crew.local.processes.values()] not in ([worker], []))
    gate.wait_held()
    gate.open()
    assert run.wait()[result] == [0, 1, 2]


COLLECTED = """
    import multiprocessing, os, signal, threading
    from flowchan import Channel, Graph, RunError

    def collect(*_):
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            pass

    def work(item):
        if item == 3 and not died:
            died.put(True)
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    def run(restarts):
        graph = Graph("collected")
        result = graph.source(range(9)).map(work, on="process", restarts=restarts).collect()
        return graph.run()[result]

    multiprocessing.set_start_method("fork")  # its workers are its own children, which it collects
    died = Channel(1, across="processes")
    HOW
    print(run(restarts=1) == list(range(9)))
    died.get()
    try:
        run(restarts=0)
    except RunError as error:
        print(error.exceptions[0])
"""

VARIANTS = {
    "ignored": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "collected": "signal.signal(signal.SIGCHLD, collect)",
}


@pytest.mark.parametrize("how", VARIANTS)
def test_death_is_noticed_in_a_program_that_reaps_its_children(how: str, tmp_path: Path) -> None:
    """The run learns that the worker died, although it may not learn how."""
    out = run_python(script(tmp_path, COLLECTED.replace("HOW", VARIANTS[how])))
    assert out.startswith("True\n")
    assert "SIGKILL" in out or "ignores SIGCHLD or reaps its child processes" in out

"""Test that ``graph.pool()`` ends its workers and leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from pathlib import Path

import pytest
from pooled import ends, halves, kill, workers_of
from runs import run_python, script, start
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import (
    Graph,
    RunError,
    WorkerPool,
)


def test_exception_in_the_pools_with_block_ends_all_processes() -> None:
    gate = Gate()
    graph = Graph("left")
    numbers = graph.input("numbers")
    numbers.map(gate.wait, on="process", workers=2).collect()
    pids, runs = [], []

    def use(pool: WorkerPool) -> None:
        runs.append(pool.start())
        runs[0][numbers].put(1)
        pids.extend(workers_of(pool).values())
        raise LookupError

    with pytest.raises(LookupError), graph.pool() as pool:
        use(pool)
    assert runs[0].state == "aborted"
    assert len(pids) == 2
    assert all(map(ends, pids))


def test_worker_process_of_a_pool_uses_eight_descriptors() -> None:
    """docs/limits.md states this number."""
    had = []
    for workers in (1, 4):
        graph = Graph("counted")
        graph.source(range(4)).map(abs, on="process", workers=workers).collect()
        with graph.pool() as pool:
            pool.run()
            had.append(len(os.listdir("/proc/self/fd")))
    assert had[1] - had[0] == 3 * 8


def test_leaving_the_pools_with_block_finishes_the_current_run() -> None:
    graph = Graph("finished")
    numbers = graph.input("numbers")
    found = numbers.map(abs, on="process").collect()
    with graph.pool() as pool:
        run = pool.start()
        run[numbers].put(-1)
    assert run.wait()[found] == [1]


def test_pools_with_block_raises_the_error_from_closing_callables() -> None:
    class Bad:
        def __call__(self, number: int) -> int:
            return number

        def close(self) -> None:
            raise OSError("the disk is full")

    graph = Graph("bad")
    found = graph.source([1]).map(Bad, on="process", name="save").collect()
    with pytest.raises(RunError, match="failed while closing") as caught, graph.pool() as pool:
        assert pool.run()[found] == [1]
    (error,) = caught.value.exceptions
    assert (error.stage, error.worker) == ("save", "save 1")
    assert isinstance(error.__cause__, OSError)


class Talking:
    """Stage function that logs more records at its close than its pool has room for."""

    def __call__(self, number: int) -> int:
        return number

    def close(self) -> None:
        for number in range(200):
            logging.getLogger("lasting").info("closes %d", number)


@pytest.mark.usefixtures("_method")
def test_program_gets_log_records_from_callables_being_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    graph = Graph("talk")
    graph.source(range(4)).map(Talking, on="process", workers=2, name="last").collect()
    with graph.pool() as pool:
        pool.run()
    records = [record for record in caplog.records if record.name == "lasting"]
    for number in (1, 2):
        own = [record for record in records if vars(record)["number"] == number]
        assert [record.getMessage() for record in own] == [f"closes {n}" for n in range(200)]
        assert {record.processName for record in own} == {f"flowchan talk/last {number}"}


def test_dropped_pool_does_not_wait_for_log_records(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """No thread reads the records, but the workers still close their callables."""

    class Writing(Talking):
        def close(self) -> None:
            super().close()
            (tmp_path / "closed").touch()

    caplog.set_level(logging.INFO)
    graph = Graph("dropped")
    graph.source(range(4)).map(Writing, on="process").collect()
    pool = graph.pool().__enter__()
    pool.run()
    del pool
    gc.collect()
    assert (tmp_path / "closed").exists()


PROGRAM = """
    import os, signal, sys
    from flowchan import Graph

    def pid(_):
        return os.getpid()

    graph = Graph("program")
    pids = graph.source(range(4)).map(pid, on="process", workers=2).collect()

    if __name__ == "__main__":
        pool = graph.pool()
        pool.__enter__()
        pool.run()
        print(*(one.process.pid for one in pool._pooled._known.values()), flush=True)
        if sys.argv[1] == "wait":
            signal.pause()
"""


def test_pool_ends_with_the_program_without_leaving_its_block(tmp_path: Path) -> None:
    pids = run_python(script(tmp_path, PROGRAM), "end").split()
    assert len(pids) == 2
    assert all(ends(int(pid)) for pid in pids)


def test_workers_of_a_pool_end_with_a_killed_program(tmp_path: Path) -> None:
    with start(script(tmp_path, PROGRAM), "wait") as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(pids) == 2
        program.kill()
    wait_until(lambda: all(map(ends, pids)))


@pytest.mark.parametrize("runs", [10, pytest.param(100, marks=pytest.mark.long)])
def test_many_runs_of_a_pool_leak_no_resources(runs: int) -> None:
    """Some workers are killed between runs."""
    graph, run = halves()

    def held() -> tuple[int, int]:
        """Return the number of pidfds and the number of other descriptors."""
        gc.collect()
        edges = []
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                edges.append(os.readlink(f"/proc/self/fd/{number}"))
        pidfds = sum("pidfd" in edge for edge in edges)
        return pidfds, len(edges) - pidfds

    at_first, _ = held()

    with graph.pool() as pool:
        for number in range(3 + runs):
            if number == 3:
                before = held()
            assert run(pool, [1, 2, 3]) == [0.5, 1.0, 1.5]
            if number % 5 == 4:
                kill(pool, "halve 1")
        run(pool, [1])
        wait_until(lambda: held()[1] <= before[1], what=held)
        # each live process uses one pidfd for the watch, and perhaps another for its channels
        assert held()[0] <= at_first + 2 * len(workers_of(pool))
    assert held()[0] <= at_first

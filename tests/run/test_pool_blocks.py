"""Test leaving the block of ``graph.pool()``: active runs are finished, and failures are raised."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pooled import Square, ends, halves, reported, workers_of
from runs import run_python, script
from support.waiting import wait_blocked, wait_until
from support.worker_latch import Gate

from flowchan import Channel, Graph, RunError, Stream, WorkerPool
from flowchan.channel.latch import Latch


def test_leaving_the_pools_with_block_finishes_a_dropped_run() -> None:
    seen: list[int] = []
    graph = Graph("dropped")
    numbers = graph.input("numbers")
    numbers.map(lambda number: sum(range(50_000)) and number, on="process").sink(seen.append)
    with graph.pool() as pool:
        out = pool.start()[numbers]
        for number in range(50):
            out.put(number)
        out.close()
    assert seen == list(range(50))


def epoch(pool: WorkerPool, found: Stream[list[int]]) -> Iterator[int]:
    with pool.start() as run:
        yield from run.iter(found)


@pytest.mark.parametrize("begin", [epoch, lambda pool, found: pool.start().iter(found)])
def test_leaving_the_pools_with_block_stops_an_unfinished_iteration(
    begin: Callable[[WorkerPool, Stream[list[int]]], Iterator[int]],
) -> None:
    graph = Graph("endless")
    found = graph.source(itertools.count).map(abs, on="process").collect()
    with graph.pool() as pool:
        items = begin(pool, found)
        assert next(items) == 0
        (pid,) = workers_of(pool).values()
    assert ends(pid)
    items.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("ended", [False, True])
def test_pools_with_block_raises_the_failure_of_an_unawaited_run(ended: bool) -> None:
    graph = Graph("unreported")
    graph.source([0]).map(lambda number: 1 // number, on="process").sink(abs)

    def use(pool: WorkerPool) -> None:
        run = pool.start()
        if ended:
            run._supervisor.ended.wait()
        del run
        gc.collect()

    with pytest.raises(RunError) as caught, graph.pool() as pool:
        use(pool)
    assert isinstance(caught.value.exceptions[0].__cause__, ZeroDivisionError)
    with graph.pool() as pool, pytest.raises(RunError):  # the failure is raised only once
        pool.run()


@pytest.mark.parametrize("error", [None, LookupError, KeyboardInterrupt])
def test_pools_with_block_closes_callables_while_logging_the_end(
    error: type[BaseException] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The block closes the callables, whether it ends normally or with an exception."""
    caplog.set_level(logging.INFO)
    gate, lifecycle = Gate(), Channel[str](10, across="processes")

    class Busy(logging.Handler):
        def __init__(self, gate: Gate) -> None:
            super().__init__()
            self.gate = gate

        def emit(self, record: logging.LogRecord) -> None:
            if " is done " in record.getMessage():
                self.gate.wait()

    graph = Graph("logged")
    graph.source([1]).map(functools.partial(Square, lifecycle), on="process").sink(str)

    def open_once_waited_for(ended: Latch) -> None:
        wait_blocked(ended._channel, readers=1)
        gate.open()

    def use(pool: WorkerPool) -> None:
        run = pool.start()
        gate.wait_held()
        assert run.state == "done"
        opens.append(threading.Thread(target=open_once_waited_for, args=(run._supervisor.ended,)))
        opens[0].start()
        if error is not None:
            raise error

    log, busy, opens = logging.getLogger("flowchan.run"), Busy(gate), list[threading.Thread]()
    log.addHandler(busy)
    try:
        with contextlib.suppress(LookupError, KeyboardInterrupt), graph.pool() as pool:
            use(pool)
    finally:
        log.removeHandler(busy)
    opens[0].join()
    assert reported(lifecycle) == ["built", "closed"]


def test_ctrl_c_during_an_abort_ends_run_before_its_processes() -> None:
    graph = Graph("pressed")
    numbers = graph.input("numbers")
    gate = Gate()
    numbers.map(gate.wait, on="process").collect()
    pids, runs = [], []

    def press() -> None:
        wait_until(lambda: runs[0]._supervisor.state.phase == "aborting")
        os.kill(os.getpid(), signal.SIGINT)

    def use(pool: WorkerPool) -> None:
        runs.append(pool.start())
        runs[0][numbers].put(1)
        gate.wait_held()
        pids.extend(workers_of(pool).values())
        presses.start()
        raise LookupError

    presses = threading.Thread(target=press)
    with pytest.raises(KeyboardInterrupt), graph.pool() as pool:
        use(pool)
    presses.join()
    assert runs[0]._supervisor.ended.is_set()
    assert runs[0]._supervisor.crashed is None
    assert all(map(ends, pids))


def test_workers_are_killed_if_ctrl_c_interrupts_the_runs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(pool: WorkerPool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(WorkerPool, "_finish_run", interrupted)
    gate, runs = Gate(), []
    graph = Graph("killed")
    graph.source([1]).map(gate.wait, on="process").sink(abs)

    def use(pool: WorkerPool) -> None:
        runs.append(pool.start())
        gate.wait_held()

    with pytest.raises(KeyboardInterrupt), graph.pool() as pool:
        use(pool)
    assert runs[0]._supervisor.ended.is_set()
    assert runs[0]._supervisor.crashed is None


def test_pool_rejects_a_forked_child_while_its_lock_is_held() -> None:
    graph, _ = halves()
    with graph.pool() as pool:
        with pool._lock:
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                try:
                    pool.start()
                except RuntimeError:
                    os._exit(0)
                finally:
                    os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_dropped_pool_ends_its_processes_silently(capfd: pytest.CaptureFixture[str]) -> None:
    graph, run = halves()
    pool = graph.pool().__enter__()
    assert run(pool, [1]) == [0.5]
    pids = workers_of(pool).values()
    del pool
    gc.collect()
    assert all(map(ends, pids))
    assert capfd.readouterr().err == ""


TWO = """
    import multiprocessing, os, signal
    from flowchan import Graph

    class Slow:
        def __call__(self, number):
            return number

        def close(self):
            print("closes", flush=True)
            os.kill(os.getppid(), signal.SIGINT)
            signal.pause()

    if __name__ == "__main__":
        multiprocessing.set_start_method("fork")  # the program is the parent of its workers
        pools = []
        for name in ("one", "other"):
            graph = Graph(name)
            graph.source([1]).map(Slow, on="process").collect()
            pools.append(graph.pool().__enter__())
            pools[-1].run()
"""


def test_ctrl_c_while_one_pool_closes_ends_all_pools(tmp_path: Path) -> None:
    """All pools end at once, without another Ctrl-C."""
    assert run_python(script(tmp_path, TWO)) == "closes\n"


@pytest.mark.usefixtures("by_fork")
def test_replacement_may_close_its_callable_slowly() -> None:
    """The replacement was started during a run, so it is dismissed at the end of the run. The run does not
    wait for it.

    A replacement from the forkserver is kept, because it has inherited nothing from the run.
    """
    gate, lifecycle = Gate(), Channel[str](10, across="processes")

    class Slow:
        def __init__(self, gate: Gate, lifecycle: Channel[str]) -> None:
            self.gate, self.lifecycle = gate, lifecycle

        def __call__(self, number: int) -> int:
            if number == -1:
                os.kill(os.getpid(), signal.SIGKILL)
            return number

        def close(self) -> None:
            self.lifecycle.put("closing")
            self.gate.wait()
            raise OSError("the disk is full")

    graph = Graph("slow")
    numbers = graph.input("numbers")
    slow = functools.partial(Slow, gate, lifecycle)
    found = numbers.map(slow, on="process", max_deaths=1, name="slow")
    kept, _ = found.collect(), found.errors.collect()

    def use(pool: WorkerPool) -> None:
        for values in ([1, -1, 2], [3]):
            with pool.start() as run:
                for value in values:
                    run[numbers].put(value)
            assert run.wait()[kept] == [value for value in values if value > 0]
        assert lifecycle.get() == "closing"
        gate.open()

    with pytest.raises(RunError, match="failed while closing") as caught, graph.pool() as pool:
        use(pool)
    assert [str(error.__cause__) for error in caught.value.exceptions] == 2 * ["the disk is full"]

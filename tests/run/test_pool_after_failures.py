"""Test ``graph.pool()`` after failures: whatever happens to a worker or a run, the next run is complete."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import signal
import weakref
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from pooled import Square, ends, halve, halves, kill, pooled_of, reported, workers_of
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import (
    Channel,
    Graph,
    In,
    Interrupted,
    Out,
    RunError,
    WorkerDied,
    WorkerPool,
)
from flowchan.collective import Group


def test_worker_killed_between_two_runs_is_replaced() -> None:
    graph, run = halves()
    with graph.pool() as pool:
        run(pool, [1, 2])
        before = workers_of(pool)
        kill(pool, "halve 1")
        assert run(pool, list(range(1, 30))) == [number / 2 for number in range(1, 30)]
        after = workers_of(pool)
        assert after["halve 1"] != before["halve 1"]
        assert after["halve 2"] == before["halve 2"]


@pytest.mark.usefixtures("_method")
def test_worker_killed_in_a_run_is_replaced_for_the_next() -> None:
    graph = Graph("halves")
    numbers = graph.input("numbers")
    given = numbers.map(halve, on="process", workers=2, max_deaths=1)
    found, failed = given.collect(), given.errors.map(lambda one: one.item).collect()
    with graph.pool() as pool:
        for _ in range(3):
            with pool.start() as run:
                for number in (1, 2, -1, 3, 4):
                    run[numbers].put(number)
            results = run.wait()
            assert results[found] == [0.5, 1.0, 1.5, 2.0]
            assert results[failed] == [-1]
        pids = workers_of(pool).values()
    assert all(map(ends, pids))


@pytest.mark.usefixtures("_method")
def test_run_after_a_failed_run_is_complete() -> None:
    """The failed worker is replaced, and the other workers keep their processes."""
    graph, run = halves()
    with graph.pool() as pool:
        run(pool, [1, 2])
        before = workers_of(pool)
        for bad, cause in ((0, ZeroDivisionError), (-1, WorkerDied)):
            with pytest.raises(RunError) as caught:
                run(pool, [bad])
            (error,) = caught.value.exceptions
            assert isinstance(error.__cause__, cause)
            assert run(pool, [1, 2, 3]) == [0.5, 1.0, 1.5]
            after = workers_of(pool)
            assert {name for name in after if after[name] != before[name]} == {error.worker}
            before = after


def test_failed_worker_closes_its_callable_and_replacement_builds_another() -> None:
    class Fragile(Square):
        def __call__(self, number: int) -> tuple[int, int, int]:
            if number == 0:
                raise ValueError("zero")
            return super().__call__(number)

    lifecycle: Channel[str] = Channel(100, across="processes")
    graph = Graph("fragile")
    numbers = graph.input("numbers")
    found = numbers.map(functools.partial(Fragile, lifecycle), on="process").collect()
    with graph.pool() as pool:
        for number, expected in ((1, ["built"]), (0, ["closed"]), (2, ["built"])):
            try:
                with pool.start() as run:
                    run[numbers].put(number)
                assert run.wait()[found][0][:2] == (number * number, 1)
            except RunError:
                assert number == 0
            assert reported(lifecycle) == expected
    assert reported(lifecycle) == ["closed"]


def test_worker_that_cannot_build_its_callable_retries_next_run(tmp_path: Path) -> None:
    class Model:
        def __init__(self) -> None:
            self.text = (tmp_path / "model").read_text()

        def __call__(self, _: int) -> str:
            return self.text

    graph = Graph("model")
    texts = graph.source([0]).map(Model, on="process").collect()
    with graph.pool() as pool:
        with pytest.raises(RunError):
            pool.run()
        (tmp_path / "model").write_text("loaded")
        assert pool.run()[texts] == ["loaded"]


@pytest.mark.usefixtures("short_grace")
def test_run_after_an_aborted_run_is_complete() -> None:
    """A worker that is stuck in user code is replaced. A waiting worker keeps its process."""
    gate = Gate()
    graph = Graph("stuck")
    numbers = graph.input("numbers")
    held = numbers.map(lambda item: gate.wait(item) if item == "held" else item, on="process", name="hold")
    found = held.map(str, on="process", name="text").collect()
    with graph.pool() as pool:
        run = pool.start()
        run[numbers].put("held")
        gate.wait_held()
        before = workers_of(pool)
        run.abort()
        run.wait()
        gate.open()
        with pool.start() as run:
            run[numbers].put("free")
        assert run.wait()[found] == ["free"]
        after = workers_of(pool)
    assert after["hold 1"] != before["hold 1"]
    assert after["text 1"] == before["text 1"]


def test_run_after_ctrl_c_is_complete() -> None:
    pressed = []

    def press(number: int) -> int:
        if number == 50 and not pressed:
            pressed.append(number)
            os.kill(os.getpid(), signal.SIGINT)
        return number

    graph = Graph("interrupted")
    numbers = graph.source(itertools.count).map(press).map(abs, on="process").take(5_000).collect()
    with graph.pool() as pool:
        with pytest.raises(Interrupted) as caught:
            pool.run()
        found = caught.value.results[numbers]
        assert found[:50] == list(range(50))
        before = workers_of(pool)
        assert pool.run()[numbers] == list(range(5_000))
        assert workers_of(pool) == before


def test_run_that_ends_early_does_not_affect_the_next() -> None:
    graph = Graph("early")
    numbers = graph.source(itertools.count).map(abs, on="process", workers=2).collect()
    with graph.pool() as pool:
        for _ in range(3):
            with pool.start() as run:
                for number in run.iter(numbers):
                    if number == 20:
                        break
        pids = workers_of(pool)
        assert len(pids) == 2
        pool_run = pool.start()
        pool_run.stop()
        pool_run.wait()
        assert workers_of(pool) == pids


def test_idle_worker_keeps_no_resources_of_the_last_run() -> None:
    """The worker does not keep memory or descriptors of the run's channels."""

    def held(pid: int) -> tuple[int, int]:
        maps = Path(f"/proc/{pid}/maps").read_text().count("memfd:flowchan")
        descriptors = [os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir()]
        # After a long wait, the process has one more pidfd, to watch the program.
        return maps, len([one for one in descriptors if "pidfd" not in one])

    graph = Graph("held")
    sizes = graph.source([bytes(100_000)] * 20).map(len, on="process").collect()
    with graph.pool() as pool:
        assert pool.run()[sizes] == [100_000] * 20
        (pid,) = workers_of(pool).values()
        maps, descriptors = held(pid)
        for _ in range(3):
            assert pool.run()[sizes] == [100_000] * 20
            wait_until(lambda: held(pid)[0] <= maps and held(pid)[1] <= descriptors)


def test_pool_frees_a_run_without_references() -> None:
    """The pool does not keep the run's results alive either."""
    graph, run = halves()
    with graph.pool() as pool:
        with pool.start() as running:
            pass
        reference = weakref.ref(running)
        del running
        gc.collect()
        assert reference() is None
        assert run(pool, [1]) == [0.5]


def test_failed_start_leaves_the_pool_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, run = halves()
    starts = itertools.count()
    real = BaseProcess.start

    def start_one(process: BaseProcess) -> None:
        if next(starts) == 1:
            raise OSError("no more processes")
        real(process)

    monkeypatch.setattr(BaseProcess, "start", start_one)
    with graph.pool() as pool:
        with pytest.raises(OSError, match="no more processes"):
            pool.start()
        assert run(pool, [1, 2]) == [0.5, 1.0]


@pytest.mark.usefixtures("_method")
def test_run_after_a_gang_restart_is_complete() -> None:
    deaths: Channel[int] = Channel(2, across="processes")

    def add(numbers: In[int], group: Group, out: Out[int]) -> None:
        if group.rank == 1 and len(deaths):
            deaths.get()
            os.kill(os.getpid(), signal.SIGKILL)
        group.barrier()
        for number in numbers:
            out.put(number)

    graph = Graph("gang")
    stream = graph.source(range(20))
    numbers = graph.stage(add, stream, on="process", workers=2, restartable=True).collect()
    with graph.pool() as pool:
        for dies in (True, False, True):
            if dies:
                deaths.put(1)
            assert sorted(pool.run()[numbers]) == list(range(20))
            assert not len(deaths)


@pytest.mark.usefixtures("_method")
@pytest.mark.parametrize("runs", [4, pytest.param(15, marks=pytest.mark.long)])
def test_each_run_is_complete_while_workers_are_killed(runs: int) -> None:
    draw = random.Random(runs)
    graph = Graph("killed")
    numbers = graph.source(range(100)).map(abs, on="process", workers=2, restarts=100).collect()

    def kill_one(pool: WorkerPool) -> None:
        if processes := [pooled.process for pooled in pooled_of(pool).values()]:
            draw.choice(processes).kill()

    with graph.pool() as pool:
        for _ in range(runs):
            found = []
            with pool.start() as run:
                for number in run.iter(numbers):
                    found.append(number)
                    if draw.random() < 0.02:
                        kill_one(pool)
            assert found == list(range(100))
            kill_one(pool)

"""Test the workers of ``graph.pool()``.

Worker processes are kept from one run to the next, with everything that they have loaded. Each run is
complete, and a failed run does not affect the next run.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from pooled import Square, ends, halves, kill, reported, workers_of
from runs import script, start
from support.worker_latch import Gate

from flowchan import (
    Channel,
    Graph,
    GraphError,
    In,
    Out,
    worker,
)
from flowchan.collective import Group
from flowchan.hosts import local

# --- what is kept ---


@pytest.mark.usefixtures("_method")
def test_processes_and_callables_are_kept_between_runs() -> None:
    lifecycle: Channel[str] = Channel(100, across="processes")
    graph = Graph("squares")
    squares = (
        graph.source(range(40)).map(functools.partial(Square, lifecycle), on="process", workers=2).collect()
    )
    with graph.pool() as pool:
        runs = [pool.run()[squares] for _ in range(3)]
        assert reported(lifecycle) == ["built", "built"]
    assert reported(lifecycle) == ["closed", "closed"]
    for results in runs:
        assert [square for square, _, _ in results] == [number * number for number in range(40)]
    calls = {(pid, call) for run in runs for _, call, pid in run}
    pids = {pid for pid, _ in calls}
    assert len(calls) == 3 * 40
    assert len(pids) <= 2
    assert all(map(ends, pids))


def test_each_run_is_complete() -> None:
    """Each run has its own inputs, handle, statistics, end and seeds."""

    def drawn(number: int) -> float:
        import random

        return number + random.random()

    graph = Graph("noise")
    noise = graph.source(range(5)).map(drawn, on="process").collect()
    with graph.pool() as pool:
        first, again, other = (pool.run(seed=seed)[noise] for seed in (1, 1, 2))
        with pool.start(seed=1) as run:
            assert list(run.iter(noise)) == first
        assert run.stats().stages[1].items_in == 5
        assert run.state == "done"
    assert first == again != other
    assert first == graph.run(seed=1)[noise]


def test_worker_knows_its_seed_and_incarnation_in_each_run() -> None:
    def tell(_: int) -> tuple[int, int]:
        return worker().seed, worker().incarnation

    graph = Graph("here")
    here = graph.source([0]).map(tell, on="process").collect()
    with graph.pool() as pool:
        ((first, _),), ((second, incarnation),) = (pool.run(seed=seed)[here] for seed in (1, 2))
    assert first != second
    assert incarnation == 0


def test_pool_runs_all_kinds_of_stages_again() -> None:
    async def later(number: int) -> int:
        return number

    def doubled(numbers: In[int], out: Out[int]) -> None:
        for number in numbers:
            out.put(2 * number)

    graph = Graph("kinds")
    numbers = (
        graph.source(range(20), on="process").map(later, workers=2).filter(lambda n: n > 3, on="process")
    )
    total = graph.stage(doubled, numbers.batch(3).unbatch(), on="process").reduce(int.__add__, 0)
    with graph.pool() as pool:
        pids = []
        for _ in range(3):
            assert pool.run()[total] == 2 * sum(range(4, 20))
            pids.append(workers_of(pool))
    assert pids[0] == pids[1] == pids[2]
    assert len(pids[0]) == 3


def test_gang_forms_a_new_group_in_each_run() -> None:
    def add(numbers: In[int], group: Group, out: Out[tuple[int, int]]) -> None:
        for _ in numbers:
            pass
        out.put((group.allreduce(group.rank + 1), os.getpid()))

    graph = Graph("gang")
    sums = graph.stage(add, graph.source(range(10)), on="process", workers=3).collect()
    with graph.pool() as pool:
        runs = [pool.run()[sums] for _ in range(2)]
    assert [total for run in runs for total, _ in run] == 6 * [6]
    assert {pid for _, pid in runs[0]} == {pid for _, pid in runs[1]}


def test_program_gets_log_records_of_a_later_run_once(caplog: pytest.LogCaptureFixture) -> None:
    def log_item(number: int) -> int:
        logging.getLogger("lasting").info("item %d", number)
        return number

    caplog.set_level(logging.INFO)
    graph = Graph("log_item")
    graph.source(range(2)).map(log_item, on="process").sink(abs)
    with graph.pool() as pool:
        for _ in range(2):
            pool.run()
    assert [one.getMessage() for one in caplog.records if one.name == "lasting"] == 2 * ["item 0", "item 1"]


def test_cancelled_request_does_not_cancel_one_in_a_later_run() -> None:
    """The next run uses the same request numbers and the same file of cancelled requests."""

    async def main() -> None:
        graph = Graph("asked")
        questions: Any = graph.input("questions")
        gate = Gate()
        questions.map(lambda item: gate.wait(item) if item == "held" else item, on="process").collect()
        with graph.pool() as pool:
            with pool.start() as run:
                asks = [asyncio.ensure_future(run.ask(questions, item)) for item in ("held", "dropped")]
                await asyncio.to_thread(gate.wait_held)
                asks[1].cancel()
                await asyncio.wait([asks[1]])
                gate.open()
                assert await asks[0] == "held"
            with pool.start() as run:
                assert [await run.ask(questions, number) for number in range(3)] == [0, 1, 2]

    asyncio.run(main())


def test_pool_worker_keeps_its_gpus_between_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement gets the GPUs of the worker that it replaces."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")

    def seen(_: int) -> tuple[int, str]:
        return worker().number, os.environ["CUDA_VISIBLE_DEVICES"]

    graph = Graph("gpus")
    found = graph.source(range(40)).map(seen, on="process", workers=2, gpus=1, name="see").collect()
    with graph.pool() as pool:
        reported = set(pool.run()[found])
        kill(pool, "see 2")
        reported |= set(pool.run()[found])
    assert reported <= {(1, "5"), (2, "7")}


class Countdown:
    """Iterator that can be used once."""

    def __init__(self, remaining: int) -> None:
        self.remaining = remaining

    def __iter__(self) -> Countdown:
        return self

    def __next__(self) -> int:
        self.remaining -= 1
        if self.remaining < 0:
            raise StopIteration
        return self.remaining


@pytest.mark.usefixtures("_method")
def test_iterables_and_arguments_are_new_in_each_run() -> None:
    """Each run gets a new iterable for a source, and new arguments. The function is kept with its state."""
    calls: list[int] = []

    def add(numbers: In[int], out: Out[int], more: Countdown, reported: Channel[int]) -> None:
        for number in numbers:
            calls.append(number)
            reported.put(len(calls))
            out.put(number + next(more))

    reported: Channel[int] = Channel(20, across="processes")
    graph = Graph("used up")
    numbers = graph.source(Countdown(3), on="process")
    sums = graph.stage(add, numbers, more=Countdown(3), reported=reported, on="process").collect()
    with graph.pool() as pool:
        assert [pool.run()[sums] for _ in range(2)] == [[4, 2, 0], [4, 2, 0]]
    assert reported.get_many(10) == [1, 2, 3, 4, 5, 6]


# --- what is rejected ---


def test_pool_outside_its_block_is_rejected() -> None:
    graph, _ = halves()
    pool = graph.pool()
    with pytest.raises(RuntimeError, match=r"must be used in its block: with graph\.pool\(\) as pool"):
        pool.run()
    with pool, pytest.raises(RuntimeError, match="must not be entered twice"):
        pool.__enter__()
    with pytest.raises(RuntimeError, match="in its block"):
        pool.start()


def test_second_concurrent_run_is_rejected() -> None:
    graph, _ = halves()
    with graph.pool() as pool, pool.start(), pytest.raises(RuntimeError, match="one run at a time"):
        pool.start()


def test_graph_changed_after_the_first_run_is_rejected() -> None:
    graph = Graph("changed")
    numbers = graph.source(range(3)).map(abs, on="process").collect()
    with graph.pool() as pool:
        pool.run()
        numbers.map(str).collect()
        with pytest.raises(RuntimeError, match="must not change after"):
            pool.run()


def test_pool_rejects_a_worker_with_excess_ports() -> None:
    def parted(parts: int) -> Graph:
        graph = Graph("parted")
        for part in graph.source(range(3)).partition(abs, parts, on="process", name="part"):
            part.sink(abs)
        return graph

    with parted(124).pool() as pool:
        pool.run()
    graph = parted(125)
    with (
        graph.pool() as pool,
        pytest.raises(GraphError, match=r"'part'.*at most 125 ports, got 126.*graph\.run\(\)"),
    ):
        pool.run()


@pytest.mark.parametrize(("elastic", "most"), [(False, 125), (True, 124)])
def test_gang_with_the_maximum_number_of_ports_runs(elastic: bool, most: int) -> None:
    def gang(outs: int) -> Graph:
        names = ", ".join(f"out{number}: Out[int]" for number in range(outs))
        space: dict[str, Any] = {"Out": Out, "Group": Group}
        exec(f"def part(group: Group, {names}): out0.put(group.size)", space)
        graph = Graph("gang")
        for stream in graph.stage(space["part"], on="process", elastic=elastic):
            stream.sink(abs)
        return graph

    with gang(most).pool() as pool:
        pool.run()
    with gang(most + 1).pool() as pool, pytest.raises(GraphError, match=rf"at most {most} ports"):
        pool.run()


def test_pool_rejects_stages_on_hosts_with_the_remedy() -> None:
    graph = Graph("far")
    graph.source(range(3)).map(abs, on=local(1), name="there").collect()
    with graph.pool() as pool, pytest.raises(GraphError, match=r"'there'.*can't keep.*graph\.run\(\)"):
        pool.run()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_script_without_a_main_guard_gets_the_remedy(method: str, tmp_path: Path) -> None:
    text = f"""
        import multiprocessing
        from flowchan import Graph
        multiprocessing.set_start_method({method!r}, force=True)
        graph = Graph("unguarded")
        graph.source(range(3)).map(abs, on="process").collect()
        with graph.pool() as pool:
            pool.run()
    """
    with start(script(tmp_path, text)) as program:
        _, err = program.communicate()
    assert program.returncode == 1
    assert 'put this code under `if __name__ == "__main__":`' in err
    assert err.count("Traceback") == 1

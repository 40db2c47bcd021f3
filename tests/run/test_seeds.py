"""Test R9 (Randomness): each worker has its own seed.

The seed derives from the run's seed, the stage, the number and the incarnation. Random numbers in the
worker's process derive from that seed.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib.util
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import everywhere, run_python, script

import flowchan
from flowchan import Graph, In, Out, Worker
from flowchan.run.policy.seeds import enter, seed_of, worker_text


def ask(_: Any) -> Worker:
    return flowchan.worker()


def each(items: In[int], out: Out[Any]) -> None:
    """Put one value in each worker, no matter which items the worker gets."""
    out.put((flowchan.worker(), random.random(), float(np.random.rand())))
    for _ in items:
        pass


def drawn(seed: int | None) -> dict[int, tuple[float, ...]]:
    """Return the random numbers that two workers of a run draw, by worker number."""
    graph = Graph("r9")
    found = graph.stage(each, graph.source([]), workers=2, on="process").collect()
    return {here.number: tuple(numbers) for here, *numbers in graph.run(seed=seed)[found]}


@pytest.mark.usefixtures("_method")
def test_workers_draw_different_numbers_and_equal_seeds_repeat_them() -> None:
    # use the generators first, because a forked process inherits a copy of their state
    random.random(), np.random.rand()
    first, again, other = drawn(7), drawn(7), drawn(8)
    assert first == again
    assert len(all_of(first, other)) == 2 * 2 * 2


def test_runs_without_a_seed_draw_different_numbers() -> None:
    assert len(all_of(drawn(None), drawn(None))) == 2 * 2 * 2


def all_of(*runs: dict[int, tuple[float, ...]]) -> set[float]:
    """Return all distinct numbers drawn in several runs."""
    return {number for run in runs for numbers in run.values() for number in numbers}


LAZY = """
    import multiprocessing, sys
    from flowchan import Graph

    def lazily(_):
        import numpy
        assert "NAME" not in sys.modules, "this test shows nothing"
        import NAME
        return float(NAME.rand(1)[0])

    if __name__ == "__main__":
        multiprocessing.set_start_method("METHOD")
        graph = Graph("lazy")
        result = graph.source([0]).map(lazily, on="process").collect()
        one, again, other = (graph.run(seed=seed)[result] for seed in (1, 1, 2))
        print(one == again, one != other)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_library_imported_only_by_the_worker_is_seeded(method: str, tmp_path: Path) -> None:
    text = LAZY.replace("METHOD", method).replace("NAME", "numpy.random")
    assert run_python(script(tmp_path, text)) == "True True\n"


TORCH = """
    import multiprocessing, sys
    from flowchan import Graph, worker

    def is_seeded(_):
        import torch
        drawn = torch.rand(1)
        torch.manual_seed(worker().seed)
        return bool(drawn == torch.rand(1))

    def run():
        graph = Graph("seeded")
        result = graph.source([0]).map(is_seeded, on="process").collect()
        return graph.run()[result]

    if __name__ == "__main__":
        multiprocessing.set_start_method("fork")
        imported = run()
        assert "torch" not in sys.modules, "this test shows nothing"
        import torch
        torch.rand(1)
        print(imported, run())
"""


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed: pip install torch")
def test_torch_is_seeded_after_a_fork_or_import(tmp_path: Path) -> None:
    assert run_python(script(tmp_path, TORCH)) == "[True] [True]\n"


@everywhere
def test_worker_knows_its_stage_and_number(on: Any) -> None:
    graph = Graph("r9")
    results = graph.source(range(100)).map(ask, on=on, workers=2, ordered=False).collect()
    run = graph.start(seed=5)
    found = set(run.wait()[results])
    assert found <= {Worker("ask", number, 2, seed_of(5, "ask", number, 0), 0) for number in (1, 2)}
    assert run.stats().seed == 5
    assert "seed 5" in run.report().splitlines()[0]


def test_seeds_differ_by_run_stage_number_and_incarnation() -> None:
    seeds = {
        seed_of(run, stage, number, incarnation)
        for run in range(5)
        for stage in ("a", "b", "a1")
        for number in range(1, 5)
        for incarnation in range(3)
    }
    assert len(seeds) == 5 * 3 * 4 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_use_all_63_bits() -> None:
    seeds = [seed_of(run, "a", 1, 0) for run in range(200)]
    for bit in range(63):
        assert {seed >> bit & 1 for seed in seeds} == {0, 1}


def test_text_of_a_worker_has_its_stage_number_and_host() -> None:
    def texts() -> Iterator[str]:
        yield worker_text()
        enter(Worker("map", 2, 3, seed=1))
        yield worker_text()
        enter(Worker("map", 2, 3, seed=1, host="gpu1"))
        yield worker_text()

    found = contextvars.Context().run(lambda: list(texts()))
    assert found == ["the worker", "the worker map 2", "the worker map 2 on host 'gpu1'"]
    assert worker_text() == "the worker"


def test_reported_seed_reproduces_the_random_numbers() -> None:
    graph = Graph("r9")
    found = graph.stage(each, graph.source([]), on="process").collect()
    run = graph.start()
    drawn = run.wait()[found]
    assert graph.run(seed=run.stats().seed)[found] == drawn


@everywhere
def test_constructor_of_a_callable_can_read_its_worker(on: Any) -> None:
    class Knows:
        def __init__(self) -> None:
            self.here = flowchan.worker()

        def __call__(self, _: int) -> bool:
            return self.here == flowchan.worker()

    graph = Graph("r9")
    results = graph.source([1, 2]).map(Knows, on=on).collect()
    assert graph.run()[results] == [True, True]


def test_tasks_of_an_async_stage_have_different_seeds() -> None:
    async def ask(_: int) -> Worker:
        await asyncio.sleep(0)
        return flowchan.worker()

    graph = Graph("r9")
    results = graph.source(range(100)).map(ask, workers=4).collect()
    found = set(graph.run()[results])
    assert found == {Worker("ask", here.number, 4, here.seed, 0) for here in found}
    assert len(found) == len({here.number for here in found}) == len({here.seed for here in found}) > 1


def test_source_merge_and_reduce_have_seeds() -> None:
    def number() -> Iterator[Worker]:
        yield flowchan.worker()

    graph = Graph("r9")
    streams = [graph.source(number, name=name).map(ask_too, name=f"{name} map") for name in ("one", "two")]
    last = graph.merge(*streams).reduce(lambda so_far, item: {*so_far, *item, flowchan.worker()}, set())
    stages = {(here.stage, here.number, here.workers) for here in graph.run()[last]}
    assert stages == {("one", 1, 1), ("two", 1, 1), ("one map", 1, 1), ("two map", 1, 1), ("reduce", 1, 1)}


def ask_too(before: Worker) -> set[Worker]:
    return {before, flowchan.worker()}


def test_thread_in_a_workers_process_belongs_to_the_worker() -> None:
    def ask_on_a_thread(_: int) -> bool:
        found: list[Worker] = []
        thread = threading.Thread(target=lambda: found.append(flowchan.worker()))
        thread.start()
        thread.join()
        return found == [flowchan.worker()]

    graph = Graph("r9")
    results = graph.source([1]).map(ask_on_a_thread, on="process").collect()
    assert graph.run()[results] == [True]


def test_calling_worker_outside_of_a_stage_raises() -> None:
    with pytest.raises(
        RuntimeError, match=r"flowchan.worker\(\) must be called in .*; no worker is running here"
    ):
        flowchan.worker()


@pytest.mark.usefixtures("_method")
def test_replacement_does_not_repeat_the_numbers_of_a_dead_worker(tmp_path: Path) -> None:
    (log := tmp_path / "drawn").touch()

    class Dies:
        def __init__(self) -> None:
            with log.open("a") as file:
                print(flowchan.worker().incarnation, random.random(), np.random.rand(), file=file)

        def __call__(self, item: int) -> int:
            if flowchan.worker().incarnation < 2:
                os._exit(1)
            return item

    graph = Graph("r9")
    results = graph.source([1]).map(Dies, on="process").collect()

    def lines() -> list[str]:
        assert graph.run(seed=3)[results] == [1]
        message = log.read_text().splitlines()
        log.write_text("")
        return message

    first = lines()
    assert [line.split()[0] for line in first] == ["0", "1", "2"]
    assert len({number for line in first for number in line.split()[1:]}) == 6
    assert lines() == first


def test_run_in_a_worker_has_its_own_seeds() -> None:
    def inner(_: int) -> list[Any]:
        graph = Graph("inner")
        found = graph.stage(each, graph.source([]), on="process", workers=2).collect()
        return [
            *graph.run(seed=flowchan.worker().seed)[found],
            (flowchan.worker(), random.random(), np.random.rand()),
        ]

    graph = Graph("outer")
    results = graph.source([1]).map(inner, on="process").collect()
    first, again = graph.run(seed=1)[results], graph.run(seed=1)[results]
    assert sorted(first[0], key=str) == sorted(again[0], key=str)
    assert len({drawn for one in first[0] for drawn in one}) == 9


@pytest.mark.parametrize("seed", [-1, 1.5, "7", True])
def test_seed_must_be_an_integer(seed: Any) -> None:
    graph = Graph("r9")
    graph.source([1]).collect()
    with pytest.raises((TypeError, ValueError), match="run: seed must be"):
        graph.run(seed=seed)


def test_run_command_accepts_and_reports_a_seed(tmp_path: Path) -> None:
    text = """
        import random
        from flowchan import Graph

        graph = Graph("dice")
        graph.source([6]).map(lambda sides: random.randrange(10**9), on="process").sink(print)
    """
    path = script(tmp_path, text)
    command = [
        sys.executable,
        "-c",
        "from flowchan.cli.commands import main; main()",
        "run",
        "--seed",
        "17",
        str(path),
    ]
    first, again = (subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2))
    assert "seed 17" in first.stdout
    assert first.stdout.splitlines()[0] == again.stdout.splitlines()[0]

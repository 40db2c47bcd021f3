"""Test ``graph.broadcast(initial)``: a value that the program changes while workers read it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Gate, everywhere, run_python, script

from flowchan import Broadcast, Channel, Graph, GraphError, In, Out, RunError
from flowchan.items import latest_value

pytestmark = pytest.mark.usefixtures("forked_programs")


class Asked:
    """Graph with workers that answer one item at a time with ``function``."""

    def __init__(self, graph: Graph, function: Callable[[Any], Any], **options: Any) -> None:
        self._items = graph.input()
        self._answers = self._items.map(function, **options).collect()
        self._graph = graph

    @contextlib.contextmanager
    def running(self) -> Iterator[Callable[[Any], Any]]:
        """Run the graph. Yield a function that puts one item and returns its answer."""
        with self._graph.start() as run:
            answers = run.iter(self._answers)

            def ask(item: Any) -> Any:
                run[self._items].put(item)
                return next(answers)

            yield ask


# --- reading ---


@pytest.mark.usefixtures("_method")
def test_processes_read_values_set_before_and_during_a_run() -> None:
    graph = Graph()
    value = graph.broadcast("initial")
    value.set("before")
    asked = Asked(graph, lambda _: value.read(), on="process", workers=2)
    with asked.running() as ask:
        assert ask(0) == ("before", 1)
        assert value.set("during") == 2
        assert [ask(item) for item in range(4)] == [("during", 2)] * 4


async def later(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


@everywhere
def test_coroutines_read_the_current_value(on: str) -> None:
    graph = Graph()
    value = graph.broadcast(0)

    async def read(_: int) -> tuple[int, int]:
        return await later(value.get()), value.version

    asked = Asked(graph, read, on=on, workers=2)
    with asked.running() as ask:
        for version in range(4):
            assert ask(None) == (version, version)
            value.set(version + 1)


@everywhere
def test_every_operator_that_calls_a_function_reads_the_value(on: str) -> None:
    graph = Graph()
    n = graph.broadcast(1)
    n.set(3)
    numbers = graph.source(range(6), on=on)
    first, others = numbers.filter(lambda item: item < n.get() + 2, on=on).tee(2)
    low, high = others.partition(lambda item: item >= n.get(), 2, on=on)
    ends = (
        first.flat_map(lambda item: [item] * n.get(), on=on).reduce(lambda a, b: a + b * n.get(), 0),
        low.collect(),
        high.collect(),
    )
    results = graph.run()
    assert [results[end] for end in ends] == [3 * 3 * sum(range(5)), [0, 1, 2], [3, 4]]


def test_threads_and_program_read_the_object_that_was_set() -> None:
    lock = threading.Lock()  # cannot be pickled
    graph = Graph()
    value = graph.broadcast(lock)
    found = graph.source([0]).map(lambda _: value.get()).collect()
    assert value.read() == (lock, 0)
    assert graph.run()[found] == [lock]


@everywhere
def test_stage_with_ports_reads_the_latest_version_each_time(on: str) -> None:
    graph = Graph()
    value = graph.broadcast("old")
    gate = Gate()

    def stage(items: In[int], out: Out[tuple[str, int]]) -> None:
        for _ in items:
            out.put(value.read())
            gate.wait()
            out.put(value.read())

    answers = graph.stage(stage, graph.source([0]), on=on).collect()
    with graph.start() as run:
        gate.wait_held()
        value.set("new")
        gate.open()
    assert run.wait()[answers] == [("old", 0), ("new", 1)]


# --- one version for each call ---


@everywhere
@pytest.mark.parametrize("workers", [1, 3])
def test_change_during_a_call_is_seen_by_the_next_call(on: str, workers: int) -> None:
    graph = Graph()
    value = graph.broadcast("old")
    gates = [Gate(), Gate()]

    def read_twice(number: int) -> list[Any]:
        first = value.read()
        gates[number].wait()
        return [first, value.read(), (value.get(), value.version)]

    items = graph.input()
    answers = items.map(read_twice, on=on, workers=workers).collect()
    with graph.start() as run:
        run[items].put(0)
        gates[0].wait_held()
        value.set("new")
        gates[0].open()
        gates[1].open()
        run[items].put(1)
    assert run.wait()[answers] == [[("old", 0)] * 3, [("new", 1)] * 3]


@everywhere
def test_coroutines_of_one_stage_keep_their_own_versions(on: str) -> None:
    graph = Graph()
    value = graph.broadcast(0)
    begun: Channel[int] = Channel(4, across="processes")
    gate = Gate()

    async def read_twice(_: int) -> tuple[int, int]:
        first = value.get()
        await begun.aput(first)
        async for _ in gate.channel:
            raise AssertionError
        return first, value.get()

    items = graph.input()
    answers = items.map(read_twice, on=on, workers=3).collect()
    with graph.start() as run:
        for version in range(3):
            run[items].put(version)
            assert begun.get() == version
            value.set(version + 1)
        gate.open()
    assert run.wait()[answers] == [(0, 0), (1, 1), (2, 2)]


@everywhere
def test_flat_map_reads_one_version_for_each_item(on: str) -> None:
    graph = Graph()
    value = graph.broadcast(0)
    gate = Gate()

    def outputs(_: int) -> Iterator[int]:
        yield value.get()
        gate.wait()
        yield value.get()

    items = graph.input()
    answers = items.flat_map(outputs, on=on).collect()
    with graph.start() as run:
        run[items].put(0)
        gate.wait_held()
        value.set(1)
        gate.open()
        run[items].put(0)
    assert run.wait()[answers] == [0, 0, 1, 1]


@everywhere
def test_retry_reads_the_version_that_is_current_at_its_start(on: str) -> None:
    graph = Graph()
    value = graph.broadcast("bad")
    gate = Gate()

    def check(_: int) -> tuple[str, int]:
        if value.get() == "bad":
            gate.wait()
            raise ValueError(value.get())
        return value.read()

    answers = graph.source([0]).map(check, on=on, retries=1).collect()
    with graph.start() as run:
        gate.wait_held()
        value.set("good")
        gate.open()
    assert run.wait()[answers] == [("good", 1)]


def test_versions_are_whole_while_the_program_sets_them_quickly() -> None:
    """Every version is a list of equal numbers, so a mixture of two versions would show."""
    graph = Graph()
    value = graph.broadcast([0] * 500)

    def read(_: int) -> tuple[int, set[int]]:
        numbers, version = value.read()
        return version, set(numbers)

    found = graph.source(range(3000)).map(read, on="process", workers=2, ordered=False).collect()
    with graph.start() as run:
        version = 0
        while run.state == "running" and version < 2000:
            version += 1
            value.set([version] * 500)
    answers = run.wait()[found]
    assert len(answers) == 3000
    assert all(numbers == {version} for version, numbers in answers)


# --- setting ---


@everywhere
def test_sink_on_a_thread_sets_a_computed_value(on: str) -> None:
    graph = Graph()
    total = graph.broadcast(0)
    graph.source(range(5)).map(lambda n: n * n, on=on).sink(total.set)
    graph.run()
    assert total.read() == (16, 5)


def test_worker_process_cannot_set_the_value() -> None:
    graph = Graph()
    value = graph.broadcast(0)
    graph.source([1]).sink(value.set, on="process")
    with pytest.raises(RunError) as failed:
        graph.run()
    assert "set must be called in the program; put the new value into a" in str(failed.value.exceptions[0])
    assert value.read() == (0, 0)


def test_value_that_cannot_be_sent_leaves_the_value_unchanged() -> None:
    graph = Graph()
    value: Broadcast[Any] = graph.broadcast("old")
    asked = Asked(graph, lambda _: value.read(), on="process")
    with asked.running() as ask:
        assert ask(0) == ("old", 0)
        with pytest.raises(TypeError, match="lock"):
            value.set(threading.Lock())
        with pytest.raises(TypeError, match="must not contain channels"):
            value.set([Channel(across="processes")])
        assert value.read() == ask(1) == ("old", 0)
        assert value.set("new") == 1
        assert ask(2) == ("new", 1)


def test_failure_to_write_a_version_leaves_the_value_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    value = graph.broadcast("old")
    asked = Asked(graph, lambda _: value.read(), on="process")

    def full(*_: object) -> int:
        raise OSError("no memory")

    with asked.running() as ask, monkeypatch.context() as patch:
        patch.setattr(latest_value.os, "pwrite", full)
        with pytest.raises(OSError, match="no memory"):
            value.set("new")
        assert ask(0) == value.read() == ("old", 0)


# --- workers that come later, other graphs and other processes ---


def test_replacement_of_a_killed_worker_reads_the_current_version() -> None:
    graph = Graph()
    value = graph.broadcast("old")
    gate = Gate()

    def work(item: int) -> tuple[int, str, int]:
        if value.version == 0 and item == 1:
            gate.wait()
        return os.getpid(), *value.read()

    items = graph.input()
    answers = items.map(work, on="process").collect()
    with graph.start() as run:
        found = run.iter(answers)
        run[items].put(0)
        pid, *first = next(found)
        run[items].put(1)
        gate.wait_held()
        value.set("new")
        os.kill(pid, signal.SIGKILL)
        replacement, *second = next(found)
    assert (first, second) == (["old", 0], ["new", 1])
    assert replacement != pid


@everywhere
def test_added_worker_reads_the_current_version(on: str) -> None:
    graph = Graph()
    value = graph.broadcast("old")
    gate = Gate()

    def work(item: int) -> tuple[str, int]:
        read = value.read()
        return gate.wait(read) if item == 0 else read

    items = graph.input()
    answers = items.map(work, on=on, name="work", ordered=False).collect()
    with graph.start() as run:
        found = run.iter(answers)
        run[items].put(0)
        gate.wait_held()
        value.set("new")
        run.scale("work", 2)
        run[items].put(1)
        assert next(found) == ("new", 1)
        gate.open()
        assert next(found) == ("old", 0)


@pytest.mark.usefixtures("_method")
def test_pool_reads_a_new_version_in_its_next_run() -> None:
    graph = Graph()
    value = graph.broadcast(0)
    found = graph.source([0]).map(lambda _: (value.get(), os.getpid()), on="process").collect()
    with graph.pool() as pool:
        [(first, pid)] = pool.run()[found]
        value.set(1)
        [(second, same)] = pool.run()[found]
    assert (first, second) == (0, 1)
    assert pid == same


def test_value_of_another_graph_raises_in_a_worker_process() -> None:
    other = Graph().broadcast("other")
    graph = Graph()  # this graph has the same name as the other graph
    graph.broadcast("own")
    graph.source([0]).sink(lambda _: other.get(), on="process")
    with pytest.raises(RunError) as failed:
        graph.run()
    assert "must be read in the program or in a worker of its graph" in str(failed.value.exceptions[0])


@everywhere
def test_graph_that_a_worker_runs_has_its_own_values(on: str) -> None:
    graph = Graph()
    outer = graph.broadcast("outer")

    def work(_: int) -> tuple[Any, ...]:
        inner = Graph()
        value = inner.broadcast("inner")
        found = inner.source([0]).map(lambda _: value.read(), on=on).collect()
        first = inner.run()[found]
        value.set("new")
        return outer.get(), first, inner.run()[found], value.get()

    answers = graph.source([0]).map(work, on="process").collect()
    assert graph.run()[answers] == [("outer", [("inner", 0)], [("new", 1)], "new")]


def test_value_raises_in_a_process_that_is_not_a_worker() -> None:
    value = pickle.loads(pickle.dumps(Graph("g").broadcast(1)))
    with pytest.raises(RuntimeError, match="<Broadcast 1 of graph 'g'> must be read in the program"):
        value.get()
    with pytest.raises(RuntimeError, match="set must be called in the program"):
        value.set(2)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_importable_module_declares_the_value_again_in_its_workers(tmp_path: Path, method: str) -> None:
    script(
        tmp_path,
        """
        from flowchan import Graph

        graph = Graph("declared")
        other = graph.broadcast("other")
        value = graph.broadcast("initial")

        def read(_):
            return value.read(), other.read()

        items = graph.input()
        answers = items.map(read, on="process").collect()
        """,
        "declared.py",
    )
    program = script(
        tmp_path,
        f"""
        import multiprocessing
        from declared import answers, graph, items, value

        if __name__ == "__main__":
            multiprocessing.set_start_method({method!r})
            with graph.start() as run:
                found = run.iter(answers)
                run[items].put(0)
                print(next(found))
                value.set("new")
                run[items].put(0)
                print(next(found))
        """,
    )
    assert run_python(program).splitlines() == [
        "(('initial', 0), ('other', 0))",
        "(('new', 1), ('other', 0))",
    ]


def test_forked_program_runs_the_graph_with_its_own_value() -> None:
    graph = Graph()
    value = graph.broadcast(0)
    found = graph.source([0]).map(lambda _: value.get(), on="process").collect()
    assert graph.run()[found] == [0]
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            value.set(5)
            os._exit(int(graph.run()[found] == [5]))
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert graph.run()[found] == [0]


# --- declarations that cannot run ---


def test_graph_with_a_stage_on_hosts_is_refused() -> None:
    graph = Graph()
    graph.broadcast(1)
    graph.source([1]).map(str, on="hosts").collect()
    messages = [problem.message for problem in graph.check() if "broadcast" in problem.message]
    assert messages == [
        "it runs on hosts, but the graph has a broadcast value, which only workers on this machine can read; "
        "use on='thread' or on='process', or send the value to the stage as items"
    ]


def test_unpicklable_value_is_refused_only_with_worker_processes() -> None:
    def declared(on: Any) -> Graph:
        graph = Graph("locks")
        graph.broadcast(threading.Lock())
        graph.source([1]).sink(hash, on=on)
        return graph

    declared("thread").run()
    with pytest.raises(GraphError, match=r"<Broadcast 1 .* can't be sent to a process: .*lock"):
        declared("process").run()

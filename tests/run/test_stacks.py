"""Test ``run.stacks``, which returns Python stacks, for workers in each state and placement."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from runs import Gate, everywhere, last_calls
from support.waiting import WAIT_LIMIT_S, wait_until

from flowchan import Graph, In
from flowchan.collective import Group
from flowchan.run.crew import process_stacks
from flowchan.run.policy.events import WorkerId

by_each_method = pytest.mark.usefixtures("_method")


def now_in(run: Any, stage: str, function: str) -> str:
    """Wait until the first worker of a stage is inside this function, and return the worker's stack."""
    found: list[str] = []

    def is_in() -> bool:
        found[:] = run.stacks(stage).values()
        return bool(found) and function in last_calls(found[0])

    wait_until(is_in, what=lambda: found)
    return found[0]


# --- states of a worker process ---


def asleep(gate: Gate) -> None:
    while not gate.channel.closed:
        time.sleep(0.01)


def computing(gate: Gate) -> None:
    while not gate.channel.closed:
        sum(range(1000))


def holding_the_gil(gate: Gate) -> None:
    """Hold the GIL, so that no Python code can run. ``PyDLL`` does not release it."""
    read_from_pipe(ctypes.PyDLL(None))


def reading(gate: Gate) -> None:
    """Block in a system call that the kernel restarts after the signal."""
    read_from_pipe(ctypes.CDLL(None))


def read_from_pipe(library: Any) -> None:
    end, _other = os.pipe()
    library.read(end, ctypes.create_string_buffer(1), 1)


def waiting(gate: Gate) -> None:
    gate.wait()


@by_each_method
@pytest.mark.parametrize("state", [asleep, computing, holding_the_gil, reading, waiting])
def test_stacks_show_current_line_of_worker_process(state: Callable[[Gate], None]) -> None:
    gate = Gate()
    graph = Graph("states")
    graph.source([gate]).sink(state, on="process", name="work")
    run = graph.start()
    text = now_in(run, "work", state.__name__)
    assert last_calls(text)[0] == "serving_stacks"
    assert __file__ in text
    # the first request for stacks has not interrupted the function
    assert state.__name__ in last_calls(run.stacks("work")["work 1"])
    gate.open()
    run.abort()
    if state in (holding_the_gil, reading):
        for process in run._crew.local.processes.values():
            process.kill()
    run.wait()


@everywhere
def test_stacks_show_source_lines_with_the_most_recent_call_last(on: str) -> None:
    gate = Gate()

    def work(item: int) -> int:
        return gate.wait(item)  # type: ignore[no-any-return]

    graph = Graph("lines")
    out = graph.source([1]).map(work, on=on, name="work").collect()
    with graph.start() as run:
        gate.wait_held()
        text = run.stacks("work")["work 1"]
        calls = last_calls(text)
        assert calls.index("work") < calls.index("wait")
        assert "    return gate.wait(item)" in text
        gate.open()
        assert run.wait()[out] == [1]


def test_stacks_of_extra_threads_in_a_process_are_separate() -> None:
    gate = Gate()

    def work(item: int) -> None:
        threading.Thread(target=helper, daemon=True).start()
        gate.wait()

    def helper() -> None:
        gate.wait()

    graph = Graph("threads")
    graph.source([1]).sink(work, on="process", name="work")
    with graph.start() as run:
        gate.wait_held(2)
        _, first, second = run.stacks("work")["work 1"].split("thread 0x")
        assert "work" in last_calls(first)
        assert "helper" in last_calls(second)
        gate.open()


# --- coroutines ---


def test_stacks_of_coroutines_include_all_awaited_calls() -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    async def inner() -> None:
        begun.release()
        while not go_on.is_set():
            await asyncio.sleep(0.001)

    async def steps() -> AsyncIterator[int]:
        await inner()
        yield 1

    async def work(item: int) -> None:
        async for _ in steps():
            pass

    graph = Graph("coroutines")
    graph.source([1]).sink(work, workers=2, name="work")
    with graph.start() as run:
        begun.acquire()
        found = run.stacks("work")
        go_on.set()
        run.wait()
    assert sorted(found) == ["work 1", "work 2"]
    busy, idle = sorted(found.values(), key=lambda text: "in work\n" not in text)
    assert last_calls(busy)[0] == last_calls(idle)[0] == "run_worker"
    assert "async for _ in steps():" in busy
    assert "in work\n" not in idle


def test_stack_of_coroutine_that_blocks_its_loop_shows_the_thread() -> None:
    gate = Gate()

    async def work(item: int) -> None:
        gate.wait()

    graph = Graph("blocking")
    graph.source([1]).sink(work, name="work")
    with graph.start() as run:
        gate.wait_held()
        calls = last_calls(run.stacks("work")["work 1"])
        gate.open()
    assert calls.index("work") < calls.index("wait")


# --- which workers ---


def test_stacks_return_one_entry_for_each_running_worker() -> None:
    gate = Gate()
    graph = Graph("several")
    numbers = graph.source(range(5), name="numbers").map(gate.wait, on="process", workers=2, name="first")
    numbers.map(abs, workers=11, name="second").sink(abs, name="third")
    with graph.start() as run:
        gate.wait_held(2)
        every = run.stacks()
        assert list(run.stacks(numbers)) == ["first 1", "first 2"]
        gate.open()
    second = [f"second {number}" for number in range(1, 12)]
    assert [name for name in every if not name.startswith("numbers")] == [
        "first 1", "first 2", *second, "third 1"
    ]  # fmt: skip


@pytest.mark.parametrize("stage", ["none", 3, Graph("other").source([1])])
def test_stacks_error_for_unknown_stage_lists_known_stages(stage: Any) -> None:
    graph = Graph("known")
    graph.input("in").sink(abs, name="out")
    with graph.start() as run, pytest.raises(KeyError) as caught:
        run.stacks(stage)
    assert "graph 'known'" in str(caught.value)
    if isinstance(stage, str):
        assert "its stages are 'in', 'out'" in str(caught.value)


@everywhere
def test_stacks_are_empty_after_the_run(on: str) -> None:
    graph = Graph("over")
    graph.source(range(3)).sink(abs, on=on)
    run = graph.start()
    run.wait()
    assert run.stacks() == {}


@pytest.mark.filterwarnings("ignore:.*still running")
def test_stacks_after_abort_show_threads_that_still_run(short_grace: None) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def stubborn(item: int) -> None:
        begun.set()
        go_on.wait()

    graph = Graph("stuck")
    graph.source([1]).sink(stubborn, name="stubborn")
    run = graph.start()
    begun.wait()
    run.abort()
    run.wait()
    assert "stubborn" in last_calls(run.stacks()["stubborn 1"])
    go_on.set()
    wait_until(lambda: not run.stacks())


def test_stacks_omit_process_that_was_killed() -> None:
    gate = Gate()
    graph = Graph("killed")
    graph.source([1]).sink(gate.wait, on="process", name="work")
    with graph.start() as run:
        gate.wait_held()
        (process,) = run._crew.local.processes.values()
        process.kill()
        process.ended(60)
        assert process_stacks.stacks_of_processes({WorkerId("work", 1): process}) == {}
        gate.open()


def test_stacks_return_one_entry_for_each_gang_member() -> None:
    gate = Gate()

    def members(numbers: In[int], group: Group) -> None:
        gate.wait()

    graph = Graph("gang")
    graph.stage(members, graph.source([1]), on="process", workers=2)
    with graph.start() as run:
        gate.wait_held(2)
        found = run.stacks("members")
        assert list(found) == ["members 1", "members 2"]
        assert all(last_calls(text)[-2:] == ["members", "wait"] for text in found.values())
        gate.open()


# --- many calls ---


@by_each_method
@pytest.mark.parametrize("callers", [1, 2])
def test_stacks_do_not_disturb_item_processing(callers: int) -> None:
    """The signals interrupt neither the user's code nor waits for channels."""

    def work(item: int) -> tuple[int, int]:
        end, other = os.pipe()
        os.write(other, b"x")
        assert os.read(end, 1) == b"x"
        os.close(end)
        os.close(other)
        return item, zlib.crc32(b"%d" % item)

    graph = Graph("calls")
    numbers = graph.input("numbers", capacity=8)
    done = numbers.map(work, on="process", workers=2, name="work").map(lambda pair: pair, name="same")
    out = done.collect()
    over = threading.Event()

    def feed() -> None:
        put = 0
        while not over.is_set():
            run[numbers].put(put)
            put += 1
        run[numbers].close()
        count.append(put)

    def ask() -> None:
        for _ in range(50 // callers):
            found = run.stacks("work")
            assert sorted(found) == ["work 1", "work 2"]
            texts.extend(found.values())

    count: list[int] = []
    texts: list[str] = []
    with graph.start() as run:
        assert run.ready(WAIT_LIMIT_S)
        feeder = threading.Thread(target=feed)
        feeder.start()
        askers = [threading.Thread(target=ask) for _ in range(callers)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        over.set()
        feeder.join()
        found = run.wait()[out]
    assert found == [(item, zlib.crc32(b"%d" % item)) for item in range(count[0])]
    assert len(texts) == 100
    assert all(last_calls(text)[0] == "serving_stacks" for text in texts)


def test_concurrent_callers_receive_complete_stacks() -> None:
    def work(gate: Gate) -> None:
        for _ in range(4):
            threading.Thread(target=deep, args=(20, gate), daemon=True).start()
        gate.wait()

    def deep(calls: int, gate: Gate) -> None:
        if calls:
            deep(calls - 1, gate)
        while not gate.channel.closed:
            pass

    def is_complete(text: str) -> bool:
        threads = text.split("thread 0x")[1:]
        if len(threads) < 5:  # the worker is still starting
            return False
        first, *others = threads
        return last_calls(first)[-1] == "wait" and [other.count(" in deep\n") for other in others] == [21] * 4

    def ask() -> None:
        texts.extend(run.stacks("work")["work 1"] for _ in range(25))

    gate, graph = Gate(), Graph("complete")
    graph.source([gate]).sink(work, on="process", name="work")
    texts: list[str] = []
    with graph.start() as run:
        wait_until(lambda: any(map(is_complete, run.stacks("work").values())), what=run.stacks)
        askers = [threading.Thread(target=ask) for _ in range(4)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        gate.open()
    assert len(texts) == 100
    assert all(map(is_complete, texts))


def test_stacks_include_a_worker_added_later() -> None:
    gate = Gate()
    graph = Graph("added")
    items = graph.input()
    items.sink(gate.wait, on="process", name="work")
    with graph.start() as run:
        run.scale("work", 2)
        wait_until(lambda: sorted(run.stacks("work")) == ["work 1", "work 2"], what=run.stacks)
        gate.open()


# --- pools ---


def test_stacks_show_pooled_workers_in_each_run() -> None:
    gates = [Gate(), Gate()]
    graph = Graph("pooled")
    items = graph.input()
    items.sink(lambda number: gates[number].wait(), on="process", name="work")
    with graph.pool() as pool:
        for number, gate in enumerate(gates):
            with pool.start() as run:
                run[items].put(number)
                gate.wait_held()
                calls = last_calls(run.stacks("work")["work 1"])
                assert calls[:2] == ["serving_stacks", "pooled_main"]
                assert calls[-2:] == ["<lambda>", "wait"]
                gate.open()

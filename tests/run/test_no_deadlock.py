"""Test that a run continues if it only looks deadlocked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from runs import Gate, feedback, together, waits
from support.waiting import wait_until

from flowchan import Channel, Graph, In, Out, Run, _core, select
from flowchan.run import supervisor
from flowchan.run.policy import deadlock


def same(item: Any) -> Any:
    return item


def goes_on(run: Run, checks: Callable[[], int]) -> bool:
    """Return whether the run is still active after enough checks to find a deadlock."""
    after = checks() + 10
    wait_until(lambda: checks() > after or run._supervisor.ended.is_set())
    return run.stats().state == "running"


def test_slow_stage_is_not_a_deadlock(checks: Callable[[], int]) -> None:
    """All workers wait except one, whose processing changes no count."""
    gate = Gate()
    graph = Graph("slow")
    out = graph.source(range(5), capacity=1).map(lambda _: gate.wait(), capacity=1).map(same)
    result = out.collect()
    run = graph.start()
    waiting = threading.Thread(target=run.wait)
    waiting.start()
    gate.wait_held()
    assert goes_on(run, checks)
    gate.open()
    waiting.join()
    assert run.wait()[result] == [None] * 5


def test_worker_waiting_in_its_own_channel_is_not_a_deadlock(checks: Callable[[], int]) -> None:
    """A thread outside of the graph may put an item into the worker's own channel."""
    own: Channel[int] = Channel()
    graph = Graph("outside")
    result = graph.source(range(3)).map(lambda item: item + own.get()).collect()
    run = graph.start()
    waiting = threading.Thread(target=run.wait)
    waiting.start()
    wait_until(lambda: own.stats().waiting_readers == 1)
    assert goes_on(run, checks)
    own.put_many([10, 20, 30])
    waiting.join()
    assert run.wait()[result] == [10, 21, 32]


def test_batch_with_a_timeout_is_not_a_deadlock(checks: Callable[[], int]) -> None:
    """The batch is put when its timeout has passed, and then all workers continue."""
    graph = Graph("patient")
    left, right = graph.source(range(2)).tee(2, capacity=1)
    result = left.batch(4, timeout=1).zip(right).collect()
    run = graph.start()
    waiting = threading.Thread(target=run.wait)
    waiting.start()
    waits(run, left.name, readers=1)
    waits(run, right.name, writers=1)
    assert goes_on(run, checks)
    waiting.join()
    pairs = run.wait()[result]
    assert [item for batch, _ in pairs for item in batch] == [0, 1][: sum(len(batch) for batch, _ in pairs)]
    assert [number for _, number in pairs] == list(range(len(pairs)))


async def a_timer(items: In[int]) -> list[int]:
    """Wait for an item, with a time limit each time."""
    while True:
        try:
            return [await asyncio.wait_for(items.aget(), 0.2)]
        except TimeoutError:
            if over[0].is_set():
                return []


async def a_sleeping_task(items: In[int]) -> list[int]:
    """Wait for an item while another task in the event loop continues."""
    waiting = asyncio.create_task(items.aget())

    async def tick() -> None:
        while not over[0].is_set():
            await asyncio.sleep(0.01)
        waiting.cancel()

    await asyncio.gather(tick(), waiting, return_exceptions=True)
    return []


async def a_thread(items: In[int]) -> list[int]:
    """Wait for an item until a helper thread schedules a callback."""
    waiting = asyncio.create_task(items.aget())
    helping = asyncio.get_running_loop().run_in_executor(None, over[0].wait)
    helping.add_done_callback(lambda _: waiting.cancel())
    await asyncio.gather(waiting, return_exceptions=True)
    return []


async def a_socket(items: In[int]) -> list[int]:
    """Wait for an item until a socket triggers a callback."""
    waiting = asyncio.create_task(items.aget())
    here, there = socket.socketpair()
    with here, there:
        threading.Thread(target=lambda: (over[0].wait(), there.send(b"!"))).start()
        asyncio.get_running_loop().add_reader(here, waiting.cancel)
        await asyncio.gather(waiting, return_exceptions=True)
        asyncio.get_running_loop().remove_reader(here)
    return []


async def an_event(items: In[int]) -> list[int]:
    """Wait for an event that is not set by any channel."""
    rings = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=lambda: (over[0].wait(), loop.call_soon_threadsafe(rings.set))).start()
    waiting = asyncio.create_task(items.aget())
    await rings.wait()
    waiting.cancel()
    return []


over: list[threading.Event] = []  # set by each test, to end the functions above


@pytest.mark.parametrize("works", [a_timer, a_sleeping_task, a_thread, a_socket, an_event])
def test_async_stage_with_other_work_is_not_a_deadlock(works: Any, checks: Callable[[], int]) -> None:
    """All workers are waiting for an item, but the async stage has other work."""
    over[:] = [threading.Event()]

    async def first(back: In[int], out: Out[int]) -> None:
        for number in await works(back):
            await out.aput(number)

    run = feedback(first).start()
    waits(run, "first", readers=1)
    wait_until(lambda: run.stats().edges[0].waiting_readers + run.stats().edges[1].waiting_readers == 2)
    assert goes_on(run, checks)
    over[0].set()
    run.wait()


def test_worker_that_awaits_another_task_counts_as_working(checks: Callable[[], int]) -> None:
    """The other task may even await a channel, because only the worker's own task is examined."""

    async def first(back: In[int], out: Out[int]) -> None:
        waiting = asyncio.create_task(back.aget())
        await asyncio.gather(waiting, return_exceptions=True)

    run = feedback(first).start()
    waits(run, "first", readers=1)
    wait_until(lambda: run.stats().edges[0].waiting_readers + run.stats().edges[1].waiting_readers == 2)
    assert goes_on(run, checks)
    run.abort()
    run.wait()


def test_coroutine_with_a_time_limit_is_not_a_deadlock(checks: Callable[[], int]) -> None:
    """The task awaits the channel itself, and only its event loop knows the time limit."""
    over = threading.Event()

    async def first(back: In[int], out: Out[int]) -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await back.aget()

    run = feedback(first).start()
    waits(run, "first", readers=1)
    assert goes_on(run, checks)
    over.set()
    run.wait()


@together
def test_loop_that_awaits_an_outside_future_is_not_a_deadlock(
    together: Callable[..., Any], checks: Callable[[], int]
) -> None:
    """The future is awaited together with the channel, in different ways."""
    over = threading.Event()

    async def first(back: In[int], out: Out[int]) -> None:
        loop = asyncio.get_running_loop()
        outside, item = loop.create_future(), asyncio.ensure_future(back.aget())
        outside.add_done_callback(lambda _: item.cancel())
        threading.Thread(
            target=lambda: (over.wait(), loop.call_soon_threadsafe(outside.set_result, None))
        ).start()
        with contextlib.suppress(asyncio.CancelledError):
            await together(outside, item)

    run = feedback(first).start()
    waits(run, "first", readers=1)
    wait_until(lambda: run.stats().edges[0].waiting_readers + run.stats().edges[1].waiting_readers == 2)
    assert goes_on(run, checks)
    over.set()
    run.wait()


def test_coroutines_that_await_their_own_channel_are_not_a_deadlock(checks: Callable[[], int]) -> None:
    own: Channel[int] = Channel()

    async def add(item: int) -> int:
        return item + await own.aget()

    graph = Graph("outside")
    result = graph.source(range(3)).map(add).collect()
    run = graph.start()
    waiting = threading.Thread(target=run.wait)
    waiting.start()
    wait_until(lambda: own.stats().waiting_readers == 1)
    assert goes_on(run, checks)
    own.put_many([10, 20, 30])
    waiting.join()
    assert run.wait()[result] == [10, 21, 32]


def test_stopped_process_is_not_a_deadlock(checks: Callable[[], int]) -> None:
    """The process was woken but is stopped until SIGCONT, while the other workers wait for it."""
    graph = Graph("stopped")
    numbers = graph.input(capacity=1)
    result = numbers.map(same, on="process", restarts=0).collect()
    run = graph.start()
    waiting = threading.Thread(target=run.wait)
    waiting.start()
    waits(run, numbers.name, readers=1)
    ((process,),) = [run._crew.local.processes.values()]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    run[numbers].put(1)
    run[numbers].close()
    assert goes_on(run, checks)
    os.kill(process.pid, signal.SIGCONT)
    waiting.join()
    assert run.wait()[result] == [1]


def test_open_input_is_not_a_deadlock(checks: Callable[[], int]) -> None:
    graph = Graph("open")
    numbers = graph.input()
    total = numbers.map(same, workers=3).reduce(int.__add__, 0)
    with graph.start() as run:
        waits(run, numbers.name, readers=3)
        assert goes_on(run, checks)
        run[numbers].put(5)
    assert run.wait()[total] == 5


def test_unread_results_are_not_a_deadlock(checks: Callable[[], int]) -> None:
    graph = Graph("later")
    result = graph.source(range(100), capacity=1).map(same, capacity=1).collect()
    run = graph.start()
    waits(run, "source", writers=1)
    goes_on(run, checks)  # the run may already be done, because it also stores unread results
    assert run.wait()[result] == list(range(100))


def test_pause_of_the_user_between_results_is_not_a_deadlock(checks: Callable[[], int]) -> None:
    graph = Graph("paused")
    result = graph.source(range(100), capacity=1).map(same, capacity=1).collect()
    with graph.start() as run:
        items = run.iter(result)
        assert next(items) == 0
        waits(run, "source", writers=1)
        assert goes_on(run, checks)
        assert list(items) == list(range(1, 100))


def test_stage_that_waits_in_select_is_not_a_deadlock(checks: Callable[[], int]) -> None:
    """The stage selects from its input and from a channel that is not part of the graph.

    The stage must not be counted as two waiting workers, because another stage is working.
    """
    own: Channel[int] = Channel()

    def choose(items: In[int], out: Out[int]) -> None:
        out.put(select([items, own]).item)

    graph = Graph("selecting")

    def silent(out: Out[int]) -> None:
        gate.wait()

    gate = Gate()
    result = graph.stage(choose, graph.stage(silent)).collect()
    run = graph.start()
    waiting = threading.Thread(target=run.wait)
    waiting.start()
    wait_until(lambda: own.stats().waiting_readers == 1)
    gate.wait_held()
    assert goes_on(run, checks)
    own.put(7)
    gate.open()
    waiting.join()
    assert run.wait()[result] == [7]


def test_stage_waiting_with_several_threads_counts_as_one_worker(checks: Callable[[], int]) -> None:
    """One worker waits at two ports with two threads while another worker is working.

    Two waiting threads must not count as two waiting workers.
    """
    gate = Gate()

    def both(left: In[int], right: In[int], out: Out[int]) -> None:
        helper = threading.Thread(target=lambda: out.put_many(right))
        helper.start()
        out.put_many(left)
        helper.join()

    def hold(left: Out[int], right: Out[int]) -> None:
        gate.wait()
        left.put(1)
        right.put(2)

    graph = Graph("threads")
    left, right = graph.stage(hold)
    graph.stage(both, left, right).sink(same)
    run = graph.start()
    waits(run, left.name, readers=1)
    waits(run, right.name, readers=1)
    assert goes_on(run, checks)
    gate.open()
    run.wait()


def test_supervisor_of_a_waiting_run_makes_few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check does not compute the statistics of all stages, and nothing else wakes the supervisor."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            counts[name] += 1
            return real(*arguments)

        monkeypatch.setattr(owner, name, counted)

    monkeypatch.setattr(deadlock, "STILL", 0.02)
    monkeypatch.setattr(supervisor, "POLL_INTERVAL_S", 0.0001)
    graph = Graph("idle")
    numbers = graph.input()
    stream = numbers
    for _ in range(50):
        stream = stream.map(same)
    stream.sink(same)
    with graph.start() as run:
        wait_until(lambda: sum(edge.waiting_readers for edge in run.stats().edges) == 51)
        for owner, name in (
            (supervisor, "summarise"),
            (_core, "_observe"),
            (run._crew, "cancel_tasks"),
        ):
            count(owner, name)
        wait_until(lambda: counts["_observe"] > 10)
        seen = Counter(counts)
        run[numbers].close()
    assert seen["summarise"] == 0
    assert seen["cancel_tasks"] <= seen["_observe"] + 2, "turns of its loop"


def test_run_that_makes_slow_progress_is_not_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The channels are tiny, all workers wait most of the time, and the supervisor checks continuously."""
    monkeypatch.setattr(deadlock, "STILL", 0.0)
    monkeypatch.setattr(supervisor, "POLL_INTERVAL_S", 0.0001)
    graph = Graph("moving")
    left, right = graph.source(range(300), capacity=1).tee(2, capacity=1)
    result = left.map(same, capacity=1).zip(right.map(same, capacity=1), capacity=1).collect()
    assert graph.run()[result] == [(item, item) for item in range(300)]

"""Test ``flowchan.pipelines`` with the cases from torch-ipc's tests.

They cover ``map``, ``workqueue``, ``channel``, ``mutex``, ``sharedtable``, ``marshal`` and background tasks.
Each test has the name of the original test but none of its code. Tensors are in
``test_torch_ipc_tensors.py``, trees in ``test_torch_ipc_trees.py``, clients and servers in
``tests/pipelines/test_client_server.py``.

The following cases differ from the originals:

``map``: ``testMultiple``, ``testMultipleWithN``
    A worker returns one value, for example a tuple; ``join()`` returns a list of these values.
``map``: ``testUpvalueError``, ``workqueue``: ``testClosures``, ``marshal``: ``testClosure``
    Closures are sent like other functions.
``channel``: ``statusEnumsSet``, ``flagsOnClosedChannel``
    The states are ``closed`` and ``drained``, and the exceptions are ``Closed`` and ``Drained``.
``mutex``: ``testLockingAndBarrier``
    A ``Lock`` and a ``Barrier`` replace the mutex.
``sharedtable``: ``testMove``, ``testPairs``
    The source keeps its entries, and ``items()`` yields the pairs.
Tensors
    Threads share tensors; processes share them after ``share_memory_()``.

The following cases are left out:

``flock``, ``spawn``
    The standard library has both: ``docs/patterns.md``.
``sharedtable``: ``testSize``
    ``sharedtable_size`` has no counterpart.
``marshal``: ``testSize``
    Buffers have no fixed size.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.waiting import wait_blocked, wait_until

from flowchan import Channel, Closed, Drained, Empty, RunError
from flowchan.pipelines import (
    BackgroundTask,
    Lock,
    SharedDict,
    TaskPool,
    map,  # noqa: A004
    marshal,
    workqueue,
)

everywhere = pytest.mark.parametrize("on", ["thread", "process"])


def across(on: str) -> Any:
    return "threads" if on == "thread" else "processes"


# --- test_map.lua ---


@everywhere
def test_map_single_and_multiple(on: Any) -> None:
    assert map(1, lambda worker: 42, on=on).join() == [42]
    values = {"a": [1, "x"]}
    assert map(1, lambda a, b, c, worker: (a, b, c), 1, "two", values, on=on).join() == [(1, "two", values)]


@everywhere
def test_map_single_with_n_and_multiple_with_n(on: Any) -> None:
    assert map(3, lambda a, worker: a, 7, on=on).join() == [7, 7, 7]
    assert map(2, lambda a, worker: (a, worker), 7, on=on).join() == [(7, 1), (7, 2)]


@everywhere
def test_map_nil_and_last_arg(on: Any) -> None:
    assert map(2, lambda a, worker: a, None, on=on).join() == [None, None]
    assert map(4, lambda a, worker: worker, None, on=on).join() == [1, 2, 3, 4]


@everywhere
def test_map_errors_and_more_errors(on: Any) -> None:
    def fail(worker: int) -> int:
        if worker == 1:
            raise LookupError("oops")
        return worker

    for workers in (1, 2):
        with pytest.raises(RunError) as caught:
            map(workers, fail, on=on).join()
        assert [str(one.__cause__) for one in caught.value.exceptions] == ["oops"]


@everywhere
def test_map_upvalue_error(on: Any) -> None:
    x, y = 1, [2]
    assert map(1, lambda worker: (x, y), on=on).join() == [(1, [2])]


@everywhere
def test_map_check_errors(on: Any) -> None:
    gate = Channel[None](1, across="processes")

    def work(gate: Channel[None], worker: int) -> int:
        if worker == 1:
            raise LookupError("oops")
        list(gate)
        return 42

    workers = map(2, work, gate, on=on)
    seen = []

    def failed() -> bool:
        try:
            workers.check_errors()
        except RunError as error:
            seen.append(error)
        return bool(seen)

    wait_until(failed)
    gate.close()
    assert workers.join() == [42]


def test_map_lua_check_stack() -> None:
    assert sum(map(200, lambda worker: worker).join()) == sum(range(201))


@everywhere
def test_map_big_arguments_and_big_returns(on: Any) -> None:
    table = {number: str(number) for number in range(1_000)}
    assert map(1, lambda table, worker: table, table, on=on).join() == [table]


# --- test_work_queue.lua ---


class Kind:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


@everywhere
@pytest.mark.parametrize(
    "value",
    [True, 1.5, "string", [1, [2]], {"a": {"b": 1}}, Kind(3)],
    ids=["Booleans", "Numbers", "Strings", "Arrays", "Tables", "MetaTables"],
)
def test_workqueue_values(on: Any, value: Any) -> None:
    queue = workqueue(across=across(on))
    worker = map(1, echo, queue, on=on)
    queue.put(value)
    queue.close()
    assert list(queue) == [value]
    worker.join()


def echo(queue: Any, worker: int) -> None:
    for item in queue:
        queue.put(item)


@everywhere
def test_workqueue_functions_and_closures(on: Any) -> None:
    queue, factor = workqueue(across=across(on)), 3
    worker = map(1, lambda queue, worker: [queue.put(fn(14)) for fn in queue], queue, on=on)
    queue.put_many([lambda n: n * factor, abs])
    queue.close()
    assert list(queue) == [42, 14]
    worker.join()


@everywhere
def test_workqueue_drain_and_multi_write(on: Any) -> None:
    queue = workqueue(across=across(on))
    worker = map(1, echo, queue, on=on)
    queue.put_many(range(13))
    queue.drain()
    assert [queue.get_nowait() for _ in range(13)] == list(range(13))
    with pytest.raises(Empty):
        queue.get_nowait()
    queue.close()
    worker.join()


@everywhere
def test_workqueue_dual_stalls(on: Any) -> None:
    """The owner puts all items before it gets any, and no worker blocks forever."""
    queue = workqueue(across=across(on), capacity=2)
    worker = map(1, echo, queue, on=on)
    queue.put_many(range(100))
    queue.close()
    worker.join()
    assert sum(queue) == sum(range(100))


def test_workqueue_anon_and_check_creator() -> None:
    queue, lock = workqueue(), Lock()
    with lock:
        worker = map(
            1, lambda queue, lock, worker: (lock.acquire(), lock.release(), list(queue)), queue, lock
        )
        queue.close()
    worker.join()
    first = workqueue("torch-ipc's")
    assert first.creator
    assert map(1, lambda worker: workqueue("torch-ipc's").creator).join() == [False]
    first.close()


# --- test_channel.lua ---


def test_status_enums_set_and_flags_on_closed_channel() -> None:
    empty, ch = Channel[str](), Channel[str]()
    assert (empty.closed, empty.drained) == (False, False)
    for _ in range(2):
        empty.close()
    assert (empty.closed, empty.drained) == (True, True)
    ch.put("foo")
    ch.close()
    assert (ch.closed, ch.drained, len(ch)) == (True, False, 1)
    with pytest.raises(Closed):
        ch.put("bar")
    assert ch.get() == "foo"
    for end in (ch.get, ch.get_nowait):
        with pytest.raises(Drained):
            end()
    assert len(ch) == 0


@everywhere
def test_open_read_write_same_thread_and_multi_write(on: Any) -> None:
    ch = Channel[Any](across=across(on))
    for value in (10, None):
        ch.put(value)
        assert len(ch) == 1
        assert ch.get_nowait() is value
    ch.put_many(range(12))
    assert (len(ch), ch.get_many(12)) == (12, list(range(12)))


@everywhere
def test_open_read_write_different_thread(on: Any) -> None:
    ch = Channel[Any](across=across(on))
    map(1, lambda ch, worker: ch.put_many([True, 10, "foo"]), ch, on=on).join()
    assert map(1, lambda ch, worker: ch.get_many(3), ch, on=on).join() == [[True, 10, "foo"]]


@everywhere
def test_send_channel_in_channel(on: Any) -> None:
    outer, inner = Channel[Any](across=across(on)), Channel[Any](across=across(on))
    echoing = map(1, lambda outer, worker: outer.get().put_many([1, "x", None]), outer, on=on)
    outer.put(inner)
    echoing.join()
    assert inner.get_many(3) == [1, "x", None]


@everywhere
def test_channel_closed_while_producers_waiting(on: Any) -> None:
    """In the original, the waiting threads also read."""
    number = 10 if on == "thread" else 3
    ch = Channel[Any](across=across(on))
    readers = map(number, lambda ch, worker: list(ch), ch, on=on)
    wait_blocked(ch, readers=number)
    ch.close()
    assert readers.join() == [[]] * number


@everywhere
def test_channels_as_work_queue(on: Any) -> None:
    generators = 10 if on == "thread" else 2
    questions, answers = Channel[int](across=across(on)), Channel[int](10_000, across=across(on))
    asking = map(generators, lambda ch, worker: ch.put_many(range(100)), questions, on=on)
    working = map(3, lambda q, a, worker: a.put_many(q), questions, answers, on=on)
    asking.join()
    questions.close()
    working.join()
    answers.close()
    assert sorted(answers) == sorted(list(range(100)) * generators)


@everywhere
def test_ping_pong(on: Any) -> None:
    ping, pong = Channel[int](across=across(on)), Channel[int](across=across(on))
    echoing = map(1, lambda ping, pong, worker: (pong.put_many(ping), pong.close()), ping, pong, on=on)
    for number in range(10):
        ping.put(number)
        assert pong.get() == number
    ping.close()
    assert list(pong) == []
    echoing.join()


# --- test_sharedtable.lua ---


def test_sharedtable_count_move_empty_read_and_pairs() -> None:
    source = {"a": 1, 2: "two"}
    table = SharedDict(source)
    assert len(table) == len(source) == 2
    assert (table["a"], table[2]) == (1, "two")
    assert sorted(table.items(), key=str) == sorted(source.items(), key=str)
    assert len(SharedDict[str, int]()) == 0


@everywhere
def test_sharedtable_write_and_write_on_other(on: Any) -> None:
    def write(table: SharedDict[Any, Any], worker: int) -> None:
        table["n"] = worker
        table[worker] = True

    table = SharedDict[Any, Any]()
    map(4, write, table, on=on).join()
    assert len(table) == 5


@everywhere
def test_sharedtable_multiple_writes_and_table_increment(on: Any) -> None:
    def add(table: SharedDict[str, Any], worker: int) -> None:
        for number in range(10):
            with table.lock:
                table[f"{number}"] = table.get(f"{number}", 0) + 1
            table["inner"].increment("n")

    table = SharedDict[str, Any]({"inner": SharedDict[str, int]()})
    map(3, add, table, on=on).join()
    assert [table[f"{number}"] for number in range(10)] == [3] * 10
    assert table["inner"]["n"] == 30


# --- test_marshalled.lua ---


@everywhere
def test_marshal_write_read_map_table_and_closure(on: Any) -> None:
    number = 20
    handle = marshal({"n": 23, "fn": lambda n: n + number})
    for _ in range(3):
        assert handle.read()["n"] == 23
    assert map(2, lambda handle, worker: handle.read()["fn"](worker), handle, on=on).join() == [21, 22]
    handle.close()
    with pytest.raises(Closed):
        handle.read()


@everywhere
def test_marshal_workqueue(on: Any) -> None:
    queue, handle = workqueue(across=across(on)), marshal(43)
    workers = map(2, lambda queue, worker: [queue.put(one.read()) for one in queue], queue, on=on)
    queue.put_many([handle] * 5)
    queue.close()
    assert list(queue) == [43] * 5
    workers.join()
    handle.close()


# --- test_BackgroundTask.lua, test_BackgroundTaskPool.lua ---


@everywhere
def test_background_task(on: Any) -> None:
    """The test combines ``testSimple``, ``testPolling``, ``testNoReturns`` and the two error tests."""
    gate = Channel[None](1, across="processes")
    task = BackgroundTask(lambda: (list(gate), 42)[1], on=on)
    assert not task.done()
    gate.close()
    wait_until(task.done)
    assert task.result() == 42
    task.close()
    nothing, failing = BackgroundTask(lambda: None, on=on), BackgroundTask(lambda: [][1], on=on)
    assert nothing.result() is None
    wait_until(failing.done)
    with pytest.raises(IndexError):
        failing.result()
    nothing.close()
    failing.close()


@everywhere
def test_background_task_pool(on: Any) -> None:
    """The test combines ``testSimple``, ``testPolling``, ``testError`` and ``testErrorPolling``."""
    with TaskPool(2, on=on) as pool:
        tasks = [pool.submit(divmod, 10, number) for number in range(5)]
        wait_until(lambda: all(task.done() for task in tasks))
    with pytest.raises(ZeroDivisionError):
        tasks[0].result()
    assert [task.result() for task in tasks[1:]] == [divmod(10, number) for number in range(1, 5)]

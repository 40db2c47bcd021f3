"""Test ``marshal``: an object is serialised once, and many workers read it many times."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
from support.waiting import wait_stats

from flowchan import Channel, Closed
from flowchan.pipelines import Marshalled, map, marshal, workqueue  # noqa: A004

everywhere = pytest.mark.parametrize("on", ["thread", "process"])


class Counted:
    """Object that counts how many times it is pickled."""

    pickled = 0

    def __reduce__(self) -> Any:
        Counted.pickled += 1
        return Counted, ()


def test_marshalled_object_can_be_read_many_times() -> None:
    handle = marshal(23)
    assert [handle.read() for _ in range(3)] == [23, 23, 23]


def test_marshalled_object_is_serialised_once() -> None:
    Counted.pickled = 0
    handle = marshal([Counted()])
    for _ in range(5):
        handle.read()
    assert Counted.pickled == 1


def test_every_read_returns_a_new_object() -> None:
    handle = marshal({"list": [1], "array": np.zeros(10_000)})
    first = handle.read()
    first["list"].append(2)
    second = handle.read()
    assert second["list"] == [1]
    assert second["array"] is not first["array"]


@everywhere
def test_several_workers_can_read_and_return_a_marshalled_object(on: Any) -> None:
    def read(handle: Marshalled[Any], worker: int) -> tuple[Any, Marshalled[Any]]:
        return handle.read(), handle

    handle = marshal((1, "two", None))
    for value, returned in map(2, read, handle, on=on).join():
        assert value == returned.read() == (1, "two", None)
    assert handle.read() == (1, "two", None)


@everywhere
def test_one_handle_can_be_sent_many_times(on: Any) -> None:
    queue = workqueue(across="processes")

    def work(queue: Any, worker: int) -> None:
        for handle in queue:
            queue.put(handle.read())

    running = map(2, work, queue, on=on)
    handle = marshal(43)
    queue.put_many([handle] * 5)
    queue.close()
    assert list(queue) == [43] * 5
    running.join()


def test_functions_and_closures_can_be_read_several_times() -> None:
    factor = 3
    handle = marshal({"times": lambda number: factor * number, 1: [True, None, {"deep": "er"}]})
    for _ in range(3):
        found = handle.read()
        assert found["times"](14) == 42
        assert found[1] == [True, None, {"deep": "er"}]


@everywhere
def test_many_workers_read_equal_arrays(on: Any) -> None:
    array = np.arange(500_000.0).reshape(500, 1000)
    handle = marshal({"array": array, "view": array[:, ::2]})

    def total(handle: Marshalled[Any], worker: int) -> tuple[float, float, tuple[int, ...]]:
        found = [handle.read() for _ in range(3)][-1]
        return found["array"].sum(), found["view"].sum(), found["view"].shape

    assert map(3, total, handle, on=on).join() == [(array.sum(), array[:, ::2].sum(), (500, 500))] * 3


def test_none_and_large_objects_can_be_marshalled() -> None:
    assert marshal(None).read() is None
    assert marshal(list(range(100_000))).read() == list(range(100_000))


def test_read_after_close_raises() -> None:
    handle = marshal([1])
    handle.close()
    handle.close()
    with pytest.raises(Closed):
        handle.read()


def test_marshal_of_unpicklable_object_raises_at_the_call() -> None:
    with pytest.raises(TypeError, match="its item 'lock'"):
        marshal({"fine": 1, "lock": threading.Lock()})


def test_marshalled_object_can_be_read_after_a_reader_is_killed() -> None:
    handle = marshal("still here")
    held = Channel[None](1, across="processes")

    def hold() -> None:
        port = handle._channel.reader()
        port.get()
        held.put(None)
        signal.pause()

    pid = os.fork()
    if pid == 0:
        hold()
        os._exit(1)
    held.get()
    wait_stats(handle._channel, leased=1)
    os.kill(pid, signal.SIGKILL)
    assert handle.read() == "still here"
    os.waitpid(pid, 0)


def test_channels_in_marshalled_object_outlive_their_creator() -> None:
    """C14: each reader gets the channels, even after the kill of the process that created them."""
    handles: Channel[Any] = Channel(across="processes")

    def make() -> None:
        channel = Channel[str](across="processes")
        channel.put("inside")
        handles.put(marshal({"channel": channel}))
        os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=make)
    child.start()
    child.join()
    child.close()
    handle = handles.get()
    assert handle.read()["channel"].get() == "inside"
    handle.read()["channel"].close()
    assert handle.read()["channel"].closed

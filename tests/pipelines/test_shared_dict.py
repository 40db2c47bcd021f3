"""Test ``SharedDict``, a mapping shared by processes on one or several machines; each operation is atomic."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from typing import Any

import numpy as np
import pytest
from between import PEERS, between, everywhere, start

from flowchan import Channel
from flowchan.pipelines import Lock, SharedDict


def test_shared_dict_copies_its_initial_items() -> None:
    source = {"a": 1, "b": None}
    shared = SharedDict(source)
    assert len(shared) == len(source) == 2
    assert dict(shared) == shared.copy() == source
    assert len(SharedDict[str, int]()) == 0
    with pytest.raises((TypeError, ValueError)):
        SharedDict(3)  # type: ignore[arg-type]


@between
def test_shared_dict_is_a_mutable_mapping(across: Any) -> None:
    shared: SharedDict[Any, Any] = SharedDict({"a": 1}, across=across)
    shared["b"] = [2]
    assert shared["b"] == [2]
    assert "b" in shared
    assert "c" not in shared
    assert shared.get("c", 3) == 3
    del shared["a"]
    with pytest.raises(KeyError):
        shared["a"]
    shared.update({1: "x"}, y=2)
    assert list(shared.items()) == [("b", [2]), (1, "x"), ("y", 2)]
    assert shared.pop("y") == 2
    assert shared.pop("y", None) is None
    assert shared.setdefault(1, "other") == "x"
    assert shared.popitem() in [(1, "x"), ("b", [2])]
    assert len(shared) == 1
    shared.clear()
    assert not shared


def test_read_value_is_a_copy() -> None:
    shared = SharedDict({"list": [1]})
    shared["list"].append(2)
    assert shared["list"] == [1]


@everywhere
def test_workers_see_each_others_changes(across: Any, on: Any) -> None:
    def write(shared: SharedDict[Any, Any], worker: int) -> None:
        shared[worker] = 10 * worker

    shared: SharedDict[Any, Any] = SharedDict(across=across)
    start(on, 8, write, shared).join()
    assert sorted(shared.items()) == [(n, 10 * n) for n in range(1, 9)]


@everywhere
def test_changes_under_the_lock_are_atomic(across: Any, on: Any) -> None:
    def count(shared: SharedDict[str, int], worker: int) -> None:
        for _ in range(30):
            with shared.lock:
                shared["n"] += 1

    shared = SharedDict({"n": 0}, across=across)
    start(on, 4, count, shared).join()
    assert shared["n"] == 120


@everywhere
def test_locks_arrays_and_other_mappings_can_be_values(across: Any, on: Any) -> None:
    inner: SharedDict[int, int] = SharedDict(across=across)
    lock = Lock(across=across)
    items = {"lock": lock, "array": np.arange(20_000), "inner": inner}
    shared: SharedDict[str, Any] = SharedDict(items, across=across)

    def work(shared: SharedDict[str, Any], worker: int) -> int:
        with shared["lock"]:
            shared["last"] = worker
            shared["inner"][worker] = int(shared["array"].sum())
        return worker

    start(on, 3, work, shared).join()
    assert dict(inner) == dict.fromkeys((1, 2, 3), 199_990_000)


@everywhere
def test_increment_is_atomic_across_processes(across: Any, on: Any) -> None:
    def count(table: SharedDict[str, float], worker: int) -> None:
        for _ in range(25):
            table.increment("n")

    table: SharedDict[str, float] = SharedDict(across=across)
    start(on, 3, count, table).join()
    assert table["n"] == 75
    assert table.increment("n", by=-0.5) == 74.5
    table.increment("new", 2)
    assert table.copy() == {"n": 74.5, "new": 2}


def test_increment_of_wrong_type_changes_nothing() -> None:
    table = SharedDict({"word": "a"})
    with pytest.raises(TypeError):
        table.increment("word")
    assert table.copy() == {"word": "a"}


def test_failed_change_leaves_the_dict_unchanged() -> None:
    shared = SharedDict({"a": 1})
    with pytest.raises(KeyError):
        shared.pop("b")
    with pytest.raises(TypeError):
        shared[[]] = 1  # type: ignore[index]
    with pytest.raises(TypeError, match="pickle"):
        shared["lock"] = threading.Lock()  # type: ignore[assignment]
    assert shared.copy() == {"a": 1}


def test_shared_dict_across_hosts_rejects_local_values() -> None:
    """C13: the mapping stays unchanged."""
    shared: SharedDict[str, Any] = SharedDict({"a": 1}, across="hosts")

    def assign() -> None:
        for value in (Lock(), Channel(across="processes")):
            with pytest.raises(TypeError, match="across='hosts'"):
                shared["b"] = value

    assign()
    PEERS["hosts"](assign).result()
    assert shared.copy() == {"a": 1}


@between
@pytest.mark.parametrize("done", [False, True])
def test_change_is_complete_or_absent_if_its_process_dies(across: Any, done: bool) -> None:
    shared, reported = SharedDict({"n": 0}, across=across), Channel[None](1, across=across)

    def die() -> None:
        with shared.lock:
            if done:
                shared._cell.put({"n": pickle.dumps(1)})
            reported.put(None)
            signal.pause()

    child = PEERS[across](die)
    reported.get()
    child.kill()
    assert shared["n"] == int(done)
    shared["n"] += 1
    assert shared["n"] == 1 + int(done)
    child.join()


@between
def test_shared_dict_outlives_processes_that_use_it(across: Any) -> None:
    shared: SharedDict[int, int] = SharedDict(across=across)
    for number in range(3):
        PEERS[across](shared.update, {number: 1}).result()
    assert dict(shared) == {0: 1, 1: 1, 2: 1}


@everywhere
def test_mapping_held_only_by_another_mapping_can_be_changed(across: Any, on: Any) -> None:
    """Between two accesses, no process holds an object for the inner mapping."""
    outer = SharedDict({"inner": SharedDict[int, int](across=across)}, across=across)

    def change(outer: SharedDict[str, SharedDict[int, int]], worker: int) -> None:
        outer["inner"][worker] = worker
        outer["inner"].increment(0)

    start(on, 3, change, outer).join()
    outer["inner"][4] = 4
    assert sorted(outer["inner"].items()) == [(0, 3), (1, 1), (2, 2), (3, 3), (4, 4)]


def test_channels_in_shared_dict_outlive_their_creator() -> None:
    """C14: the process that assigned the channels was killed, and the mapping has been changed since."""
    shared: SharedDict[str, Any] = SharedDict()

    def assign() -> None:
        channel, inner = Channel[str](across="processes"), SharedDict[str, int]({"x": 1})
        channel.put("inside")
        shared.update({"a": [channel], "b": inner})
        os.kill(os.getpid(), signal.SIGKILL)

    PEERS["processes"](assign).join()
    shared["c"] = 3
    assert shared["c"] == 3
    assert shared["b"]["x"] == 1
    assert shared["a"][0].get() == "inside"

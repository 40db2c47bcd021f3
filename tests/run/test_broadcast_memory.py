"""Test that ``graph.broadcast`` values share large memory, free old versions and leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
from typing import Any

import pytest
from runs import Gate
from support.optional_packages import optional

from flowchan import Broken, Graph
from flowchan.items import latest_value


def memory_at(address: int) -> tuple[str, str]:
    """Return the inode and the file of the mapping that contains an address in this process."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if begin <= address < end:
                return line.split()[4], line.split(maxsplit=5)[5].strip()
    raise LookupError(hex(address))


def mapped_versions() -> set[str]:
    """Return the inodes of all versions of values that this process maps or holds open."""
    with open("/proc/self/maps") as maps:
        found = {line.split()[4] for line in maps if "memfd:flowchan value" in line}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd:flowchan value" in os.readlink(f"/proc/self/fd/{number}"):
                found.add(str(os.stat(f"/proc/self/fd/{number}").st_ino))
    return found


def test_workers_read_a_large_array_in_the_same_memory() -> None:
    numpy = optional("numpy")
    graph = Graph()
    value = graph.broadcast(numpy.arange(1_000_000))
    value.set(numpy.arange(1_000_000) + 1)

    def look(_: int) -> tuple[Any, ...]:
        array = value.get()
        return int(array[-1]), array.flags.writeable, memory_at(array.ctypes.data)

    found = graph.source(range(2)).map(look, on="process", workers=2).collect()
    first, second = graph.run()[found]
    assert first == second
    assert first[:2] == (1_000_000, False)
    assert first[2][1] == "/memfd:flowchan value (deleted)"


def test_workers_read_an_array_without_elements() -> None:
    numpy = optional("numpy")
    graph = Graph()
    value = graph.broadcast((numpy.zeros((0, 3)), numpy.arange(2)))
    shapes = graph.source(range(1)).map(lambda _: [a.shape for a in value.get()], on="process").collect()
    assert graph.run()[shapes] == [[(0, 3), (2,)]]


@pytest.mark.usefixtures("one_compute_thread")
def test_tensor_is_not_copied_until_a_worker_writes_it() -> None:
    torch = optional("torch")
    graph = Graph()
    value = graph.broadcast({"weight": torch.ones(1_000_000), "step": 7})

    def look(_: Any) -> tuple[Any, ...]:
        weight = value.get()["weight"]
        before = float(weight.sum()), memory_at(weight.data_ptr())[1]
        weight[:] = 5
        return before

    found = graph.source([0]).map(look, on="process").map(look, on="process").collect()
    assert graph.run()[found] == [(1_000_000.0, "/memfd:flowchan value (deleted)")]
    assert float(value.get()["weight"].sum()) == 1_000_000.0


def descriptors() -> list[str]:
    """Return the files of values that this process has open."""
    gc.collect()
    paths = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            found.append(os.readlink(path))
    return [name for name in found if "flowchan value" in name or "flowchan version" in name]


def run_with_deaths() -> None:
    graph = Graph()
    value = graph.broadcast(bytes(100_000))

    def work(item: int) -> int:
        value.get()
        if item % 5 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    lived = graph.source(range(10)).map(work, on="process", workers=2)
    lived.errors.sink(lambda failed: value.set(bytes(100_000)))
    results = lived.collect()
    assert graph.run()[results] == [1, 2, 3, 4, 6, 7, 8, 9]
    assert value.version == 2
    assert len(mapped_versions()) == 1


def test_killed_workers_leave_nothing_of_the_value() -> None:
    run_with_deaths()
    assert descriptors() == []


def test_reader_raises_broken_after_the_program_has_dropped_the_value() -> None:
    shared = latest_value.LatestValue(latest_value.Versioned(0, "a"))
    reader = pickle.loads(pickle.dumps(shared))
    assert reader.latest() == latest_value.Versioned(0, "a")
    late = pickle.loads(pickle.dumps(shared))
    del shared
    assert reader.latest().value == "a"
    with pytest.raises(Broken, match="exited or released"):
        late.latest()


def test_set_frees_old_versions_without_waiting_for_a_worker() -> None:
    graph = Graph()
    value = graph.broadcast(bytearray(100_000))
    gate = Gate()

    def hold(item: int) -> tuple[int, set[str]]:
        version = value.version
        if item == 0:
            gate.wait()
        return version, mapped_versions()

    items = graph.input()
    answers = items.map(hold, on="process").collect()
    with graph.start() as run:
        run[items].put(0)
        gate.wait_held()
        for _ in range(20):
            value.set(bytearray(100_000))
        assert len(mapped_versions()) == 1
        gate.open()
        run[items].put(1)
    (first, _), (second, kept) = run.wait()[answers]
    assert (first, second) == (0, 20)
    assert kept <= mapped_versions()

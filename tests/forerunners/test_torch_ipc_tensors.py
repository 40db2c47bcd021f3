"""Test shared tensors with the cases from torch-ipc's tests; ``test_torch_ipc.py`` explains the names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowchan.pipelines import Barrier, Lock, SharedDict, map, workqueue  # noqa: A004

pytestmark = pytest.mark.usefixtures("one_compute_thread")
everywhere = pytest.mark.parametrize("on", ["thread", "process"])


def across(on: str) -> Any:
    return "threads" if on == "thread" else "processes"


@everywhere
def test_map_function_map_id(on: Any) -> None:
    options = {"lock": Lock(), "tensor": torch.zeros(3).share_memory_(), "names": ["a", "b"]}

    def work(options: dict[str, Any], worker: int) -> tuple[list[str], int]:
        with options["lock"]:
            options["tensor"][worker] = worker
        return options["names"], worker

    assert map(2, work, options, on=on).join() == [(["a", "b"], 1), (["a", "b"], 2)]
    assert options["tensor"].tolist() == [0, 1, 2]


@everywhere
def test_workqueue_tensors_two_way_and_in_table(on: Any) -> None:
    queue, tensor = workqueue(across=across(on)), torch.zeros(4).share_memory_()
    worker = map(1, lambda queue, worker: [queue.put(item["t"].fill_(7)) for item in queue], queue, on=on)
    queue.put({"t": tensor})
    queue.close()
    assert [answer.tolist() for answer in queue] == [[7] * 4]
    worker.join()
    assert tensor.tolist() == [7] * 4


@everywhere
def test_locking_and_barrier(on: Any) -> None:
    lock, barrier, shared = Lock(), Barrier(4), torch.zeros(1_000).share_memory_()

    def work(lock: Lock, barrier: Barrier, shared: torch.Tensor, worker: int) -> bool:
        before = bool(shared.any())
        barrier.wait()
        with lock:
            shared.fill_(worker)
        barrier.wait()
        return not before and bool(shared.all())

    workers = map(3, work, lock, barrier, shared, on=on)
    barrier.wait()
    barrier.wait()
    assert workers.join() == [True] * 3
    assert len(set(shared.tolist())) == 1


@everywhere
def test_sharedtable_external_type_and_table_expand(on: Any) -> None:
    def use(table: SharedDict[str, Any], worker: int) -> None:
        with table["lock"]:
            table["tensor"][worker] += worker
            inner = table["inner"]
            inner[len(inner)] = worker

    inner = SharedDict[int, int]()
    table = SharedDict[str, Any](
        {"lock": Lock(), "tensor": torch.zeros(4, dtype=torch.long).share_memory_(), "inner": inner}
    )
    map(3, use, table, on=on).join()
    assert table["tensor"].tolist() == [0, 1, 2, 3]
    assert sorted(inner.values()) == [1, 2, 3]

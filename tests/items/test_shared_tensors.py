"""Test that after ``share_memory_()``, all processes that receive a tensor share its memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from support.optional_packages import optional

from flowchan import Channel, pack, unpack
from flowchan.items.item_texts import SeenItem
from flowchan.pipelines import SharedDict, TaskPool, map, marshal  # noqa: A004

torch = optional("torch")
nn = torch.nn

pytestmark = pytest.mark.usefixtures("one_compute_thread")


def shared(size: int = 10) -> torch.Tensor:
    return torch.zeros(size).share_memory_()


def fork(work: Callable[[], object]) -> Any:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    return child


def round_trip(value: Any) -> Any:
    channel = Channel[Any](across="processes")
    channel.put(value)
    return channel.get()


def test_two_processes_see_each_others_writes() -> None:
    there, back = Channel[Any](across="processes"), Channel[None](across="processes")

    def write() -> None:
        arrived = there.get()["weights"]
        arrived[0] = 1
        back.put(None)
        there.get()
        arrived[1] = arrived[2]
        back.put(None)

    child, own = fork(write), shared()
    there.put({"weights": own, "name": "w"})
    back.get()
    assert own.tolist()[:3] == [1, 0, 0]
    own[2] = 5
    there.put(None)
    back.get()
    assert own.tolist()[:3] == [1, 5, 5]
    child.join()


def test_views_and_parameters_arrive_in_the_same_memory() -> None:
    own = shared(12)
    view = own[2:].view(5, 2).t()
    arrived, other = round_trip((view, own))
    assert (arrived.shape, arrived.stride()) == (view.shape, view.stride())
    arrived[1, 0] = 7
    assert own[3] == other[3] == 7
    layer = nn.Linear(2, 1).share_memory()
    weight = round_trip(layer.weight)
    assert isinstance(weight, nn.Parameter)
    with torch.no_grad():
        weight.fill_(3)
    assert layer.weight.tolist() == [[3, 3]]
    assert round_trip(own.clone().share_memory_().requires_grad_()).requires_grad


def test_received_tensor_can_be_forwarded_and_outlives_its_creator() -> None:
    channel = Channel[Any](across="processes")

    def make() -> None:
        channel.put(torch.ones(4).share_memory_())
        os.kill(os.getpid(), signal.SIGKILL)

    child = fork(make)
    child.join()
    first = channel.get()
    second = round_trip(round_trip(first))
    second[0] = 9
    assert first.tolist() == [9, 1, 1, 1]


def fill(tensor: torch.Tensor, worker: int) -> torch.Tensor:
    tensor[worker] = worker
    return tensor


def test_map_workers_write_into_one_tensor_and_return_it() -> None:
    own = shared(3)
    results = map(2, fill, own, on="process").join()
    assert own.tolist() == [0, 1, 2]
    results[0][0] = 8
    assert own[0] == results[1][0] == 8


def test_tasks_in_a_pool_write_into_one_tensor() -> None:
    own = shared(3)
    with TaskPool(2, on="process") as pool:
        futures = [pool.submit(fill, own, number) for number in (1, 2)]
        futures[0].result()[0] = 8
        futures[1].result()
    assert own.tolist() == [8, 1, 2]


def test_shared_tensors_in_a_shared_dict_stay_shared() -> None:
    own = shared(3)
    table = SharedDict({"weights": own, "copied": torch.zeros(3)})
    for name in ("weights", "copied"):
        table[name][0] = 4
    table["other"] = 1
    handle = marshal([own])
    handle.read()[0][1] = 5
    assert table["weights"].tolist() == own.tolist() == [4, 5, 0]
    assert table["copied"].tolist() == [0, 0, 0]
    handle.close()


def test_packed_value_contains_the_shared_tensor() -> None:
    own = shared(3)
    packed = round_trip((1, pack({"weights": own, "more": torch.ones(20_000)})))[1]
    found = unpack(packed)
    found["weights"][0] = 6
    assert (own[0].item(), found["more"].sum().item()) == (6, 20_000)


def test_data_loader_batches_are_sent_as_copies() -> None:
    """A data loader's batches are also in shared memory, but only for their transfer."""
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    (batch,) = next(iter(torch.utils.data.DataLoader(data, 4, num_workers=1)))
    assert batch.is_shared()
    arrived = round_trip(batch)
    arrived[0] = 9
    assert batch.tolist() == [0, 1, 2, 3]


def test_mapped_file_is_sent_as_a_copy(tmp_path: Any) -> None:
    path = tmp_path / "numbers"
    own = torch.from_file(str(path), shared=True, size=4)
    own.fill_(2)
    arrived = round_trip(own)
    arrived[0] = 9
    assert own.tolist() == [2, 2, 2, 2]


def test_shared_tensor_reaches_another_host_as_a_copy() -> None:
    own = shared(3)
    with_hosts = Channel[Any](across="hosts")
    with pytest.raises(TypeError, match=r"tensor\.clone\(\)"):
        with_hosts.put([own])
    with_hosts.put([own.clone()])
    assert with_hosts.get()[0].tolist() == [0, 0, 0]


def test_look_at_a_tensor_shows_its_shape_and_type() -> None:
    channel = Channel[Any](across="processes")
    channel.put_many([torch.zeros(3, 4), {"x": torch.zeros(2, dtype=torch.int64)}, shared()])
    first, second, third = [SeenItem(*one).text() for one in channel._peek(0, 9, 1 << 20)]
    assert (first, second) == ("<Tensor 3 × 4 float32>", "{'x': <Tensor 2 int64>}")
    assert third.startswith("<an item of ")  # only its reader may open the memory of a shared tensor
    channel.get_many(2)
    channel.get()[0] = 1

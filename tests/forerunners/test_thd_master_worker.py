"""Test remote tensors with the master-worker part of THD, PyTorch's first ``torch.distributed``.

The first tests are the samples of the proposal from 2016. Each test's name begins with the sample's function,
such as ``dist_send``. THD never delivered most of these functions. The other tests have the names of the
tests in C++, but none of their code. A node here is what THD called a worker.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flowchan import Channel  # noqa: E402
from flowchan.pipelines import NodeDied, RemoteError, RemoteNodes  # noqa: E402

TYPES = {
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
}
"""Tensor types of the master-worker mode."""


@pytest.fixture(scope="module")
def nodes(one_compute_thread: None) -> Iterator[RemoteNodes]:
    with RemoteNodes(2) as started:
        yield started


@pytest.fixture(autouse=True)
def no_leftovers() -> None:
    """Do not check for leftovers after each test.

    The nodes live until the last test, and may open descriptors during any test.
    """


def test_float_tensor_is_created_on_a_node(nodes: RemoteNodes) -> None:
    """Sample: ``dist.FloatTensor(20, 10)``."""
    x = torch.empty(20, 10, device=nodes[1]).fill_(4)
    assert (x.dtype, x.shape, x.device) == (torch.float32, (20, 10), nodes[1])
    assert x.cpu().equal(torch.full((20, 10), 4.0))


def test_dist_send_copies_a_local_tensor_to_a_node(nodes: RemoteNodes) -> None:
    """Sample: ``torch.randn(20, 10).dist_send()``."""
    x = torch.randn(20, 10)
    assert x.to(nodes[0]).cpu().equal(x)


def test_node_block_places_tensors_on_its_node(nodes: RemoteNodes) -> None:
    """Sample: ``with dist.node(1): x = dist.FloatTensor(3)``."""
    with nodes[1]:
        x = torch.zeros(3)
        with nodes[0]:
            y = torch.zeros(3)
        z = torch.zeros(3)
    assert [t.device for t in (x, y, z)] == [nodes[1], nodes[0], nodes[1]]
    assert torch.zeros(3).device.type == "cpu"


def test_get_node_returns_the_index_of_the_node(nodes: RemoteNodes) -> None:
    """Sample: ``x.get_node()``. A result is on the node of its operands."""
    x = torch.ones(2, device=nodes[1])
    assert (x + x).mul(2).device.index == nodes[1].index
    assert (x + x).device.type == "remote"  # replaces is_distributed


def test_get_device_tells_a_remote_tensor_from_a_local_one(nodes: RemoteNodes) -> None:
    """Sample: ``x.get_device()``, which is -1 for a local tensor on the CPU."""
    assert torch.ones(2).get_device() == -1
    assert torch.ones(2, device=nodes[1]).get_device() == nodes[1].index


def test_mixed_operands_need_an_explicit_copy(nodes: RemoteNodes) -> None:
    """Sample: ``local + remote``. The proposal copied the local tensor; here, only numbers and 0-dim tensors
    are copied."""
    x = torch.ones(3, device=nodes[0])
    assert (x + 1 + torch.tensor(2.0)).tolist() == [4, 4, 4]
    for other in (torch.ones(3), torch.ones(3, device=nodes[1])):
        with pytest.raises(RuntimeError, match="all tensors must be on"):
            x + other
        assert (x + other.to(nodes[0])).tolist() == [2, 2, 2]


def test_only_copies_wait(nodes: RemoteNodes) -> None:
    """Sample: operations are asynchronous, and only copies synchronise."""
    nodes.strict("error")
    x = torch.zeros((), device=nodes[0])
    for _ in range(1000):
        x += 1
    nodes.strict("off")
    first, _ = nodes.stats()
    assert x.item() == 1000
    assert nodes.stats()[0].waits > first.waits


def test_streams_and_events_of_the_proposal_exist(nodes: RemoteNodes) -> None:
    """Sample: "streams and events later"."""
    stream, event = torch.remote.Stream(nodes[0]), torch.remote.Event()
    x = torch.ones(3, device=nodes[0]) * 2
    event.record(stream)
    event.synchronize()
    stream.synchronize()
    assert event.query()
    assert x.tolist() == [2, 2, 2]


@pytest.mark.parametrize("name", TYPES)
def test_each_tensor_type_of_the_mode_computes(nodes: RemoteNodes, name: str) -> None:
    x = torch.arange(6, dtype=TYPES[name]).view(2, 3)
    far = x.to(nodes[1])
    assert far.dtype == TYPES[name]
    assert (far * 2 + far).cpu().equal(x * 3)


def test_local_and_remote_tensors_copy_in_both_directions(nodes: RemoteNodes) -> None:
    """``local.copy_(remote)`` and ``remote.copy_(local)``."""
    local, remote = torch.arange(3.0), torch.zeros(3, device=nodes[1])
    assert remote.copy_(local).device == nodes[1]
    assert torch.zeros(3).copy_(remote).equal(local)


def test_copy_from_worker_to_worker_works(nodes: RemoteNodes) -> None:
    """THD raised "not implemented"."""
    x = torch.arange(3.0, device=nodes[0])
    y = torch.zeros(3, device=nodes[1])
    y.copy_(x)
    assert y.cpu().equal(x.to(nodes[1]).cpu())
    assert y.cpu().equal(torch.arange(3.0))


def test_more_tensors_than_thd_had_function_ids_exist_at_once(nodes: RemoteNodes) -> None:
    xs = [torch.full((2,), float(number), device=nodes[0]) for number in range(500)]
    assert torch.stack(xs).sum().item() == 2 * sum(range(500))


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x.select(0, 1),
        lambda x: x.narrow(1, 0, 2),
        lambda x: x.t(),
        lambda x: x.clone(),
        lambda x: x.reshape(3, 2),
        lambda x: torch.cat([x, x]),
        lambda x: x.unsqueeze(0).squeeze(0),
        lambda x: x.view(6),
        lambda x: x.expand(4, 2, 3),
        lambda x: x.new_zeros(2, 3).scatter_add(0, torch.tensor([[1, 0, 1]]).to(x.device), x),
        lambda x: x.int() & 3,
    ],
    ids=[
        *("select", "narrow", "t", "clone", "reshape", "cat", "squeeze", "view"),
        *("expand", "scatter_add", "bit_and"),
    ],
)
def test_operation_that_thd_lacked_works(nodes: RemoteNodes, made: Any) -> None:
    """On these operations, THD's workers exited or its master refused."""
    x = torch.arange(6.0).view(2, 3)
    assert made(x.to(nodes[0])).cpu().equal(made(x))


def test_error_on_a_worker_reaches_the_program_once(nodes: RemoteNodes) -> None:
    """In THD, the worker exited, and all later commands raised the error."""
    x = torch.eye(2, device=nodes[1])
    wrong = x.index_select(0, torch.tensor([2], device=nodes[1]))
    with pytest.raises(RemoteError, match="aten::index_select on node 1: IndexError"):
        wrong.cpu()
    assert (x + 1).sum().item() == 6


# --- tests from THD's C++ code ---


@pytest.mark.parametrize("size", [1, 4, 12])
def test_command_channel_smoke(one_compute_thread: None, size: int) -> None:
    """Each of ``size`` workers gets and answers a command, and then exits."""
    with RemoteNodes(size) as nodes:
        assert len(nodes) == size
        xs = [torch.full((2,), float(number), device=node) for number, node in enumerate(nodes)]
        nodes.sync()
        assert [x.tolist() for x in xs] == [[number, number] for number in range(size)]
        assert all(node.commands for node in nodes.stats())


def test_lost_connection_raises_an_error_with_the_rank(one_compute_thread: None) -> None:
    with RemoteNodes(2) as nodes:
        x, y = (torch.ones(2, device=node) for node in nodes)
        nodes.sync()
        os.kill(nodes._kids[1].pid, signal.SIGKILL)
        with pytest.raises(NodeDied) as raised:
            x.tolist()
        assert (raised.value.node, raised.value.signal) == (0, signal.SIGKILL)
        assert y.tolist() == [1, 1]


@pytest.mark.parametrize(
    "value",
    [0.1, 2**62, -3, True, torch.Size([2, 3]), [1, 2, 3], "sum"],
    ids=["float", "long", "int", "bool", "size", "vector", "text"],
)
def test_rpc_serialization(nodes: RemoteNodes, value: Any) -> None:
    """Arguments of each type arrive unchanged."""
    x = torch.arange(6.0, dtype=torch.float64)
    operation = {
        float: lambda t: t * value,
        int: lambda t: t.long() + value,
        bool: lambda t: t.sum(0, keepdim=value),
        torch.Size: lambda t: t.reshape(value),
        list: lambda t: t.view(1, 2, 3).sum(dim=[d - 1 for d in value][1:]),
        str: lambda t: t.clone().scatter_reduce_(0, t.long(), t, reduce=value),
    }[type(value)]
    assert operation(x.to(nodes[0])).cpu().equal(operation(x))


def test_rpc_serialization_of_a_handle_in_a_channel(nodes: RemoteNodes) -> None:
    channel: Any = Channel(across="processes")
    channel.put(torch.arange(3.0, device=nodes[1]))
    x = channel.get()
    assert x.device == nodes[1]
    assert (x + 1).tolist() == [1, 2, 3]


def test_tensor_smoke(nodes: RemoteNodes) -> None:
    """Construct, resize, fill, add and reduce tensors on a worker."""
    x = torch.empty(2, device=nodes[0]).resize_(2, 7).fill_(3)
    y = torch.empty(0, device=nodes[0]).resize_(2, 7).fill_(4)
    y.add_(x)
    x.fill_(1)
    assert y.shape == (2, 7)
    assert y.stride() == (7, 1)
    assert y.cpu().equal(torch.full((2, 7), 7.0))
    assert (y + x).sum().item() == 14 * 8

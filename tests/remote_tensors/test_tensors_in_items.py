"""Test remote tensors in the items of channels and graphs on one machine."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.optional_packages import optional
from support.waiting import wait_until

from flowchan import Channel, Graph, pack, unpack
from flowchan.pipelines import ParameterServer, RemoteError, RemoteNodes, Sequential, children

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")


@pytest.fixture
def nodes() -> Iterator[Any]:
    with RemoteNodes(2) as nodes:
        yield nodes


def kept(nodes: Any) -> list[int]:
    """Return the number of tensors that each node stores."""
    gc.collect()  # a finished run forms a reference cycle with its results
    return [one.tensors for one in nodes.stats()]


def wait_for_kept(nodes: Any, *expected: int) -> None:
    wait_until(lambda: kept(nodes) == list(expected), what=lambda: kept(nodes))


def test_item_has_the_same_storage_after_a_channel(nodes: Any) -> None:
    channel: Any = Channel(across="processes")
    sent = torch.zeros(2, 3, device=nodes[1])
    channel.put({"whole": sent, "view": sent.t()[1:]})
    arrived = channel.get()
    assert arrived["whole"].device == nodes[1]
    assert arrived["view"].stride() == (1, 3)
    arrived["view"].add_(1)
    assert arrived["whole"].tolist() == sent.tolist() == [[0, 1, 1], [0, 1, 1]]


def test_tensor_in_an_item_outlives_the_tensor_of_its_sender(nodes: Any) -> None:
    channel: Any = Channel(across="processes")
    sent = torch.arange(3.0, device=nodes[0]) + 1
    channel.put(sent)
    del sent
    wait_for_kept(nodes, 1, 0)
    assert channel.get().tolist() == [1, 2, 3]


def test_node_frees_tensors_of_received_and_discarded_items(nodes: Any) -> None:
    channel: Any = Channel(100, across="processes")
    for place in range(60):
        channel.put([torch.ones(2, device=nodes[place % 2]), torch.ones(2, device=nodes[0])])
    for _ in range(30):
        channel.get()
    wait_for_kept(nodes, 45, 15)
    del channel
    wait_for_kept(nodes, 0, 0)


def add_one(tensor: Any) -> Any:
    tensor += 1
    return os.getpid(), tensor * 2, tensor.device


def test_stages_in_processes_change_the_same_tensors(nodes: Any) -> None:
    tensors = [torch.full((2,), float(place), device=nodes[place % 2]) for place in range(6)]
    graph = Graph()
    done = graph.source(tensors).map(add_one, on="process", workers=2)
    results = done.collect()
    found = graph.run()[results]
    assert os.getpid() not in {pid for pid, _, _ in found}
    assert [one.tolist() for _, one, _ in found] == [[2.0 * (place + 1)] * 2 for place in range(6)]
    assert [one.tolist() for one in tensors] == [[place + 1.0] * 2 for place in range(6)]
    assert [one.device for _, one, _ in found] == [nodes[place % 2] for place in range(6)]
    del found, graph, done, results
    wait_for_kept(nodes, 3, 3)  # the workers have exited


def test_stages_on_threads_pass_the_same_object(nodes: Any) -> None:
    tensor = torch.ones(2, device=nodes[0])
    graph = Graph()
    results = graph.source([tensor]).map(lambda one: one, on="thread").collect()
    assert graph.run()[results][0] is tensor


def add_in_place(tensor: Any) -> None:
    tensor += 1


def test_stage_that_only_changes_a_tensor_keeps_all_changes(nodes: Any) -> None:
    tensor = torch.zeros(1, device=nodes[0])
    for _ in range(3):
        graph = Graph()
        graph.source([tensor] * 5).map(add_in_place, on="process").collect()
        graph.run()
    assert tensor.item() == 15


def die_once(item: Any) -> Any:
    tensor, marker = item
    if not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return tensor * 3


def test_redelivered_item_imports_its_tensor_again(nodes: Any, tmp_path: Any) -> None:
    graph = Graph()
    source = graph.source((torch.ones(2, device=nodes[0]), str(tmp_path / "died")) for _ in range(3))
    results = source.map(die_once, on="process").collect()
    found = graph.run()[results]
    assert [one.tolist() for one in found] == [[3, 3]] * 3
    del found, results, source, graph
    wait_for_kept(nodes, 0, 0)


def test_packed_value_can_be_unpacked_twice(nodes: Any) -> None:
    packed = pack([torch.ones(2, device=nodes[0])])
    (first,), (second,) = unpack(packed), unpack(packed)
    first += 1
    assert second.tolist() == [2, 2]
    del packed, first, second
    wait_for_kept(nodes, 0, 0)


def hold(parent: Any, tensor: Any) -> None:
    copies = [tensor + place for place in range(4)]
    parent.send(copies[3].device.type)
    parent.pause()
    del copies


def test_node_frees_the_tensors_of_a_killed_process(nodes: Any) -> None:
    tensor = torch.ones(2, device=nodes[1])
    kids = children.start(1)
    try:
        kids[1].run(hold, tensor)
        assert kids[1].receive() == "remote"
        wait_until(lambda: kept(nodes)[1] >= 6)
        os.kill(kids[1].pid, signal.SIGKILL)
        wait_for_kept(nodes, 0, 1)
    finally:
        kids.close()
    assert tensor.tolist() == [1, 1]


def send_back(parent: Any, tensors: Any) -> Any:
    first, second = tensors
    return {"sum": first.to(second.device) + second, "index": first.device.index}


def test_process_copies_between_received_nodes(nodes: Any) -> None:
    with children.start(1) as kids:
        kids[1].run(send_back, [torch.ones(2, device=nodes[0]), torch.ones(2, device=nodes[1])])
        result = kids[1].wait()
    assert result["sum"].device == nodes[1]
    assert result["sum"].tolist() == [2, 2]
    del result, kids
    wait_for_kept(nodes, 0, 0)


def test_leaf_keeps_requires_grad_and_other_tensors_are_rejected(nodes: Any) -> None:
    channel: Any = Channel(across="processes")
    leaf = torch.ones(2, device=nodes[0], requires_grad=True)
    channel.put([leaf, torch.nn.Parameter(leaf.detach())])
    arrived, parameter = channel.get()
    assert arrived.requires_grad
    assert isinstance(parameter, torch.nn.Parameter)
    (arrived * parameter).sum().backward()
    assert arrived.grad.tolist() == [1, 1]
    assert leaf.grad is None
    with pytest.raises(TypeError, match=r"autograd graph .*send tensor.detach\(\)"):
        channel.put(leaf * 2)


def test_failure_travels_with_its_tensor(nodes: Any) -> None:
    channel: Any = Channel(across="processes")
    index = torch.tensor([7], device=nodes[0])
    channel.put(torch.ones(2, device=nodes[0]).index_select(0, index))
    with pytest.raises(RemoteError, match="index"):
        channel.get().cpu()


def test_tensors_of_ended_nodes_are_rejected() -> None:
    channel: Any = Channel(across="processes")
    with RemoteNodes(1) as nodes:
        tensor = torch.ones(2, device=nodes[0])
        channel.put(tensor)
    with pytest.raises(RemoteError, match="node 0 can't be received: the node has ended"):
        channel.get()
    with pytest.raises(TypeError, match="nodes were closed"):
        channel.put(tensor)


def test_two_groups_of_nodes_exchange_tensors_through_the_program(nodes: Any) -> None:
    with RemoteNodes(1) as others:
        moved = torch.arange(3.0, device=nodes[1]).to(others[0])
        assert moved.device == others[0]
        assert moved.tolist() == [0, 1, 2]
        target = torch.zeros(3, device=nodes[0])
        target.copy_(moved)
        assert target.tolist() == [0, 1, 2]


PROGRAM = """
import sys
import torch
from flowchan.hosts import open_channel
down, up = (open_channel(address, bytes.fromhex(sys.argv[1])) for address in sys.argv[2:])
model, batch = down.get()
loss = model(batch).square().mean()
loss.backward()
with torch.no_grad():
    for one in model.parameters():
        one -= 0.1 * one.grad
up.put((loss.detach(), loss.item()))
up.flush()
down.get()
"""


def test_another_program_trains_a_module_in_place(nodes: Any) -> None:
    down: Any = Channel(across="hosts")
    up: Any = Channel(across="hosts")
    arguments = [down.secret.hex(), down.address, up.address]
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments])
    try:
        batch = torch.ones(4, 3)
        expected = torch.nn.Linear(3, 2)
        model = copy.deepcopy(expected).to(nodes[1])
        down.put((model, batch.to(nodes[1])))
        loss = expected(batch).square().mean()
        gradients = torch.autograd.grad(loss, [*expected.parameters()])
        remote, value = up.get(timeout=60)
        assert remote.device == nodes[1]
        assert remote.item() == value == loss.item()
        for one, local, gradient in zip(model.parameters(), expected.parameters(), gradients, strict=True):
            assert torch.equal(one.detach().cpu(), local.detach() - 0.1 * gradient)
        down.put(None)
        assert program.wait(60) == 0
    finally:
        program.kill()
        program.wait()
    del remote, one
    wait_for_kept(nodes, 0, 2)


def test_parameter_server_accepts_remote_tensors(nodes: Any) -> None:
    with ParameterServer({"w": torch.zeros(3, device=nodes[0])}) as server:
        client = server.client()
        client.push({"w": torch.arange(3.0, device=nodes[1])}).wait(60)
        out = {"w": torch.full((3,), 7.0, device=nodes[1])}
        assert client.pull(out) is out
        assert out["w"].device == nodes[1]
        assert out["w"].tolist() == client.pull()["w"].tolist() == [0, 1, 2]


def test_sequential_has_parts_on_nodes(nodes: Any) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    expected = copy.deepcopy(layers)
    pipe = Sequential(layers, [2, 1], devices=list(nodes), chunks=2)
    batch = torch.randn(6, 4)
    output = pipe(batch)
    assert output.device == nodes[1]
    output.square().mean().backward()
    for local in expected(batch[:3]), expected(batch[3:]):
        (local.square().sum() / 12).backward()
    for one, local in zip(pipe.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), local.grad)


def test_copy_into_a_new_view_changes_its_base(nodes: Any) -> None:
    base = torch.zeros(2, 2, device=nodes[0])
    base.detach().copy_(torch.ones(2, 2))
    base.view(4)[2:].copy_(torch.tensor([5.0, 6.0]))
    assert base.tolist() == [[1, 1], [5, 6]]

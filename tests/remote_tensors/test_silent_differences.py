"""Test cases in which a remote tensor could silently have other values than a local tensor."""

from __future__ import annotations

import pytest
import torch

from flowchan.pipelines import RemoteError, RemoteNodes
from flowchan.pipelines.remote_tensors import device_table


def new_ones(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.new_ones(2, device=device)


@pytest.mark.parametrize("make", [torch.zeros_like, torch.rand_like, new_ones])
@pytest.mark.parametrize("device", ["cpu", "other"])
def test_factory_like_a_tensor_refuses_another_device(two_nodes: RemoteNodes, make, device: str) -> None:
    x = torch.ones(3, device=two_nodes[0])
    with pytest.raises(RuntimeError, match="device must be remote:"):
        make(x, device=two_nodes[1] if device == "other" else device)
    assert make(x, device=two_nodes[0]).device == two_nodes[0]


def test_device_index_is_reserved_until_its_node_has_started(two_nodes: RemoteNodes) -> None:
    first, second = device_table.free_index(1), device_table.free_index(1)
    try:
        assert first != second
        assert {first, second}.isdisjoint({0, 1})
    finally:
        device_table.set_client(first, None)
        device_table.set_client(second, None)
    assert device_table.free_index(1) == first
    device_table.set_client(first, None)


def test_copy_into_an_operand_used_twice_reaches_its_views(two_nodes: RemoteNodes) -> None:
    x = torch.zeros(4, device=two_nodes[0])
    view = x.view(2, 2)
    square = x * x
    x.copy_(torch.ones(4))
    assert view.tolist() == [[1, 1], [1, 1]]
    assert square.tolist() == [0] * 4


def test_upload_copies_a_shared_tensor(two_nodes: RemoteNodes) -> None:
    local = torch.zeros(3).share_memory_()
    remote = local.to(two_nodes[0])
    assert remote.tolist() == [0, 0, 0]
    local.fill_(5)
    assert remote.tolist() == [0, 0, 0]
    remote.add_(1)
    assert local.tolist() == [5, 5, 5]


def test_uploaded_part_of_a_tensor_has_offset_zero(two_nodes: RemoteNodes) -> None:
    part = torch.arange(10.0)[3:]
    remote = part.to(two_nodes[0])
    assert remote.storage_offset() == 0
    assert remote.as_strided((2,), (1,), remote.storage_offset()).tolist() == [3, 4]


def test_assigned_data_keeps_its_own_shape(two_nodes: RemoteNodes) -> None:
    w = torch.arange(4.0, device=two_nodes[0]).view(2, 2)
    p = torch.zeros(2, 2, device=two_nodes[0])
    p.data = w
    p.t_()
    assert w.tolist() == [[0, 1], [2, 3]]
    assert p.tolist() == [[0, 2], [1, 3]]
    p.zero_()
    assert w.tolist() == [[0, 0], [0, 0]]


def test_zeros_of_both_signs_have_their_own_templates(two_nodes: RemoteNodes) -> None:
    nan = torch.full((1,), torch.nan, device=two_nodes[0])
    assert (1 / torch.nan_to_num(nan, nan=0.0)).item() == torch.inf
    assert (1 / torch.nan_to_num(nan, nan=-0.0)).item() == -torch.inf


def test_statistics_of_a_batch_norm_fail_with_its_input(two_nodes: RemoteNodes) -> None:
    norm = torch.nn.BatchNorm1d(2).to(two_nodes[0])
    rows = torch.ones(4, 2, device=two_nodes[0])
    norm(rows.index_select(0, torch.tensor([0, 7], device=two_nodes[0])))
    with pytest.raises(RemoteError, match="index_select"):
        norm.running_mean.cpu()


def test_node_survives_an_invalid_seed(two_nodes: RemoteNodes) -> None:
    torch.remote.set_rng_state(torch.get_rng_state()[:10], two_nodes[0])
    with pytest.raises(RemoteError, match="set_rng_state"):
        two_nodes.sync()
    assert torch.ones(2, device=two_nodes[0]).sum().item() == 2

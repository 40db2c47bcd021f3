"""Test that modules, optimizers and tensors can be moved, copied, saved and loaded between nodes and the
program."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
from support.optional_packages import optional
from training_cases import OPTIMIZERS, made, train

from flowchan.pipelines import RemoteNodes

torch = optional("torch")


@pytest.fixture(scope="module")
def nodes(two_nodes: RemoteNodes) -> RemoteNodes:
    return two_nodes


def saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def assert_equal_states(found: Any, expected: Any, device: Any) -> None:
    assert found.keys() == expected.keys()
    assert {value.device for value in found.values()} == {torch.device(device)}
    assert all(torch.equal(value.cpu(), expected[name]) for name, value in found.items())


def test_module_moves_to_a_node_and_back(nodes: RemoteNodes) -> None:
    module = made("conv")[0]
    expected = copy.deepcopy(module.state_dict())
    parameters = list(module.parameters())
    assert module.to(nodes[1]) is module
    assert_equal_states(module.state_dict(), expected, nodes[1])
    assert all(map(lambda one, other: one is other, module.parameters(), parameters))
    assert_equal_states(module.to(nodes[0]).state_dict(), expected, nodes[0])
    assert_equal_states(module.cpu().state_dict(), expected, "cpu")
    assert_equal_states(module.remote(1).state_dict(), expected, nodes[1])


def test_module_changes_its_dtype_on_a_node(nodes: RemoteNodes) -> None:
    module = torch.nn.Linear(3, 2).to(nodes[0], torch.float64)
    assert module.weight.dtype is torch.float64
    assert module.half().weight.cpu().dtype is torch.float16


def test_module_can_be_created_on_a_node(nodes: RemoteNodes) -> None:
    torch.manual_seed(0)
    direct = torch.nn.Linear(3, 2, device=nodes[0])
    torch.manual_seed(0)
    with nodes[1]:
        inside = torch.nn.Linear(3, 2)
    torch.manual_seed(0)
    expected = torch.nn.Linear(3, 2).state_dict()
    assert_equal_states(direct.state_dict(), expected, nodes[0])
    assert_equal_states(inside.state_dict(), expected, nodes[1])


def test_state_loads_in_both_directions(nodes: RemoteNodes) -> None:
    local, remote = made("mlp")[0], made("mlp", seed=1)[0].to(nodes[0])
    expected = copy.deepcopy(remote.state_dict())
    remote.load_state_dict(local.state_dict())
    assert_equal_states(remote.state_dict(), local.state_dict(), nodes[0])
    local.load_state_dict(expected)
    assert_equal_states(expected, local.state_dict(), nodes[0])
    other = made("mlp", seed=2)[0].to(nodes[1])
    other.load_state_dict(expected, assign=True)
    assert_equal_states(other.state_dict(), local.state_dict(), nodes[0])


def test_copied_module_is_independent_of_the_original(nodes: RemoteNodes) -> None:
    module = made("mlp")[0].to(nodes[0])
    other = copy.deepcopy(module)
    with torch.no_grad():
        other[0].weight.zero_()
    assert other[0].weight.device == nodes[0]
    assert isinstance(other[0].weight, torch.nn.Parameter)
    assert module[0].weight.abs().sum().item() > 0
    assert other[0].weight.abs().sum().item() == 0


def test_tied_parameters_stay_tied(nodes: RemoteNodes) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    module.to(nodes[0])
    assert module[1].weight is module[0].weight
    assert copy.deepcopy(module)[0].weight is not module[0].weight


@pytest.mark.parametrize("target", ["same", "cpu", "other"])
def test_saved_state_loads_on_a_chosen_device(nodes: RemoteNodes, target: str) -> None:
    model, batches = made("mlp")
    model.to(nodes[0])
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, batches[:2], optimizer, nodes[0])
    device = {"same": nodes[0], "cpu": torch.device("cpu"), "other": nodes[1]}[target]
    where = {"same": None, "cpu": "cpu", "other": str(nodes[1])}[target]
    file = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    loaded = torch.load(file, map_location=where)
    assert_equal_states(
        loaded["model"], {name: one.cpu() for name, one in model.state_dict().items()}, device
    )
    moment = loaded["optimizer"]["state"][0]["exp_avg"]
    assert moment.device == device
    assert torch.equal(moment.cpu(), optimizer.state_dict()["state"][0]["exp_avg"].cpu())


def test_local_state_stays_local_when_loaded_for_a_node(nodes: RemoteNodes) -> None:
    module = made("mlp")[0]
    loaded = torch.load(saved(module.state_dict()), map_location=nodes[1])
    assert_equal_states(loaded, module.state_dict(), "cpu")
    other = made("mlp", seed=1)[0].to(nodes[1])
    other.load_state_dict(loaded)
    assert_equal_states(other.state_dict(), module.state_dict(), nodes[1])


def test_saved_tensors_keep_dtype_layout_and_gradient_flag(nodes: RemoteNodes) -> None:
    values = {
        "half": torch.arange(6.0).half().reshape(2, 3).t().to(nodes[0]),
        "bool": torch.tensor([True, False]).to(nodes[0]),
        "none": torch.empty(0, 3).to(nodes[0]),
        "leaf": torch.ones(2, device=nodes[0], requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2, device=nodes[0])),
    }
    loaded = torch.load(saved(values))
    for name, value in values.items():
        assert torch.equal(loaded[name].cpu(), value.cpu()), name
        assert loaded[name].requires_grad == value.requires_grad
        assert loaded[name].device == nodes[0]
        assert loaded[name].dtype == value.dtype
    assert isinstance(loaded["parameter"], torch.nn.Parameter)


def test_pickle_carries_values_and_device(nodes: RemoteNodes) -> None:
    x = torch.arange(3.0).to(nodes[1])
    data = pickle.dumps(x)
    x.zero_()
    loaded = pickle.loads(data)
    assert loaded.device == nodes[1]
    assert loaded.tolist() == [0, 1, 2]


def test_copy_of_a_tensor_with_a_graph_is_refused(nodes: RemoteNodes) -> None:
    x = torch.ones(2, device=nodes[0], requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly"):
        copy.deepcopy(x)


def test_buffers_and_parameters_are_recognised_as_remote(nodes: RemoteNodes) -> None:
    x = torch.ones(2, device=nodes[1])
    assert x.is_remote
    assert not torch.ones(2).is_remote
    assert x.get_device() == nodes[1].index
    assert torch.ones(2).remote(nodes[1].index).device == nodes[1]
    assert x.to(nodes[1]) is x
    assert x.to("cpu").remote(nodes[0].index).device == nodes[0]

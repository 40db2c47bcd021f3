"""Test that remote tensors can be combined with numbers and local tensors like CUDA tensors, and can be
printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.optional_packages import optional

from flowchan.pipelines import RemoteNodes

torch = optional("torch")


@pytest.fixture(scope="module")
def nodes(two_nodes: RemoteNodes) -> RemoteNodes:
    return two_nodes


MIXED: dict[str, Callable[[Any], Any]] = {
    "int": lambda x: 2 * x + 1,
    "float": lambda x: 1.5 - x / 3,
    "bool": lambda x: x * True,
    "complex": lambda x: x * 1j,
    "reversed power": lambda x: 2**x,
    "floor": lambda x: x // 2 + x % 2,
    "comparison": lambda x: x > 1,
    "int tensor and float": lambda x: x.long() * 1.5,
    "0-dim tensor": lambda x: x + torch.tensor(3),
    "0-dim double": lambda x: torch.tensor(3.0, dtype=torch.float64) * x,
    "0-dim in place": lambda x: x.clone().mul_(torch.tensor(2.0)),
    "where with numbers": lambda x: torch.where(x > 1, x, 0.0),
    "clamp": lambda x: x.clamp(0.5, 2),
    "masked fill": lambda x: x.masked_fill(x > 1, torch.tensor(7.0)),
    "assigned number": lambda x: assigned(x, (0, 1), 5),
    "assigned 0-dim tensor": lambda x: assigned(x, 1, torch.tensor(5.0)),
    "assigned local tensor": lambda x: assigned(x, 1, torch.tensor([5.0, 6, 7])),
    "local index": lambda x: x[torch.tensor([1, 0])],
    "local mask": lambda x: x[:, torch.tensor([True, False, True])],
    "list index": lambda x: x[[1, 0]],
    "index with local index": lambda x: assigned(x, torch.tensor([1]), 2.0),
    "full": lambda x: torch.full_like(x, 2),
    "max of pairs": lambda x: torch.maximum(x, torch.tensor(1.0)),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5),
    "new tensor": lambda x: x.new_tensor([1, 2]) + x.new_zeros(2),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "one-hot": lambda x: torch.nn.functional.one_hot(x.long().flatten(), 6),
}


def assigned(x: Any, place: Any, value: Any) -> Any:
    x = x.clone()
    x[place] = value
    return x


@pytest.mark.parametrize("name", MIXED)
def test_mixed_operands_give_local_values(nodes: RemoteNodes, name: str) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    found = MIXED[name](x.to(nodes[0]))
    expected = MIXED[name](x)
    assert found.device == nodes[0]
    assert found.dtype is expected.dtype
    assert torch.equal(found.cpu(), expected)


def test_factories_make_local_values(nodes: RemoteNodes) -> None:
    for make in (
        lambda device: torch.arange(1, 9, 3, device=device),
        lambda device: torch.linspace(0, 1, 5, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.tensor([[1.0, 2], [3, 4]], device=device),
        lambda device: torch.full((2,), 7, device=device),
        lambda device: torch.tril(torch.ones(3, 3, device=device)),
        lambda device: torch.as_tensor([1, 2], device=device),
    ):
        assert torch.equal(make(nodes[1]).cpu(), make("cpu"))


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, y: x + y,
    "product": lambda x, y: y @ x,
    "in place": lambda x, y: x.add_(y),
    "stack": lambda x, y: torch.stack([x, y]),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "linear": lambda x, y: torch.nn.functional.linear(x, y),
}


@pytest.mark.parametrize("name", REFUSED)
def test_local_tensors_are_refused_with_the_remedy(nodes: RemoteNodes, name: str) -> None:
    x, y = torch.ones(2, 2, device=nodes[0]), torch.ones(2, 2)
    with pytest.raises(RuntimeError, match=r"remote:0.*cpu.*\.to\("):
        REFUSED[name](x, y)


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_of_another_node_are_refused_with_the_remedy(nodes: RemoteNodes, name: str) -> None:
    x, y = torch.ones(2, 2, device=nodes[0]), torch.ones(2, 2, device=nodes[1])
    with pytest.raises(RuntimeError, match=r"remote:[01].*remote:[01].*\.to\("):
        REFUSED[name](x, y)


def test_remote_operands_of_local_tensors_are_refused(nodes: RemoteNodes) -> None:
    x, y = torch.ones(2, 2, device=nodes[0]), torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="remote:0"):
        y.add_(x)
    with pytest.raises(RuntimeError, match="remote:0"):
        torch.add(x, x, out=y)
    single = torch.tensor(1.0)
    with pytest.raises(RuntimeError, match="remote:0"):
        single.add_(x[0, 0])
    assert single.item() == 1
    with pytest.raises((RuntimeError, IndexError), match=r"remote:0|same device"):
        y[x.long()]
    assert y.tolist() == [[1, 1], [1, 1]]


def test_conversion_to_numpy_is_refused_with_the_remedy(nodes: RemoteNodes) -> None:
    for convert in (lambda x: x.numpy(), np.asarray):
        with pytest.raises(TypeError, match=r"\.cpu\(\)"):
            convert(torch.ones(2, device=nodes[0]))
    assert torch.ones(2, device=nodes[0]).numpy(force=True).tolist() == [1, 1]


def test_values_print_as_local_values_with_the_device(nodes: RemoteNodes) -> None:
    for value in (
        torch.arange(3),
        torch.rand(2, 2),
        torch.tensor(1.5),
        torch.zeros(0),
        torch.ones(2, 2).bool(),
    ):
        text = repr(value)
        assert repr(value.to(nodes[1])) == f"{text[:-1]}, device='remote:1')"
    leaf = torch.ones(1, device=nodes[0], requires_grad=True)
    assert str(leaf) == "tensor([1.], device='remote:0', requires_grad=True)"
    assert str(leaf + 1) == "tensor([2.], device='remote:0', grad_fn=<AddBackward0>)"
    assert "Parameter containing:" in repr(torch.nn.Parameter(leaf))
    assert "device='remote:0'" in repr(torch.nn.Parameter(leaf))


def test_single_values_can_be_converted_to_numbers(nodes: RemoteNodes) -> None:
    x = torch.tensor(2.5, device=nodes[0])
    assert (float(x), int(x), bool(x), x.item(), complex(x)) == (2.5, 2, True, 2.5, 2.5)
    assert f"{x:.2f}" == "2.50"
    assert [0, 1, 2][torch.tensor(1, device=nodes[0])] == 1
    assert [one.item() for one in torch.arange(3, device=nodes[0])] == [0, 1, 2]
    assert torch.arange(3, device=nodes[0]).tolist() == [0, 1, 2]
    assert 2.0 in torch.arange(3.0, device=nodes[0])
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(torch.ones(2, device=nodes[0]))


def test_tensors_can_be_combined_with_numpy_numbers(nodes: RemoteNodes) -> None:
    x = torch.ones(2, device=nodes[0])
    assert (x * np.float32(2)).tolist() == [2, 2]
    assert (x + np.int64(1)).tolist() == [2, 2]


def test_autocast_is_refused_in_one_line(nodes: RemoteNodes) -> None:
    x = torch.ones(2, 2, device=nodes[0])
    with (
        torch.autocast("remote", torch.bfloat16),
        pytest.raises(RuntimeError, match=r"^torch\.autocast: .* with \.to\(dtype\)$"),
    ):
        x @ x
    with torch.autocast("remote", enabled=False):
        assert (x @ x).tolist() == [[2, 2], [2, 2]]


def test_strict_mode_raises_at_each_hidden_wait(nodes: RemoteNodes) -> None:
    x = torch.ones(2, device=nodes[0])
    nodes.strict("error")
    try:
        for wait in (
            lambda: x.sum().item(),
            lambda: bool(x[0] > 0),
            lambda: x.tolist(),
            lambda: repr(x),
            lambda: x.nonzero(),
            lambda: f"{x[0]:.2f}",
            lambda: torch.equal(x, x),
        ):
            with pytest.raises(RuntimeError, match="strict"):
                wait()
        assert x.cpu().tolist() == [1, 1]
    finally:
        nodes.strict("off")
    assert x.tolist() == [1, 1]


def test_default_dtype_applies_from_the_moment_it_is_set(two_nodes: RemoteNodes) -> None:
    whole = torch.arange(3, device=two_nodes[0])
    assert (whole / 2).dtype is torch.float32
    try:
        torch.set_default_dtype(torch.float64)
        assert (whole / 2).dtype is torch.float64
        assert (whole / 2).cpu().dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)

"""Test that views and in-place operations in inference mode behave like those of local tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.optional_packages import optional

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")

MODES = {"inference": torch.inference_mode, "no grad": torch.no_grad, "grad": torch.enable_grad}

VIEWS: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.view(-1),
    "view of view": lambda x: x.view(-1).view(3, 4),
    "view as dtype": lambda x: x.view(torch.int32),
    "reshape": lambda x: x.reshape(3, 4),
    "flatten": lambda x: x.flatten(),
    "transpose": lambda x: x.t(),
    "permute": lambda x: x.permute(1, 0),
    "row": lambda x: x[1],
    "slice": lambda x: x[:, 1:3],
    "None": lambda x: x[None],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "expand": lambda x: x.expand(1, 3, 4),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "diagonal": lambda x: x.diagonal(),
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1), 1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "movedim": lambda x: x.movedim(0, 1),
    "split": lambda x: x.split(2)[1],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "unbind": lambda x: x.unbind()[2],
    "tensor_split": lambda x: x.tensor_split(2)[0],
    "alias": lambda x: torch.ops.aten.alias(x),
    "neg view": lambda x: torch._neg_view(x),
    "real": lambda x: torch.view_as_complex(x.view(3, 2, 2)).real,
    "conj": lambda x: torch.view_as_complex(x.view(3, 2, 2)).conj(),
    "view_as": lambda x: x.view_as(x),
    "itself": lambda x: x.contiguous(),
}

DETACHED: dict[str, Callable[[Any], Any]] = {
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "detached view": lambda x: x.view(-1).detach(),
}

CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda v: v,
    "mul_": lambda v: v.mul_(2),
    "part": lambda v: v[:1].zero_(),
    "item": lambda v: v.__setitem__(0, 7),
    "transpose": lambda v: v.transpose_(0, -1),
    "squeeze": lambda v: v.unsqueeze_(0),
    "copy local": lambda v: v.copy_(torch.ones(1)),
    "data of view": lambda v: setattr(v, "data", v[:1]),
    "resize": lambda v: v.resize_(2),
}


def result_of(function: Callable[[], Any]) -> Any:
    """Return a function's result, or the first line of its exception."""
    try:
        return function()
    except (RuntimeError, NotImplementedError) as error:
        return str(error).partition("\n")[0]


def state(tensor: Any) -> list[Any]:
    """Return what a program sees of a tensor."""
    kept = [
        tensor.is_inference(),
        tensor._is_view(),
        tensor.requires_grad,
        tuple(tensor.shape),
        tensor.stride(),
    ]
    return [*kept, tensor.detach().cpu().tolist(), result_of(lambda: tensor._version)]


def uses(tensor: Any) -> Iterator[Any]:
    """Use a tensor after the mode has ended."""
    weight = torch.full((), 2.0, device=tensor.device, requires_grad=True)
    yield result_of(lambda: (weight * tensor).sum().backward())
    yield None if weight.grad is None else weight.grad.tolist()
    yield result_of(lambda: state(tensor.add_(1)))
    yield result_of(lambda: state(tensor.view(-1)))
    yield result_of(lambda: state(tensor.transpose_(0, -1)))


def history(device: Any, view: str, change: str, made: str, mode: str) -> list[Any]:
    """Return the states of a tensor and its view that a program sees."""
    found: list[Any] = []
    with MODES[made]():
        base = torch.arange(12.0, device=device).reshape(3, 4).clone()
    with MODES[mode]():
        seen = result_of(lambda: (VIEWS | DETACHED)[view](base))
        if isinstance(seen, str):
            return [seen, state(base)]
        found += [state(seen), result_of(lambda: CHANGES[change](seen) is None)]
        found += [state(seen), state(base)]
    found += [*uses(seen), state(base), *uses(base), state(seen)]
    return found


@pytest.mark.each_pair
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("made", ["inference", "grad"])
@pytest.mark.parametrize("mode", MODES)
def test_view_behaves_as_locally_in_each_mode(
    two_nodes: Any, view: str, change: str, made: str, mode: str
) -> None:
    expected = history("cpu", view, change, made, mode)
    for _ in range(2):  # without and with known templates
        assert history(two_nodes[0], view, change, made, mode) == expected


@pytest.mark.each_pair
@pytest.mark.parametrize("view", DETACHED)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("made", ["inference", "grad"])
@pytest.mark.parametrize("mode", MODES)
def test_detached_tensor_behaves_as_locally_in_each_mode(
    two_nodes: Any, view: str, change: str, made: str, mode: str
) -> None:
    expected = history("cpu", view, change, made, mode)
    for _ in range(2):
        assert history(two_nodes[0], view, change, made, mode) == expected

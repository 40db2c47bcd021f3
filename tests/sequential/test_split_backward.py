"""Test that both halves of a backward pass together give the same gradients as a whole pass, for any layer.

The first half computes the gradients of the inputs, and the second half computes the gradients of the
weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flowchan.pipelines.sequential.engine.split_backward import SplitBackward

WIDTH = 4


class Residual(nn.Module):
    """Layer with two paths to its input, one of them through weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Bare(nn.Module):
    """Layer with parameters that do not depend on its input. Some outputs depend on only one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x * self.scale, (self.shift * self.shift).expand_as(x)], 1)[:, ::2]


class Tied(nn.Module):
    """Layer that uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x).tanh())


class Doubled(torch.autograd.Function):
    """Compute ``x * weight``, with a backward pass in Python."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        Doubled.calls += 1
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class InPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x, self.weight)  # type: ignore[no-any-return]


class Hooked(nn.Module):
    """Layer with a hook that halves the gradient of an inner output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.register_hook(lambda gradient: gradient / 2)
        return y.exp()


class Again(nn.Module):
    """Layer that recomputes its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


class Split(nn.Module):
    """Layer whose graph has a node with both used and unused outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        one, other, _ = self.linear(x).chunk(3, 1)
        return one * other


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no weights": nn.Tanh,
    "identity": nn.Identity,
    "normalised": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "residual": Residual,
    "bare": Bare,
    "tied": Tied,
    "python": InPython,
    "hooked": Hooked,
    "again": Again,
    "split": Split,
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0),
    "gru": lambda: Gru(),
}


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]  # type: ignore[no-any-return]


def both(module: nn.Module, x: Tensor, given: Tensor) -> tuple[SplitBackward, list[Tensor | None]]:
    """Return a split backward pass, and the gradients that the plain module's parameters should get."""
    plain = copy.deepcopy(module)
    plain(x.detach()).backward(given) if not x.requires_grad else plain(x).backward(given)
    halves = SplitBackward([module(x)], [given], [x] if x.requires_grad else [])
    return halves, [one.grad for one in plain.parameters()]


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_two_halves_together_match_the_whole_backward_pass(name: str, wants: bool) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), LAYERS[name](), nn.Linear(WIDTH, WIDTH)).double()
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=wants)
    given = torch.randn(5, WIDTH, dtype=torch.float64)
    halves, expected = both(module, x, given)
    wanted, x.grad = x.grad, None
    halves.first()
    torch.testing.assert_close(x.grad, wanted, rtol=1e-13, atol=1e-15)
    halves.second()
    for one, other in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(one.grad, other, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(x.grad, wanted)  # the second half must not change it


@pytest.mark.parametrize("name", ["linear", "normalised", "residual", "split", "weight norm"])
def test_first_half_computes_no_weight_gradients_where_possible(name: str) -> None:
    module = LAYERS[name]()
    x = torch.randn(5, WIDTH, requires_grad=True)
    halves = SplitBackward([module(x)], [torch.ones(5, WIDTH)], [x])
    halves.first()
    assert x.grad is not None
    assert all(one.grad is None for one in module.parameters())
    halves.second()
    assert all(one.grad is not None for one in module.parameters())


@pytest.mark.parametrize("name", ["python", "tied"])
def test_inseparable_layer_computes_both_gradients_in_the_first_half(name: str) -> None:
    module = LAYERS[name]()
    x = torch.randn(5, WIDTH, requires_grad=True)
    Doubled.calls = 0
    halves = SplitBackward([module(x)], [torch.ones(5, WIDTH)], [x])
    halves.first()
    assert all(one.grad is not None for one in module.parameters())
    halves.second()
    assert Doubled.calls == (name == "python")


def test_loss_as_root_needs_no_gradient() -> None:
    module = nn.Linear(WIDTH, 1)
    x = torch.randn(5, WIDTH, requires_grad=True)
    halves = SplitBackward([module(x).mean()], None, [x])
    halves.first()
    halves.second()
    torch.testing.assert_close(module.weight.grad, x.detach().mean(0, keepdim=True))


def test_output_can_be_the_input_or_a_weight() -> None:
    weight = nn.Parameter(torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    halves = SplitBackward([x, weight], [torch.full((3,), 2.0), torch.full((3,), 3.0)], [x])
    halves.first()
    assert (x.grad is not None and x.grad.tolist(), weight.grad) == ([2, 2, 2], None)
    halves.second()
    assert (x.grad.tolist(), weight.grad is not None and weight.grad.tolist()) == ([2, 2, 2], [3, 3, 3])


def test_second_half_frees_the_autograd_graph() -> None:
    x = torch.randn(5, WIDTH, requires_grad=True)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    y = functional.linear(x, weight)
    halves = SplitBackward([y], [torch.ones_like(y)], [x])
    halves.first()
    halves.second()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(torch.ones_like(y))

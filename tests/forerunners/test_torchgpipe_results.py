"""Test ``Sequential`` with the cases from torchgpipe 0.0.7's tests of results.

They cover transparency, checkpoints, in-place changes, deferred batch norm and former bugs. Each test has the
name of the original test but none of its code.

The following cases differ from the originals:

``test_inplace_*``
    Inputs are not changed, so all three cases give the same results as the plain module.

The following cases are left out:

``test_convert_deferred_batch_norm``, ``test_optimize``
    No layer is replaced with a layer of another type.
``test_detect_checkpointing_recomputing*``
    A layer cannot detect that it is called again.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_torchgpipe import assert_like, gradients, one_layer, recomputing
from torch import Tensor, nn

from flowchan.pipelines import Sequential

pytestmark = [
    pytest.mark.usefixtures("one_compute_thread"),
    pytest.mark.filterwarnings("ignore:Sequential. with .* parts:RuntimeWarning"),
]


# --- test_bugs.py ---


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Applies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Identity.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def test_python_autograd_function() -> None:
    x = torch.rand(42, requires_grad=True)
    with Sequential([Applies(), Applies()], [1, 1], recompute=True) as pipe:
        y = pipe(x)
        y.sum().backward()
    torch.testing.assert_close(y, x)
    torch.testing.assert_close(x.grad, torch.ones(42))


def test_parallel_randoms() -> None:
    """The backward pass drops the same elements as the forward pass."""
    torch.manual_seed(0)
    x = torch.ones(100, 10, requires_grad=True)
    with Sequential([nn.Dropout(), nn.Dropout()], [1, 1], chunks=10, recompute=True) as pipe:
        y = pipe(x)
        y.norm().backward()
    assert x.grad is not None
    assert torch.equal(y == 0, x.grad == 0)


# --- test_inplace.py ---


@pytest.mark.parametrize("name", ["on_requires_grad", "on_not_requires_grad"])
def test_inplace(name: str) -> None:
    module = nn.Sequential(nn.ReLU(inplace=True))
    if name == "on_requires_grad":
        module.insert(0, nn.Linear(1, 1))
    x, twin = torch.rand(6, 1) - 0.5, copy.deepcopy(module)
    kept = x.clone()
    with Sequential(module, len(module), recompute=True, chunks=2) as pipe:
        torch.testing.assert_close(pipe(x), twin(x.clone()))
    assert torch.equal(x, kept)


class AddsInPlace(nn.Module):
    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        first, second = both
        second.add_(1)
        return first * second


def test_inplace_incorrect_grad() -> None:
    """In torchgpipe, the gradient is 3, because the addition is repeated."""
    first, second = torch.tensor([1.0], requires_grad=True), torch.tensor([1.0])
    with Sequential([AddsInPlace()], [1], recompute=True) as pipe:
        pipe((first, second)).backward()
    assert first.grad is not None
    assert (first.grad.item(), second.item()) == (2, 1)


# --- test_transparency.py, test_checkpoint.py ---


@recomputing
def test_simple_linears(recompute: bool) -> None:
    module = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 4), nn.Linear(4, 2), nn.Linear(2, 1))
    twin = copy.deepcopy(module)
    assert_like(module, twin, torch.rand(8, 1), parts=[2, 2], chunks=4, recompute=recompute)


class Logs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, log: list[str]) -> Tensor:
        ctx.name, ctx.log = name, log
        log.append(f"{name}:forward")
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.log.append(f"{ctx.name}:backward")
        return gradient, None, None


class LogsItself(nn.Module):
    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log = name, log

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "meta":
            return x
        return Logs.apply(x, self.name, self.log)  # type: ignore[no-any-return,no-untyped-call]


def test_serial_checkpoints() -> None:
    log: list[str] = []
    layers = [LogsItself("a", log), LogsItself("b", log)]
    with Sequential(layers, [1, 1], chunks=1, recompute=True) as pipe:
        pipe(torch.rand(1, requires_grad=True)).backward()
    # The last part may start its backward pass at once, with the activations that it still has.
    assert log in (
        ["a:forward", "b:forward", "b:forward", "b:backward", "a:forward", "a:backward"],
        ["a:forward", "b:forward", "b:backward", "a:forward", "a:backward"],
    )


def test_not_requires_grad_and_with_parameter() -> None:
    with Sequential([nn.Tanh()], [1], recompute=True) as pipe:
        assert not pipe(torch.rand(1)).requires_grad
    with Sequential(one_layer(), [1], recompute=True) as pipe:
        pipe(torch.rand(1, 1)).backward()
        gradients(pipe)


@recomputing
def test_random_in_checkpoint(recompute: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 3, requires_grad=True)
    with Sequential([nn.Dropout(p=0.5)], [1], chunks=1, recompute=recompute) as pipe:
        y = pipe(x)
        y.norm().backward()
    assert x.grad is not None
    assert torch.equal(y == 0, x.grad == 0)


# --- test_deferred_batch_norm.py ---


def tilted() -> Tensor:
    x = torch.rand(16, 3, 8, 8)
    x *= torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1)
    return x + 2.0 ** torch.arange(16).view(16, 1, 1, 1) / 100


def plainly(module: nn.Module, x: Tensor, chunks: int) -> Tensor:
    return torch.cat([module(piece) for piece in x.tensor_split(chunks)])


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("wanted", [True, False])
def test_transparency_and_input_requiring_grad(chunks: int, wanted: bool) -> None:
    plain = nn.Sequential(nn.BatchNorm2d(3))
    module, x = copy.deepcopy(plain), tilted().requires_grad_(wanted)
    other = x.detach().clone().requires_grad_(wanted)
    with Sequential(module, [1], chunks=chunks) as pipe:
        y = pipe(x)
        y.mean().backward()
    expected = plainly(plain, other, chunks)
    expected.mean().backward()
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gradients(module), gradients(plain), atol=1e-4, rtol=1e-4)
    if wanted:
        torch.testing.assert_close(x.grad, other.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_stats(momentum: float | None) -> None:
    plain = nn.Sequential(nn.BatchNorm2d(3, momentum=momentum))
    module, x = copy.deepcopy(plain), tilted()
    with Sequential(module, [1], chunks=4) as pipe:
        pipe(x)
    plain(x)
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), atol=1e-4, rtol=1e-4)


def test_eval() -> None:
    plain = nn.Sequential(nn.BatchNorm2d(3)).train()
    plain(tilted())
    module, x = copy.deepcopy(plain.eval()), tilted()
    with Sequential(module, [1], chunks=4) as pipe:
        torch.testing.assert_close(pipe(x), plain(x))
    torch.testing.assert_close(module.state_dict(), plain.state_dict())


def test_conv_bn() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).double()
    module, x = copy.deepcopy(plain), tilted().double()
    with Sequential(module, [1, 1], chunks=4) as pipe:
        pipe(x).square().mean().backward()
    plainly(plain, x, 4).square().mean().backward()
    torch.testing.assert_close(gradients(module), gradients(plain))

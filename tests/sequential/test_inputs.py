"""Test inputs and outputs: several arguments, ``None``, a different batch dimension, and ways of joining."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from plain import dense, on_both_placements
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flowchan.pipelines import Sequential


class Attends(nn.Module):
    """Layer that takes several arguments and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, other: Tensor | None = None, *, mask: Tensor | None = None) -> Any:
        y = self.linear(x) if other is None else self.linear(x) + other
        return {"y": y if mask is None else y * mask, "mask": mask}


class Gives(nn.Module):
    """Layer that returns a tensor and an optional mask."""

    def forward(self, found: dict[str, Tensor | None]) -> Any:
        y, mask = found["y"], found["mask"]
        assert y is not None
        return y.tanh(), mask


def whole(module: nn.Sequential, *inputs: Any, **named: Any) -> Any:
    """Compute the output of both layers for the whole batch."""
    return module[1](module[0](*inputs, **named))


@on_both_placements
@pytest.mark.parametrize("gradients", [True, False])
def test_several_arguments_go_to_the_first_layer(on: Any, gradients: bool) -> None:
    module = nn.Sequential(Attends(), Gives())
    plain = copy.deepcopy(module)
    x, other, mask = torch.randn(7, 6), torch.randn(7, 6, requires_grad=gradients), torch.rand(7, 1)
    twin = other.detach().clone().requires_grad_(gradients)
    calls: list[Any] = [
        lambda run, other: run(x, other),
        lambda run, other: run(x, None, mask=mask),
        lambda run, other: run(x, other=other, mask=None),
        lambda run, other: run(x=x, other=other, mask=mask),
    ]
    with Sequential(module, 2, on=on, chunks=3) as pipe, torch.set_grad_enabled(gradients):
        for call in calls:
            y, given = call(pipe, other)
            expected, as_expected = call(partial(whole, plain), twin)
            torch.testing.assert_close(y, expected)
            assert (given is None) == (as_expected is None)
            if gradients:
                y.square().sum().backward()
                expected.square().sum().backward()
        if gradients:
            torch.testing.assert_close(other.grad, twin.grad)
            torch.testing.assert_close(module[0].linear.weight.grad, plain[0].linear.weight.grad)


def test_argument_with_a_wrong_size_or_type_is_named() -> None:
    with Sequential([Attends(), Gives()]) as pipe:
        with pytest.raises(ValueError, match=r"mask must have the same batch size as argument 0 \(7\)"):
            pipe(torch.ones(7, 6), mask=torch.ones(3, 1))
        with pytest.raises(TypeError, match=r"argument 1 must be a tensor, got .*1\.5"):
            pipe(torch.ones(7, 6), 1.5)
        with pytest.raises(TypeError, match="must contain at least one tensor"):
            pipe(None)


class Recurrent(nn.Module):
    """Layer for sequences whose first dimension is time and whose second is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 5)

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x)  # the batch is also the second dimension of the hidden state


class Both(nn.Module):
    def forward(self, found: tuple[Tensor, Tensor]) -> Tensor:
        return found[0] + found[1]


@on_both_placements
def test_batch_dimension_can_be_chosen(on: Any) -> None:
    module = nn.Sequential(Recurrent(), Both())
    plain = copy.deepcopy(module)
    x = torch.randn(4, 7, 6, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    with Sequential(module, 2, on=on, chunks=3, dim=1) as pipe:
        for run, given in ((pipe, x), (plain, twin)):
            y = run(given)
            assert y.shape == (4, 7, 5)
            y.square().sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), plain(x))
            torch.testing.assert_close(next(pipe.stream([x])), plain(x))
        twins = copy.deepcopy(pipe)
        torch.testing.assert_close(twins(x), plain(x))
        twins.close()
        with pytest.raises(
            ValueError, match=r"x must have dimension 1, the batch dimension, got shape \(3,\)"
        ):
            pipe(torch.ones(3))
        with pytest.raises(ValueError, match=r"got dim=1; compute the loss yourself from pipe\(x\)"):
            pipe.trainer(loss=cross_entropy)
    torch.testing.assert_close(x.grad, twin.grad)
    for actual, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, other.grad)


class Sums(nn.Module):
    """Layer that returns one number per sample, and one number for the whole batch."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(1), x.square().sum()


def joined(outputs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate the numbers for samples, and add the numbers for micro-batches."""
    each, sums = zip(*outputs, strict=True)
    return torch.cat(each), torch.stack(sums).sum()


@on_both_placements
def test_join_function_combines_outputs(on: Any) -> None:
    module = nn.Sequential(nn.Linear(6, 6), Sums())
    plain = copy.deepcopy(module)
    x = torch.randn(7, 6)
    with Sequential(module, 2, on=on, chunks=3, join=joined) as pipe:
        for run in (pipe, plain):
            each, one = run(x)
            (each.sum() + one * 2).backward()
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), plain(x))
    for actual, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, other.grad)


class Sometimes(nn.Module):
    """Layer that returns ``None`` as its second value for large inputs."""

    def forward(self, x: Tensor) -> Any:
        return x, None if x.device.type != "meta" and x.max() > 10 else x


def test_output_that_is_sometimes_none_raises() -> None:
    with (
        Sequential([nn.Identity(), Sometimes()], chunks=2) as pipe,
        pytest.raises(
            ValueError, match=r"the output must be a tensor for every micro-batch or None .* join="
        ),
    ):
        pipe(torch.tensor([[1.0], [11.0]]))


@pytest.mark.parametrize(
    ("options", "error"), [({"dim": -1}, ValueError), ({"dim": True}, ValueError), ({"join": 3}, TypeError)]
)
def test_invalid_dim_or_join_raises(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"Sequential: (dim|join) must be"):
        Sequential(dense(), **options)

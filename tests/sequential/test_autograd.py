"""Test that the outputs of a pipe have the same gradients as the plain module's outputs.

The tests cover parameters, inputs, layers before the pipe, various losses, hooks, accumulation and
``retain_graph``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plain import on_both_placements
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam
from torch.utils.checkpoint import checkpoint
from trained import perceptron

from flowchan import Closed, StageError
from flowchan.pipelines import Pop, Sequential, Stash

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    yield
    torch.set_default_dtype(torch.float32)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: one.grad for name, one in module.named_parameters()}


def assert_same_gradients(module: nn.Module, plain: nn.Module) -> None:
    actual, other = gradients(module), gradients(plain)
    assert actual.keys() == other.keys()
    for name, gradient in actual.items():
        assert (gradient is None) == (other[name] is None), name
        torch.testing.assert_close(gradient, other[name], **CLOSE)


def contrastive(y: Tensor) -> Tensor:
    """Return a loss that combines every sample with every other sample."""
    return (y @ y.t()).logsumexp(1).sum() - (y * y).sum()


@on_both_placements
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_inside_and_outside_the_pipe_match_plain_modules(on: Any, recompute: bool) -> None:
    model = perceptron()
    encoder, head = nn.Linear(5, 6), nn.Linear(4, 3)
    plain = copy.deepcopy(nn.Sequential(encoder, model, head))
    x = torch.randn(11, 5, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    with Sequential(model, 3, on=on, chunks=4, recompute=recompute) as pipe:
        whole = nn.Sequential(encoder, pipe, head)
        for _ in range(2):  # gradients accumulate
            y, expected = whole(x), plain(other)
            torch.testing.assert_close(y, expected, **CLOSE)
            contrastive(y).backward()
            contrastive(expected).backward()
    assert_same_gradients(whole, plain)
    torch.testing.assert_close(x.grad, other.grad, **CLOSE)


@on_both_placements
def test_outside_optimizer_trains_like_plain_modules(on: Any) -> None:
    model, head = perceptron(), nn.Linear(4, 3)
    plain = copy.deepcopy(nn.Sequential(model, head))
    x, target = torch.randn(9, 6), torch.tensor([0, 1, 2, -100, -100, -100, 1, 1, 0])
    with Sequential(model, 3, on=on, chunks=3) as pipe:  # the second micro-batch contains only padding
        whole = nn.Sequential(pipe, head)
        for module in (whole, plain):
            optimizer = Adam(module.parameters(), lr=0.01)
            for _ in range(5):
                optimizer.zero_grad()
                for piece, wanted in ((x, target), (x[:4], target[:4])):  # the gradients accumulate
                    cross_entropy(module(piece), wanted, ignore_index=-100).backward()
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
        torch.testing.assert_close(dict(whole.state_dict()), dict(plain.state_dict()), **CLOSE)
        whole.eval()
        with torch.no_grad():
            torch.testing.assert_close(whole(x), plain(x), **CLOSE)


@on_both_placements
@pytest.mark.parametrize("change", ["data", "no_grad", "load"])
def test_every_kind_of_parameter_change_applies_at_once(on: Any, change: str) -> None:
    model = perceptron()
    x = torch.randn(8, 6)
    with Sequential(model, 2, on=on, chunks=2) as pipe:
        pipe(x)
        with torch.no_grad():
            pipe(x)
        if change == "data":
            for parameter in pipe.parameters():
                parameter.data.mul_(0.5)
        elif change == "no_grad":
            with torch.no_grad():
                for parameter in pipe.parameters():
                    parameter.mul_(0.5)
        else:
            nn.Sequential(pipe).load_state_dict(nn.Sequential(perceptron(seed=9)).state_dict())
        torch.testing.assert_close(pipe(x), model(x), **CLOSE)
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), model(x), **CLOSE)
            torch.testing.assert_close(next(pipe.stream([x])), model(x), **CLOSE)


@on_both_placements
@pytest.mark.parametrize("recompute", [False, True])
def test_second_backward_pass_needs_retain_graph(on: Any, recompute: bool) -> None:
    model = perceptron()
    plain = copy.deepcopy(model)
    x = torch.randn(6, 6)
    with Sequential(model, 2, on=on, chunks=3, recompute=recompute) as pipe:
        for module in (pipe, plain):
            y = module(x).square().sum()
            y.backward(retain_graph=True)
            y.backward()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                y.backward()
        assert_same_gradients(pipe, plain)


@on_both_placements
def test_backward_passes_work_in_any_order_and_combined(on: Any) -> None:
    model = perceptron()
    plain = copy.deepcopy(model)
    a, b, c = torch.randn(4, 6), torch.randn(7, 6), torch.randn(5, 6)
    with Sequential(model, 3, on=on, chunks=2) as pipe:
        for module in (pipe, plain):
            first, second = module(a), module(b)
            module(c)  # a call without a backward pass
            module.eval()  # does not affect existing outputs
            (first.sum() * module(c).mean()).backward()
            second.square().sum().backward()
        assert_same_gradients(pipe, plain)


@on_both_placements
def test_torch_autograd_grad_matches_the_plain_module(on: Any) -> None:
    model = perceptron()
    x = torch.randn(6, 6, requires_grad=True)
    with Sequential(model, 2, on=on, chunks=4) as pipe:
        found = torch.autograd.grad(contrastive(pipe(x)), [x, pipe[0].weight])
        expected = torch.autograd.grad(contrastive(model(x)), [x, model[0].weight])
    torch.testing.assert_close(found, expected, **CLOSE)
    assert not any(parameter.grad is not None for parameter in model.parameters())


@on_both_placements
def test_hooks_are_called_once_per_batch(on: Any) -> None:
    model = perceptron()
    plain = copy.deepcopy(model)
    x = torch.randn(8, 6)
    with Sequential(model, 3, on=on, chunks=4) as pipe:
        calls: list[list[str]] = []
        for module in (pipe, plain):
            recorded: list[str] = []
            calls.append(recorded)
            module[0].weight.register_hook(
                lambda g, recorded=recorded: recorded.append("weight") or g.clamp(-0.01, 0.01)
            )
            module[2].bias.register_post_accumulate_grad_hook(
                lambda _, recorded=recorded: recorded.append("bias")
            )
            module.register_forward_hook(lambda m, i, o, recorded=recorded: recorded.append("forward"))
            module.register_full_backward_hook(lambda m, i, o, recorded=recorded: recorded.append("backward"))
            contrastive(module(x)).backward()
        assert_same_gradients(pipe, plain)
        assert sorted(calls[0]) == sorted(calls[1]) == ["backward", "bias", "forward", "weight"]


@on_both_placements
def test_frozen_parameters_get_no_gradient_and_can_be_unfrozen(on: Any) -> None:
    model = perceptron()
    plain = copy.deepcopy(model)
    x = torch.randn(8, 6)
    with Sequential(model, 3, on=on, chunks=4) as pipe:
        for module in (pipe, plain):
            module[:4].requires_grad_(False)
            module(x).sum().backward()
            module[0].requires_grad_(True)
            module(x).square().sum().backward()
        assert_same_gradients(pipe, plain)
        pipe.requires_grad_(False)
        assert not pipe(x).requires_grad
        x.requires_grad_()
        assert pipe(x).requires_grad


@on_both_placements
def test_output_requires_grad_like_the_plain_modules(on: Any) -> None:
    x = torch.randn(8, 6)
    with Sequential(perceptron(), 2, on=on) as pipe:
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                assert not pipe(x).requires_grad
        assert pipe(x).requires_grad
        assert not any(y.requires_grad for y in pipe.stream([x]))
        with pytest.raises(ValueError, match=r"x must not require grad, .*; call pipe\(x\)"):
            list(pipe.stream([x.requires_grad_()]))


class Fork(nn.Module):
    """Layer that returns several values, some of which cannot have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Any) -> Any:
        x, named = value
        y = self.linear(x)
        return y.clone().t().t(), {"best": y.argmax(1), "still": y.detach(), "scaled": [y * named["scale"]]}


@on_both_placements
def test_nested_values_have_gradients_where_possible(on: Any) -> None:
    model = nn.Sequential(nn.Identity(), Fork())
    plain = copy.deepcopy(model)
    scale = torch.rand(7, 1, requires_grad=True)
    other = scale.detach().clone().requires_grad_()
    x = torch.randn(7, 6)
    with Sequential(model, 2, on=on, chunks=3) as pipe:
        for module, given in ((pipe, scale), (plain, other)):
            first, named = module((x, {"scale": given}))
            assert first.requires_grad
            assert named["scaled"][0].requires_grad
            assert not named["best"].requires_grad
            assert not named["still"].requires_grad
            first.mul_(2)  # the output belongs to the caller
            (first.sum() + contrastive(named["scaled"][0])).backward()
        assert_same_gradients(pipe, plain)
    torch.testing.assert_close(scale.grad, other.grad, **CLOSE)


@on_both_placements
def test_backward_from_one_of_several_outputs_matches(on: Any) -> None:
    model = nn.Sequential(nn.Identity(), Fork())
    plain = copy.deepcopy(model)
    x, scale = torch.randn(7, 6), torch.rand(7, 1)
    with Sequential(model, 2, on=on, chunks=3) as pipe:
        for module in (pipe, plain):
            module((x, {"scale": scale}))[1]["scaled"][0][3].sum().backward()
        assert_same_gradients(pipe, plain)


@on_both_placements
def test_skips_pass_values_forward_and_gradients_back(on: Any) -> None:
    model = nn.Sequential(Stash("in"), nn.Linear(6, 6), nn.Tanh(), Pop("in"), nn.Linear(6, 2))
    plain = copy.deepcopy(model)
    x = torch.randn(7, 6, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    with Sequential(model, 4, on=on, chunks=3) as pipe:
        for module, given in ((pipe, x), (plain, other)):
            contrastive(module(given)).backward()
        assert_same_gradients(pipe, plain)
    torch.testing.assert_close(x.grad, other.grad, **CLOSE)


@on_both_placements
def test_parts_can_share_a_parameter(on: Any) -> None:
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    model = nn.Sequential(first, nn.Tanh(), last)
    plain = copy.deepcopy(model)
    x = torch.randn(7, 6)
    with Sequential(model, 3, on=on, chunks=3) as pipe:
        optimizers = [torch.optim.SGD(module.parameters(), 0.1) for module in (pipe, plain)]
        for _ in range(3):
            for module, optimizer in zip((pipe, plain), optimizers, strict=True):
                optimizer.zero_grad()
                contrastive(module(x)).backward()
                optimizer.step()
        torch.testing.assert_close(dict(pipe.state_dict()), dict(plain.state_dict()), **CLOSE)
        assert pipe[0].weight is pipe[2].weight


@on_both_placements
def test_autocast_around_a_call_reaches_the_parts(on: Any) -> None:
    model = perceptron().float()
    x = torch.randn(8, 6, dtype=torch.float32)
    with Sequential(model, 3, on=on, chunks=1) as pipe, torch.autocast("cpu", torch.bfloat16):
        y, expected = pipe(x), model(x)
        assert y.dtype == expected.dtype == torch.bfloat16
        assert torch.equal(y, expected)
        with torch.no_grad():
            assert torch.equal(pipe(x), model(x))
        with pytest.raises(RuntimeError, match=r"autocast does not reach the parts of a stream"):
            pipe.stream([x])
        y.float().sum().backward()
        found = gradients(pipe)
        pipe.zero_grad()
        expected.float().sum().backward()
        torch.testing.assert_close(found, gradients(pipe), rtol=0.02, atol=0.02)


class Checkpointed(nn.Module):
    """Layer that keeps only its input and recomputes its activations."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)  # type: ignore[no-any-return]


@on_both_placements
def test_checkpoint_inside_layers_matches_the_plain_module(on: Any) -> None:
    model = nn.Sequential(*(Checkpointed(nn.Sequential(nn.Linear(6, 6), nn.Tanh())) for _ in range(4)))
    plain = copy.deepcopy(model)
    x = torch.randn(7, 6)
    with Sequential(model, 2, on=on, chunks=3) as pipe:
        for module in (pipe, plain):
            contrastive(module(x)).backward()
        assert_same_gradients(pipe, plain)


def test_dropout_is_equal_on_threads_processes_and_when_recomputed() -> None:
    found = []
    for on, recompute in (("thread", False), ("process", False), ("thread", True), ("process", True)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 6), nn.Dropout())
        with Sequential(model, 2, on=on, chunks=3, recompute=recompute) as pipe:  # type: ignore[arg-type]
            contrastive(pipe(torch.ones(7, 6))).backward()
        found.append(gradients(model))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], **CLOSE)


def test_modules_without_randomness_do_not_advance_the_generator() -> None:
    with Sequential(perceptron(), 2) as pipe:
        before = torch.get_rng_state()
        pipe(torch.ones(4, 6)).sum().backward()
        assert torch.equal(torch.get_rng_state(), before)


# --- unsupported uses raise ---


@on_both_placements
def test_second_derivatives_raise(on: Any) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    with Sequential(perceptron(), 2, on=on, chunks=2) as pipe:
        with pytest.raises(RuntimeError, match=r"second derivatives cannot flow .* pipe\.module"):
            torch.autograd.grad(pipe(x).sum(), x, create_graph=True)
        pipe(x).sum().backward()  # the pipe stays usable


@on_both_placements
def test_parameter_change_before_the_backward_pass_raises(on: Any) -> None:
    with Sequential(perceptron(), 2, on=on, chunks=2) as pipe:
        y = pipe(torch.randn(4, 6)).sum()
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.add_(1)
        with pytest.raises((RuntimeError, StageError), match="modified by an inplace operation"):
            y.backward()


class Bad(nn.Module):
    """Layer with a forward or backward pass that raises if a value is large."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 100:
            raise ArithmeticError("too large")
        return Weak.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Weak(torch.autograd.Function):
    """Identity function that raises for large gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if gradient.abs().max() > 100:
            raise ArithmeticError("too steep")
        return gradient


@on_both_placements
def test_failing_part_is_named_and_the_pipe_stays_usable(on: Any) -> None:
    x = torch.ones(8, 6)
    with Sequential([nn.Linear(6, 6), nn.Linear(6, 6), Bad(), nn.Identity()], 4, on=on, chunks=4) as pipe:
        whole = pipe(x).sum()
        pipe.module[1].weight.data.fill_(1000)
        with pytest.raises(
            StageError, match=r"part 2 \(layer '2'\) failed on micro-batch 0 of 4 of batch 1: A"
        ):
            pipe(torch.full((8, 6), 1e3))
        with pytest.raises(
            StageError, match=r"part 2 .* failed on the backward pass of batch 0: Arith.* steep"
        ):
            (whole * 1000).backward()
        assert all(parameter.grad is None for parameter in pipe.parameters())
        pipe.module[1].weight.data.zero_()
        pipe(x).sum().backward()
        assert pipe[0].weight.grad is not None


@on_both_placements
def test_closed_pipe_raises_in_the_backward_pass(on: Any) -> None:
    with Sequential(perceptron(), 2, on=on, chunks=2) as pipe:
        y = pipe(torch.ones(4, 6)).sum()
    with pytest.raises(Closed):
        y.backward()
    with pytest.raises(Closed):
        pipe(torch.ones(4, 6))

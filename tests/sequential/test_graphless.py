"""A pipe is no ``nn.Module`` yet: gradients end at it and a larger module doesn't register it, and it says
so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain import dense, everywhere
from torch import nn
from torch.nn.functional import cross_entropy
from trained import batches, in_parts, perceptron

from flowchan.pipelines import Sequential


@everywhere
def test_an_input_that_requires_a_gradient_raises(on: Any) -> None:
    encoder = nn.Linear(6, 6)
    x = torch.randn(8, 6)
    with Sequential(dense(), on=on) as pipe:
        with pytest.raises(ValueError, match=r"x requires a gradient, but none goes back through a pipe"):
            pipe(encoder(x))
        with pytest.raises(ValueError, match=r"x requires a gradient.*give x.detach\(\)"):
            list(pipe.stream([x, encoder(x)]))
        assert len(pipe(encoder(x).detach())) == 8
        with torch.no_grad():
            assert len(pipe(encoder(x))) == 8
            assert len(pipe(x.clone().requires_grad_())) == 8


def test_the_tensor_that_requires_a_gradient_is_named() -> None:
    x = {"a": torch.randn(2, 3), "b": [torch.randn(2, 3, requires_grad=True)]}
    with (
        Sequential([nn.Identity(), nn.Identity()]) as pipe,
        pytest.raises(ValueError, match=r"x\['b'\]\[0\] requires"),
    ):
        pipe(x)


def test_a_training_step_refuses_an_input_that_requires_a_gradient() -> None:
    ((x, target),) = batches([8])
    with in_parts(perceptron(), 2) as training:
        with pytest.raises(ValueError, match="x requires a gradient"):
            training.step(nn.Linear(6, 6)(x), target)
        with pytest.raises(ValueError, match="x requires a gradient"):
            training.evaluate(x.clone().requires_grad_())
        assert float(training.step(x, target)) > 0  # and goes on


@everywhere
def test_a_backward_pass_from_the_output_of_a_call_raises_with_the_remedy(on: Any) -> None:
    head = nn.Linear(3, 2)
    x, target = torch.randn(8, 6), torch.randint(2, (8,))
    with Sequential(dense(), on=on) as pipe:
        for chunks_of in (x, x[:1]):
            loss = cross_entropy(head(pipe(chunks_of)), target[: len(chunks_of)])
            with pytest.raises(RuntimeError, match=r"has no graph.*pipe\.training\(loss=…\)"):
                loss.backward()  # type: ignore[no-untyped-call]
        y = pipe(x)
        assert y.requires_grad
        assert torch.equal(y.add_(1).detach(), pipe(x).detach() + 1)  # it is the caller's own


@everywhere
def test_an_output_has_no_graph_where_the_plain_modules_has_none(on: Any) -> None:
    x = torch.randn(8, 6)
    with Sequential(dense(), on=on) as pipe:
        with torch.no_grad():
            assert not pipe(x).requires_grad
        with torch.inference_mode():
            assert not pipe(x).requires_grad
        assert not any(y.requires_grad for y in pipe.stream([x]))
    with Sequential(dense().requires_grad_(False), on=on) as frozen:
        assert not frozen(x).requires_grad


class Sorted(nn.Module):
    """Gives numbers and places."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        values, places = x.sort(dim=1)
        return {"values": values.t().t(), "places": places}


def test_only_outputs_that_can_have_gradients_have_a_graph() -> None:
    with Sequential([nn.Linear(6, 6), Sorted()], chunks=1) as pipe:
        y = pipe(torch.randn(8, 6))
    assert y["values"].requires_grad
    assert not y["places"].requires_grad
    y["values"].mul_(2)  # a view may be changed too


class Larger(nn.Module):
    """A model with a pipe in it."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner


def test_a_pipe_as_an_attribute_of_a_module_raises() -> None:
    with Sequential(dense()) as pipe:
        with pytest.raises(TypeError, match=r"no nn.Module: .*make pipe\.module the attribute"):
            Larger(pipe)
        with pytest.raises(TypeError, match="not a Module subclass"):
            nn.Sequential(pipe, nn.Linear(3, 2))  # type: ignore[arg-type]
        larger = Larger(pipe.module)
        with pytest.raises(TypeError, match=r"is no nn\.Module"):
            larger.inner = pipe
        larger.pipes = [pipe]  # type: ignore[assignment]  # as with modules, a list registers nothing
        assert list(larger.state_dict()) == [f"inner.{name}" for name in pipe.state_dict()]


def test_a_pipe_is_otherwise_what_it_is() -> None:
    with Sequential(dense()) as pipe:
        assert isinstance(pipe, Sequential)
        assert not isinstance(pipe, nn.Module)
        assert pipe.__class__ is type(pipe) is Sequential

        class Holder:
            """No module."""

        holder = Holder()
        holder.pipe = pipe  # type: ignore[attr-defined]

"""Test uses of a pipe that used to give wrong results without an error."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from plain import on_both_placements
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from flowchan import RunError
from flowchan.pipelines import Sequential


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def training(pipe: Sequential, **options: Any) -> Any:
    return pipe.trainer(**{"loss": functional.cross_entropy, "optimizer": partial(SGD, lr=0.1), **options})


def double(module: nn.Module, inputs: tuple[Tensor]) -> None:
    inputs[0].mul_(2)


def test_in_place_hook_does_not_change_the_input() -> None:
    plain = model()
    plain[0].register_forward_pre_hook(double)
    x = torch.ones(4, 4)
    with Sequential(plain, on="thread") as pipe:
        pipe(x)
    assert torch.equal(x, torch.ones(4, 4))


def test_weights_changed_in_inference_mode_apply_to_the_next_call() -> None:
    with torch.inference_mode():
        plain = model()
    x = torch.randn(4, 4)
    with Sequential(plain, on="process", chunks=1) as pipe:
        before = pipe(x)
        with torch.inference_mode():
            plain[2].bias += 1
        assert torch.allclose(pipe(x), before + 1, atol=1e-5)


@on_both_placements
@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_training_rejects_hooks_on_parameters(on: Any, hook: str) -> None:
    plain = model()
    getattr(plain[0].weight, hook)(lambda gradient: None)
    with (
        Sequential(plain, on=on) as pipe,
        pytest.raises(
            ValueError,
            match=r"parameter '0.weight' .*must not have hooks.*compute the loss yourself from pipe\(x\)",
        ),
    ):
        training(pipe)


def test_training_rejects_a_buffer_in_two_parts() -> None:
    norm = nn.BatchNorm1d(4, affine=False)
    with (
        Sequential([norm, nn.Linear(4, 4), norm], parts=[1, 2]) as pipe,
        pytest.raises(ValueError, match=r"each buffer must be in one part, got"),
    ):
        training(pipe)


class HalvesWhenItEvaluates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x[::2]


@on_both_placements
def test_evaluation_that_drops_samples_raises(on: Any) -> None:
    with (
        Sequential([nn.Linear(4, 3), HalvesWhenItEvaluates()], on=on, chunks=2) as pipe,
        training(pipe) as steps,
        pytest.raises(
            ValueError, match="micro-batch 0 of the evaluation must have 4 samples like its input, got 2"
        ),
    ):
        steps.evaluate(torch.randn(8, 4))


@on_both_placements
def test_detached_loss_raises(on: Any) -> None:
    def detached(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target).detach()

    with (
        Sequential(model(), on=on) as pipe,
        pytest.raises(RunError, match="loss must depend on the model's output"),
        training(pipe, loss=detached) as steps,
    ):
        steps.step(torch.randn(8, 4), torch.randint(3, (8,)))


def test_frozen_model_still_has_a_loss() -> None:
    plain = model().requires_grad_(False)
    with Sequential(plain) as pipe, training(pipe, optimizer=None) as steps:
        assert steps.step(torch.randn(8, 4), torch.randint(3, (8,))).dim() == 0


def test_error_for_a_loss_class_suggests_an_instance() -> None:
    with (
        Sequential(model()) as pipe,
        pytest.raises(TypeError, match=r"pass an instance, CrossEntropyLoss\(\)"),
    ):
        training(pipe, loss=nn.CrossEntropyLoss)


def test_error_for_an_array_names_the_conversion() -> None:
    with Sequential(model()) as pipe, pytest.raises(TypeError, match=r"torch\.from_numpy"):
        pipe(torch.ones(2, 4).numpy())

"""Test that optimizer steps on the server match torch, even after the server is replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from shard_blocks import Blocks, bits
from torch import nn, optim

pytestmark = pytest.mark.usefixtures("one_compute_thread")

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "momentum with dampening": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "nesterov": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda params: optim.Adam(params, lr=0.1),
    "amsgrad": lambda params: optim.AdamW(params, lr=0.1, amsgrad=True),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True),
    "nadam": lambda params: optim.NAdam(params, lr=0.1),
    "radam": lambda params: optim.RAdam(params, lr=0.1),
    "adadelta": lambda params: optim.Adadelta(params, lr=0.1),
    "adamax": lambda params: optim.Adamax(params, lr=0.1),
    "asgd": lambda params: optim.ASGD(params, lr=0.1),
    "rprop": lambda params: optim.Rprop(params, lr=0.1),
    "two groups": lambda params: optim.SGD(
        [{"params": params[:1], "lr": 1.0}, {"params": params[1:]}], lr=0.1, momentum=0.5
    ),
}


def start() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "weight": torch.randn(5, 3, dtype=torch.float64),
        "bias": torch.randn(5),
        "scale": torch.randn(()),
    }


def gradients(step: int) -> dict[str, torch.Tensor]:
    """Return gradients for some of the parameters. The choice depends on the step."""
    torch.manual_seed(step)
    chosen = {0: ["weight", "bias", "scale"], 1: ["weight"], 2: ["bias", "scale"]}[step % 3]
    return {name: torch.randn_like(value) for name, value in start().items() if name in chosen}


def plain(make: Callable[[Any], optim.Optimizer], steps: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    params = {name: nn.Parameter(value) for name, value in start().items()}
    optimizer = make(list(params.values()))
    for step in range(steps):
        optimizer.zero_grad()
        for name, gradient in gradients(step).items():
            params[name].grad = gradient * scale
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
@pytest.mark.parametrize("replaced", [False, True], ids=["one server", "replaced servers"])
def test_gradient_pushes_match_torch_bit_for_bit(
    make: Callable[[Any], optim.Optimizer], replaced: bool
) -> None:
    blocks = Blocks(start(), optimizer=make)
    for step in range(7):
        blocks.push("gradient", gradients(step))
        if replaced:
            blocks.replace_server(torn=True)
    for name, value in plain(make, 7).items():
        assert bits(blocks.current[name]) == bits(value)


def test_scale_multiplies_the_gradient() -> None:
    make = OPTIMIZERS["adagrad"]
    blocks = Blocks(start(), optimizer=make)
    for step in range(3):
        blocks.push("gradient", gradients(step), scale=0.3)
    assert bits(blocks.current["weight"]) == bits(plain(make, 3, 0.3)["weight"])


def test_pushes_with_other_rules_keep_the_optimizer_state() -> None:
    blocks = Blocks(start(), optimizer=OPTIMIZERS["adam"])
    blocks.push("gradient", gradients(0))
    slots = {name: bits(value) for name, value in blocks.current.items() if name.startswith("optimizer/")}
    blocks.push("copy", start())
    blocks.push("add", gradients(1), scale=2.0)
    assert {name: bits(blocks.current[name]) for name in slots} == slots


def test_state_may_mix_trained_tensors_with_arrays_and_integers() -> None:
    tensors = {"w": np.ones(3), "n": torch.zeros(1, dtype=torch.int64)}
    blocks = Blocks(tensors, optimizer=OPTIMIZERS["sgd"])
    blocks.push("gradient", {"w": np.ones(3)})
    assert isinstance(blocks.current["w"], np.ndarray)
    assert blocks.current["w"].tolist() == [0.9] * 3
    assert blocks.current["n"].tolist() == [0]


def test_failed_step_does_not_change_the_current_block() -> None:
    class Failing(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if any(p.grad is not None and bool(p.grad.isnan().any()) for p in self.param_groups[0]["params"]):
                raise FloatingPointError("nan")

    blocks = Blocks(start(), optimizer=lambda params: Failing(params, lr=0.1, momentum=0.9))
    good = Blocks(start(), optimizer=lambda params: Failing(params, lr=0.1, momentum=0.9))
    for step in range(4):
        with pytest.raises(FloatingPointError):
            blocks.push("gradient", {"weight": torch.full((5, 3), torch.nan, dtype=torch.float64)})
        blocks.stale = None
        blocks.push("gradient", gradients(step))
        good.push("gradient", gradients(step))
    assert {name: bits(x) for name, x in blocks.current.items()} == {
        name: bits(x) for name, x in good.current.items()
    }


def test_optimizer_that_needs_a_closure_is_rejected() -> None:
    with pytest.raises(TypeError, match="optimizer must work without a closure, got LBFGS"):
        Blocks(start(), optimizer=lambda params: optim.LBFGS(params))


def test_factory_that_returns_no_optimizer_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"optimizer must return a torch\.optim.Optimizer, got"):
        Blocks(start(), optimizer=lambda params: None)

"""Test mixed precision, recompute and dropout: equal results under every schedule, memory use, and masks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from plain import on_both_placements
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from trained import OPTIMIZERS, assert_same_state, batches, in_parts, perceptron, schedules

# --- mixed precision ---


@on_both_placements
@pytest.mark.parametrize("recompute", [False, True])
def test_autocast_matches_the_plain_module(on: Any, recompute: bool) -> None:
    module = perceptron()
    plain = copy.deepcopy(module)
    ((x, target),) = batches([12])
    with in_parts(module, 3, on, autocast=torch.bfloat16, recompute=recompute) as training:
        loss = training.step(x, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = plain(x)
        expected = cross_entropy(out, target)
    assert out.dtype is torch.bfloat16
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=0.01, atol=0.01)
    assert not torch.equal(loss, cross_entropy(perceptron()(x), target))
    for actual, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert actual.grad is not None
        assert actual.grad.dtype is torch.float32
        torch.testing.assert_close(actual.grad, other.grad, rtol=0.03, atol=0.003)


# --- recompute ---


class Counting(torch.autograd.Function):
    """Identity function that counts the activations kept for its backward pass."""

    alive = 0
    most = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        if any(ctx.needs_input_grad):
            ctx.kept = Kept()
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Kept:
    def __init__(self) -> None:
        Counting.alive += 1
        Counting.most = max(Counting.most, Counting.alive)

    def __del__(self) -> None:
        Counting.alive -= 1


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return Counting.apply(x, self.weight)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("schedule", "recompute", "most"), [("gpipe", False, 6), ("1f1b", False, 2), ("gpipe", True, 1)]
)
def test_peak_of_kept_micro_batches_depends_on_schedule_and_recompute(
    schedule: Any, recompute: bool, most: int
) -> None:
    """In the first of two parts, gpipe keeps all six micro-batches, 1f1b keeps two, and recompute keeps
    one."""
    torch.manual_seed(0)
    module = nn.Sequential(Counted(), nn.Linear(6, 4))
    ((x, target),) = batches([12])
    Counting.alive = Counting.most = 0
    with in_parts(module, 2, chunks=6, schedule=schedule, recompute=recompute) as training:
        training.step(x, target)
    assert (Counting.most, Counting.alive) == (most, 0)


def test_timeline_shows_recomputed_passes() -> None:
    ((x, target),) = batches([8])
    with in_parts(perceptron(), 2, recompute=True) as training:
        training.step(x, target)
        events = training.timeline().events
    again = [(event.part, event.chunk) for event in events if event.op == "recompute"]
    # the last part runs each backward pass immediately, so it does not recompute
    assert again == [(0, chunk) for chunk in range(4)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_single_chunk_is_recomputed_except_in_the_last_part(schedule: Any) -> None:
    ((x, target),) = batches([8])
    workers = 2 if schedule == "interleaved" else 4
    with in_parts(perceptron(), 4, chunks=1, schedule=schedule, workers=workers, recompute=True) as training:
        training.step(x, target)
        events = training.timeline().events
    assert sorted(event.part for event in events if event.op == "recompute") == [0, 1, 2]


# --- dropout ---


def dropped(p: float = 0.5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 24),
        nn.Dropout(p),
        nn.Linear(24, 24),
        nn.Tanh(),
        nn.Dropout(p),
        nn.Linear(24, 12),
        nn.Dropout(p),
        nn.Linear(12, 4),
    )


def trained_dropped(on: Any = "thread", parts: int = 3, **options: Any) -> nn.Module:
    module = dropped()
    torch.manual_seed(42)
    with in_parts(module, parts, on, optimizer=OPTIMIZERS["sgd"], **options) as training:
        for each in batches([8, 8, 5]):
            training.step(*each)
    return module


@schedules
def test_recomputed_dropout_draws_the_same_masks(schedule: Any, parts: int, workers: int) -> None:
    options = {"schedule": schedule, "parts": parts, "workers": workers}
    assert_same_state(trained_dropped(recompute=True, **options), trained_dropped(recompute=False, **options))


def test_dropout_masks_do_not_depend_on_placement_or_schedule() -> None:
    module = trained_dropped()
    assert_same_state(trained_dropped("process"), module)
    assert_same_state(trained_dropped("process", recompute=True), module)
    assert_same_state(trained_dropped(schedule="gpipe"), module)
    assert_same_state(trained_dropped(schedule="interleaved", workers=2), module)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_dropout_enabled_later_draws_the_same_masks_when_recomputed(schedule: Any) -> None:
    def trained(recompute: bool) -> nn.Module:
        module = dropped().eval()
        torch.manual_seed(42)
        with in_parts(
            module, 3, optimizer=OPTIMIZERS["sgd"], schedule=schedule, recompute=recompute
        ) as training:
            for each in batches([8, 8, 8]):
                training.step(*each)
                module.train()
        return module

    assert_same_state(trained(recompute=True), trained(recompute=False))


def test_dropout_masks_differ_between_steps_and_micro_batches() -> None:
    seen = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        # ignore the loss of the whole batch, which the first step also computes
        if len(output) == 1:
            seen.append(output.detach().clone())
        return output.mean()

    with in_parts(nn.Sequential(nn.Linear(6, 64), nn.Dropout()), 1, loss=loss) as training:
        for _ in range(2):
            training.step(torch.ones(4, 6), torch.zeros(4))
    assert len({tuple((each == 0).flatten().tolist()) for each in seen}) == 8


def test_dropout_depends_only_on_the_programs_seed() -> None:
    assert_same_state(trained_dropped(), trained_dropped())
    assert not torch.equal(dropped()[0].weight, trained_dropped()[0].weight)
    after = torch.rand(3)
    trained_dropped("process")
    assert torch.equal(torch.rand(3), after)


def test_dropout_drops_the_given_fraction() -> None:
    kept = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        kept.append(float((output != 0).float().mean()))
        return output.mean()

    module = nn.Sequential(nn.Identity(), nn.Dropout(0.25), nn.Identity())
    with in_parts(module, 3, loss=loss) as training:
        training.step(torch.ones(400, 100), torch.zeros(400))
    assert sum(kept) / len(kept) == pytest.approx(0.75, abs=0.02)

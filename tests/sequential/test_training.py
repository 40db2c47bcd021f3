"""Test that training in parts has the same outputs, losses, gradients and parameters as the plain module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from plain import on_both_placements
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from trained import OPTIMIZERS, assert_same_state, batches, in_parts, perceptron, schedules, train_plainly

from flowchan.pipelines.sequential import Sequential
from flowchan.pipelines.sequential.engine.execution import Execution, Passed
from flowchan.pipelines.sequential.parts import Part

SIZES = [8, 8, 7, 3, 1, 9]
"""Batch sizes: multiples of the number of chunks, other numbers, and smaller numbers."""


# --- every schedule ---


@pytest.mark.each_pair
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("recompute", [False, True])
@schedules
def test_parameters_and_losses_match_the_plain_module(
    schedule: Any, parts: int, workers: int, recompute: bool, optimizer: str
) -> None:
    module = perceptron()
    plain, losses = train_plainly(module, OPTIMIZERS[optimizer], batches(SIZES))
    options = {"schedule": schedule, "workers": workers, "recompute": recompute}
    with in_parts(module, parts, optimizer=OPTIMIZERS[optimizer], **options) as training:
        found = [float(training.step(x, target)) for x, target in batches(SIZES)]
    assert found == pytest.approx(losses, rel=1e-5)
    assert_same_state(module, plain)


@pytest.mark.parametrize(
    ("schedule", "parts", "workers", "recompute", "optimizer"),
    [("gpipe", 2, 2, False, "adam"), ("1f1b", 3, 3, True, "sgd"), ("interleaved", 4, 2, False, "adam")],
)
def test_training_on_processes_matches_the_reference(
    schedule: Any, parts: int, workers: int, recompute: bool, optimizer: str
) -> None:
    module = perceptron()
    plain, losses = train_plainly(module, OPTIMIZERS[optimizer], batches(SIZES))
    options = {"schedule": schedule, "workers": workers, "recompute": recompute}
    with in_parts(module, parts, "process", optimizer=OPTIMIZERS[optimizer], **options) as training:
        found = [float(training.step(x, target)) for x, target in batches(SIZES)]
    assert found == pytest.approx(losses, rel=1e-5)
    assert_same_state(module, plain)


@on_both_placements
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_match_the_plain_module(on: Any, recompute: bool) -> None:
    module = perceptron()
    plain = copy.deepcopy(module)
    ((x, target),) = batches([10])
    with in_parts(module, 3, on, recompute=recompute) as training:
        loss = training.step(x, target)
        expected = cross_entropy(plain(x), target)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for actual, other in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, other.grad)


@on_both_placements
@pytest.mark.parametrize(("schedule", "workers"), [("gpipe", 3), ("1f1b", 3), ("interleaved", 2)])
def test_outputs_match_the_plain_module(on: Any, schedule: Any, workers: int) -> None:
    module = perceptron()
    plain, _ = train_plainly(module, OPTIMIZERS["sgd"], batches([8]))
    with in_parts(module, 3, on, optimizer=OPTIMIZERS["sgd"], schedule=schedule, workers=workers) as training:
        ((x, target),) = batches([8])
        training.step(x, target)
        for size in (8, 3, 1, 13):
            ((x, _),) = batches([size], seed=size)
            torch.testing.assert_close(training.evaluate(x), plain(x).detach())


# --- inputs ---


class Pair(nn.Module):
    """Layer that takes and returns a tuple of a tensor and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Any) -> Any:
        left, named = value
        return self.linear(left) * named["scale"], {"scale": named["scale"] * 0.5, "number": named["number"]}


class Sum(nn.Module):
    def forward(self, value: Any) -> Tensor:
        left, named = value
        return left[:, :4] + named["scale"] + named["number"].unsqueeze(1)


@on_both_placements
def test_training_accepts_tuples_and_dictionaries(on: Any) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Pair(), Pair(), Pair(), Sum())
    x = (torch.randn(9, 6), {"scale": torch.rand(9, 1), "number": torch.arange(9)})
    target = torch.randint(4, (9,))
    data = [(x, target)] * 3
    plain, losses = train_plainly(module, OPTIMIZERS["sgd"], data)
    with in_parts(module, 4, on, optimizer=OPTIMIZERS["sgd"]) as training:
        assert [float(training.step(*each)) for each in data] == pytest.approx(losses, rel=1e-5)
    assert_same_state(module, plain)


@pytest.mark.parametrize("recompute", [False, True])
def test_parts_before_a_frozen_part_are_trained(recompute: bool) -> None:
    module = perceptron()
    for name in ("2", "4"):
        module.get_submodule(name).requires_grad_(False)
    plain, _ = train_plainly(module, OPTIMIZERS["sgd"], batches(SIZES))
    before = copy.deepcopy(module)
    with in_parts(module, 9, optimizer=OPTIMIZERS["sgd"], recompute=recompute) as training:
        for x, target in batches(SIZES):
            training.step(x, target)
    assert_same_state(module, plain)
    assert torch.equal(module[2].weight, before[2].weight)
    assert not torch.equal(module[0].weight, before[0].weight)


@pytest.mark.parametrize("recompute", [False, True])
def test_frozen_parts_at_the_beginning_stay_unchanged(recompute: bool) -> None:
    module = perceptron()
    module[:4].requires_grad_(False)
    plain, _ = train_plainly(module, OPTIMIZERS["sgd"], batches(SIZES))
    with in_parts(module, 4, optimizer=OPTIMIZERS["sgd"], recompute=recompute) as training:
        for x, target in batches(SIZES):
            training.step(x, target)
    assert_same_state(module, plain)


@on_both_placements
def test_in_place_layers_at_a_border_train_correctly(on: Any) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 4)
    )
    plain, _ = train_plainly(module, OPTIMIZERS["sgd"], batches([8, 8]))
    with in_parts(module, 5, on, optimizer=OPTIMIZERS["sgd"]) as training:
        for x, target in batches([8, 8]):
            training.step(x, target)
    assert_same_state(module, plain)


def test_step_does_not_change_the_batch() -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 4))
    ((x, target),) = batches([8])
    before = x.clone()
    with in_parts(module, 2) as training:
        training.step(x, target)
    assert torch.equal(x, before)


class Added(nn.Module):
    """Layer with a weight whose gradient is the incoming gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def test_passes_do_not_change_inputs_or_incoming_gradients() -> None:
    execution = Execution(Part(1, nn.Sequential(Added())), recompute=False, shared=False)
    x, gradient = torch.ones(2, 3), torch.ones(2, 3)
    for chunk in range(3):
        execution.forward((0, chunk), Passed(x, {}, (True,)))
    for chunk in range(3):
        execution.backward((0, chunk), (gradient,))
    (parameter,) = execution.part.module.parameters()
    assert parameter.grad is not None
    assert parameter.grad.data_ptr() != gradient.data_ptr()
    assert torch.equal(parameter.grad, torch.full((2, 3), 3.0))
    assert torch.equal(gradient, torch.ones(2, 3))
    assert torch.equal(x, torch.ones(2, 3))
    execution.close()


# --- optimizers ---


@on_both_placements
def test_outside_optimizer_updates_the_plain_module(on: Any) -> None:
    module = perceptron()
    plain, losses = train_plainly(module, OPTIMIZERS["adam"], batches(SIZES))
    optimizer = OPTIMIZERS["adam"](module.parameters())
    found = []
    with in_parts(module, 3, on) as training:
        for x, target in batches(SIZES):
            optimizer.zero_grad()
            found.append(float(training.step(x, target)))
            optimizer.step()
    assert found == pytest.approx(losses, rel=1e-5)
    assert_same_state(module, plain)


@on_both_placements
def test_gradients_accumulate_over_steps(on: Any) -> None:
    module = perceptron()
    plain = copy.deepcopy(module)
    with in_parts(module, 3, on) as training:
        for x, target in batches([8, 5]):
            training.step(x, target)
            cross_entropy(plain(x), target).backward()
    for actual, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, other.grad)


@on_both_placements
@pytest.mark.parametrize("clip", [0.05, 1000.0])
def test_clipping_uses_the_norm_of_the_whole_module(on: Any, clip: float) -> None:
    module = perceptron()
    plain, losses = train_plainly(module, OPTIMIZERS["sgd"], batches(SIZES), clip)
    with in_parts(module, 3, on, optimizer=OPTIMIZERS["sgd"], clip=clip) as training:
        assert [float(training.step(*each)) for each in batches(SIZES)] == pytest.approx(losses, rel=1e-5)
    assert_same_state(module, plain)


def test_nan_norm_affects_gradients_like_the_plain_module() -> None:
    module = perceptron()
    ((x, target),) = batches([8])
    x[0, 0] = float("nan")
    plain, _ = train_plainly(module, OPTIMIZERS["sgd"], [(x, target)], clip=1.0)
    with in_parts(module, 3, optimizer=OPTIMIZERS["sgd"], clip=1.0) as training:
        training.step(x, target)
    assert_same_state(module, plain, equal_nan=True)


# --- state ---


@on_both_placements
def test_state_matches_the_plain_module_after_each_step(on: Any) -> None:
    module = perceptron()
    data = list(batches([8, 8, 8]))
    with in_parts(module, 3, on, optimizer=OPTIMIZERS["sgd"]) as training:
        for number, (x, target) in enumerate(data, 1):
            training.step(x, target)
            plain, _ = train_plainly(perceptron(), OPTIMIZERS["sgd"], data[:number])
            state = module.state_dict()
            assert list(state) == list(plain.state_dict())
            torch.testing.assert_close(dict(state), dict(plain.state_dict()))
            assert_same_state(module, plain)


@on_both_placements
@pytest.mark.parametrize("optimizer", [OPTIMIZERS["sgd"], None])
def test_state_can_be_loaded_during_training(on: Any, optimizer: Any) -> None:
    module, other = perceptron(), perceptron(seed=7)
    ((x, target),) = batches([8])
    with in_parts(module, 3, on, optimizer=optimizer) as training:
        training.step(x, target)
        module.load_state_dict(other.state_dict())
        torch.testing.assert_close(training.evaluate(x), other(x).detach())
        loss = training.step(x, target)
        torch.testing.assert_close(loss, cross_entropy(other(x), target).detach())


@on_both_placements
def test_pipe_saves_and_loads_the_state_during_training(on: Any) -> None:
    module, other = perceptron(), perceptron(seed=7)
    ((x, target),) = batches([8])
    plain, _ = train_plainly(module, OPTIMIZERS["sgd"], [(x, target)])
    pipe = Sequential(module, 3, on=on, chunks=4)
    with pipe.trainer(loss=cross_entropy, optimizer=OPTIMIZERS["sgd"]) as training:
        training.step(x, target)
        torch.testing.assert_close(dict(pipe.state_dict()), dict(plain.state_dict()))
        pipe.load_state_dict(other.state_dict())
        torch.testing.assert_close(training.evaluate(x), other(x).detach())
    assert_same_state(module, other)


def test_second_trainer_of_an_active_pipe_raises() -> None:
    pipe = Sequential(perceptron(), 2)
    with (
        pipe.trainer(loss=cross_entropy),
        pytest.raises(RuntimeError, match="this pipe is already in training"),
    ):
        pipe.trainer(loss=cross_entropy)
    pipe.trainer(loss=cross_entropy)


@on_both_placements
def test_call_during_training_raises(on: Any) -> None:
    module = perceptron()
    ((x, target),) = batches([8])
    with Sequential(module, 2, on=on, chunks=4) as pipe:
        with pipe.trainer(loss=cross_entropy, optimizer=OPTIMIZERS["sgd"]) as training:
            training.step(x, target)
            message = r"already in training; use training.evaluate\(x\), or leave the trainer's with block"
            for use in (lambda: pipe(x), lambda: pipe.stream([x])):
                with pytest.raises(RuntimeError, match=message):
                    use()
            inside = training.evaluate(x)
        torch.testing.assert_close(pipe(x), inside)


@on_both_placements
def test_pipe_uses_the_trained_parameters(on: Any) -> None:
    module = perceptron()
    plain, _ = train_plainly(module, OPTIMIZERS["sgd"], batches(SIZES))
    ((x, _),) = batches([8])
    with Sequential(module, 2, on=on, chunks=4) as pipe:
        torch.testing.assert_close(pipe(x), module(x).detach())
        with pipe.trainer(loss=cross_entropy, optimizer=OPTIMIZERS["sgd"]) as training:
            for each in batches(SIZES):
                training.step(*each)
        torch.testing.assert_close(pipe(x), plain(x).detach())


@on_both_placements
def test_pipe_can_be_trained_again(on: Any) -> None:
    module = perceptron()
    plain, _ = train_plainly(
        train_plainly(module, OPTIMIZERS["adam"], batches([8, 8]))[0],
        OPTIMIZERS["adam"],
        batches([5], seed=3),
    )
    pipe = Sequential(module, 2, on=on, chunks=4)
    for data in (list(batches([8, 8])), list(batches([5], seed=3))):
        with pipe.trainer(loss=cross_entropy, optimizer=OPTIMIZERS["adam"]) as training:
            for each in data:
                training.step(*each)
    assert_same_state(module, plain)

"""Test the defaults for training: the schedule, the cut, and the number of micro-batches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from plain import on_both_placements
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from trained import OPTIMIZERS, assert_same_state, batches, perceptron, train_plainly

from flowchan.pipelines import Sequential
from flowchan.pipelines.sequential.engine.schedule import plan


class Sizes(nn.Module):
    """Layer that records the sizes of micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return x


def linear(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes)))


@on_both_placements
def test_default_training_has_two_parts_per_worker(on: Any) -> None:
    module = perceptron()
    plain, _ = train_plainly(module, OPTIMIZERS["sgd"], batches([8, 8, 5]))
    pipe = Sequential(module, 2, on=on, chunks=4)
    with pipe.trainer(loss=cross_entropy, optimizer=OPTIMIZERS["sgd"]) as training:
        for each in batches([8, 8, 5]):
            training.step(*each)
    assert [worker.parts for worker in training.report().workers] == [(0, 3), (1, 2)]
    assert training.schedule == [" ".join(map(str, steps)) for steps in plan("dualpipev", 2, 4, 4)]
    assert_same_state(module, plain)


@pytest.mark.parametrize("first", ["step", "evaluate"])
def test_default_training_cuts_parts_by_operations(first: str) -> None:
    module = linear(64, 8, 8, 8, 8, 64, 64)  # 512, 64, 64, 64, 512, 4096 products per sample
    x, target = torch.randn(32, 64), torch.randn(32, 64)
    with Sequential(module, 2, chunks=4).trainer(loss=mse_loss) as training:
        if first == "evaluate":
            training.evaluate(x)
        training.step(x, target)
        parts = training.report().parts
    assert parts[-1].state == 4 * 64 * 64  # the last part has only the last layer


@pytest.mark.parametrize("case", ["counts", "few layers", "shared", "one part"])
def test_default_schedule_is_1f1b_if_parts_cannot_be_halved(case: str) -> None:
    module, parts = perceptron(), 2
    if case == "counts":
        pipe = Sequential(module, [3, 6])
    elif case == "few layers":
        pipe = Sequential(module[:3], 2)
    elif case == "shared":
        shared = nn.Linear(6, 6)
        pipe = Sequential([shared, shared, nn.Linear(6, 6), nn.Linear(6, 6)], 2)
    else:
        pipe, parts = Sequential(module, 1), 1
    training = pipe.trainer(loss=cross_entropy)
    assert len(training.schedule) == parts
    assert training.schedule[-1].startswith("F0 B0 F1 B1")


def test_workers_start_with_the_first_batch() -> None:
    pipe = Sequential(perceptron(), 2)
    with pipe.trainer(loss=cross_entropy) as training:
        assert training.active
    assert not training.active
    with pytest.raises(RuntimeError, match="training: training is over"):
        training.step(*next(batches([8])))


def test_measurement_does_not_affect_random_numbers_in_training() -> None:
    ((x, target),) = batches([16])
    losses = []
    for called in (False, True):
        module = perceptron()
        module[1] = nn.Dropout(0.5)
        with Sequential(module, 2) as pipe:
            if called:
                pipe(x)
            torch.manual_seed(1)
            with pipe.trainer(loss=cross_entropy) as training:
                losses.append(float(training.step(x, target)))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("how", ["a training", "a loss of pipe(x)", "inference"])
@pytest.mark.parametrize(("samples", "chunks"), [(512, 4), (1024, 4), (1536, 6), (4096, 8)])
def test_number_of_chunks_depends_on_the_cost_of_gradients(samples: int, chunks: int, how: str) -> None:
    """A linear layer has two operations per parameter and sample, so it reaches 512 with 256 samples."""
    sizes = Sizes()
    pipe = Sequential(nn.Sequential(*linear(512, 512, 512, 512, 512), sizes), 2)
    x, target = torch.randn(samples, 512), torch.zeros(samples, 512)
    with pipe:
        if how == "a training":
            with pipe.trainer(loss=mse_loss) as training:
                training.step(x, target)
        else:
            with torch.set_grad_enabled(how != "inference"):
                pipe(x)
    assert len(sizes.seen) == (chunks if how != "inference" else 8)

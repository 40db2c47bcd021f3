"""Test the report on training: how workers spend their time, and how much memory parts need."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from plain import on_both_placements
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from flowchan.pipelines import Pop, Sequential, Stash
from flowchan.pipelines.sequential.parts import Part
from flowchan.pipelines.sequential.timeline import TimelineEvent
from flowchan.pipelines.sequential.training_report import Kept, measured, report

WIDTH, SAMPLES = 16, 8
STATE = 2 * 4 * (WIDTH * WIDTH + WIDTH)  # parameters of two layers, in bytes
KEEPS = 2 * 4 * SAMPLES * WIDTH  # bytes of the inputs of two layers, for each of four micro-batches


def module() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


@on_both_placements
@pytest.mark.parametrize(
    ("schedule", "recompute", "held"),
    [
        ("gpipe", False, [4.0, 4.0]),
        ("1f1b", False, [2.0, 1.0]),
        ("zbh1", False, [2.0, 2.0]),
        # the inputs of three micro-batches, and the whole graph of the fourth
        ("gpipe", True, [2.5, 2.5]),
    ],
)
def test_report_has_the_peak_memory_of_parts(
    on: Any, schedule: Any, recompute: bool, held: list[float]
) -> None:
    x = torch.randn(4 * SAMPLES, WIDTH)
    pipe = Sequential(module(), 2, on=on, chunks=4)
    with pipe.trainer(loss=mse_loss, schedule=schedule, recompute=recompute) as training:
        for _ in range(2):
            training.step(x, x)
        found = training.report()
    assert [part.state for part in found.parts] == [STATE, STATE]
    assert [part.gradients for part in found.parts] == [STATE, STATE]
    if recompute:  # the last part runs each backward pass immediately after the forward pass
        held = [held[0], found.parts[1].activations / KEEPS]
    assert [part.activations for part in found.parts] == [KEEPS * one for one in held]
    assert [part.peak for part in found.parts] == [2 * STATE + KEEPS * one for one in held]


@on_both_placements
def test_time_fractions_of_a_worker_sum_to_one(on: Any) -> None:
    x = torch.randn(32, WIDTH)
    with Sequential(module(), 2, on=on, chunks=4).trainer(
        loss=mse_loss, optimizer=partial(SGD, lr=0.1), schedule="1f1b"
    ) as training:
        for _ in range(12):
            training.step(x, x)
    found = training.report()  # still works after the block
    assert found.steps == 10
    assert found.seconds > 0
    assert [worker.parts for worker in found.workers] == [(0,), (1,)]
    for worker in found.workers:
        assert worker.busy > 0
        assert worker.communication > 0
        assert worker.busy + worker.communication + worker.bubble == pytest.approx(1, abs=0.2)
    assert 0 <= found.bubble < 1
    lines = str(found).splitlines()
    assert lines[0].startswith("10 steps of ")
    assert lines[1].startswith("worker 0 (parts 0): computes ")
    assert lines[3].startswith("part 0: at most ")
    assert len(lines) == 5


def test_report_before_the_first_step_is_empty() -> None:
    found = Sequential(module(), [2, 2]).trainer(loss=mse_loss).report()
    assert (found.steps, found.seconds, found.workers, found.bubble) == (0, 0.0, (), 0.0)
    assert [part.activations for part in found.parts] == [0, 0]


def test_report_computes_time_fractions_from_events() -> None:
    def event(worker: int, op: Any, begin: float, end: float) -> TimelineEvent:
        return TimelineEvent(worker, worker, op, 0, 0, begin, end)

    step = [
        ((event(0, "F", 0.0, 2.0), event(0, "B", 8.0, 10.0)), 1.0),
        ((event(1, "F", 3.0, 5.0), event(1, "B", 5.0, 8.0)), 0.5),
    ]
    parts = [Part(number, nn.Sequential()) for number in range(2)]
    found = report([step], parts, [Kept(7, 3), Kept(5, 2)])
    assert found.seconds == 10
    assert [(one.busy, one.communication, one.bubble) for one in found.workers] == [
        (0.4, 0.1, pytest.approx(0.5)),
        (0.5, 0.05, pytest.approx(0.45)),
    ]
    assert (found.bubble, found.communication) == (pytest.approx(0.475), pytest.approx(0.075))
    assert [part.activations for part in found.parts] == [7, 5]


def test_memory_includes_skips_but_no_gradients_of_frozen_parameters() -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Stash("x"), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Pop("x"), nn.Tanh()]
    layers[0].requires_grad_(False)
    pipe = Sequential(layers, [2, 2, 2], chunks=1)
    x = torch.randn(SAMPLES, WIDTH)
    one = 4 * SAMPLES * WIDTH
    kept = measured(pipe.parts, x)
    assert [each.inputs for each in kept] == [one, 2 * one, 2 * one]  # the skip is passed on with the value
    with pipe.trainer(loss=mse_loss) as training:
        training.step(x, x)
        assert [part.gradients for part in training.report().parts] == [0, STATE // 2, 0]

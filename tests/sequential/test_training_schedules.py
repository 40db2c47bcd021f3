"""Test that training gives the same results under all schedules, including user-defined ones."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plain import on_both_placements
from torch import nn
from torch.nn.functional import cross_entropy
from trained import OPTIMIZERS, assert_same_state, batches, in_parts, perceptron, train_plainly

from flowchan.pipelines.sequential.engine.schedule import SCHEDULES, Step, plan, steps, text

WRITTEN = "F0 F1 I0 F2 B1 F3 W0 B2 B3\nF0 B0 F1 B1 F2 I2 F3 W2 B3"


@pytest.mark.each_pair
@on_both_placements
@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_double_precision_gradients_match_the_plain_module(schedule: Any, parts: int, on: Any) -> None:
    module = perceptron().double()
    plain = copy.deepcopy(module)
    ((x, target),) = batches([10])
    x = x.double()
    workers = 2 if schedule == "interleaved" else None
    with in_parts(module, parts, on, schedule=schedule, workers=workers) as training:
        loss = training.step(x, target)
    expected = cross_entropy(plain(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-14, atol=1e-15)
    for actual, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, other.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_v_schedules_assign_two_parts_to_each_worker(schedule: Any) -> None:
    training = in_parts(perceptron(), 6, schedule=schedule)
    names = [stage.name for stage in training.graph.stages if stage.name.startswith("part")]
    assert names == ["parts 0 and 5", "parts 1 and 4", "parts 2 and 3"]
    assert training.graph.check() == ()


def by_function(worker: int, workers: int, parts: int, chunks: int) -> Iterator[Step]:
    assert parts == workers
    return steps("1f1b", worker, workers, parts, chunks)


def as_text(worker: int, workers: int, parts: int, chunks: int) -> str:
    return text(steps("zbh1", worker, workers, parts, chunks))


@on_both_placements
@pytest.mark.parametrize("schedule", [WRITTEN, WRITTEN.splitlines(), by_function, as_text])
def test_user_schedule_trains_like_the_plain_module(schedule: Any, on: Any) -> None:
    module = perceptron()
    data = list(batches([8, 3, 9]))  # one batch has fewer micro-batches than the written schedule
    plain, losses = train_plainly(module, OPTIMIZERS["sgd"], data)
    with in_parts(module, 2, on, optimizer=OPTIMIZERS["sgd"], schedule=schedule) as training:
        assert [float(training.step(*each)) for each in data] == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(training.evaluate(data[0][0]), plain(data[0][0]).detach())
    assert_same_state(module, plain)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_printed_schedule_can_be_passed_to_a_trainer(schedule: Any) -> None:
    module = perceptron()
    workers = 2 if schedule == "interleaved" else None
    printed = in_parts(module, 4, schedule=schedule, workers=workers).schedule
    again = in_parts(module, 4, schedule=printed)
    assert again.schedule == printed
    ((x, target),) = batches([8])
    with again:
        torch.testing.assert_close(again.step(x, target), cross_entropy(module(x), target).detach())


def test_written_schedule_assigns_parts_to_workers() -> None:
    written = ["0:F0 3:F0 3:B0 0:B0", "1:F0 2:F0 2:B0 1:B0"]
    training = in_parts(perceptron(), 4, chunks=1, schedule=written)
    names = [stage.name for stage in training.graph.stages if stage.name.startswith("part")]
    assert names == ["parts 0 and 3", "parts 1 and 2"]


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        (WRITTEN, {"chunks": 3}, "the schedule must be for 2 parts and 3 micro-batches, got step 0:B3"),
        (
            WRITTEN,
            {"chunks": 5},
            "the schedule must contain 0:F4 once, and either 0:B4 or both 0:I4 and 0:W4",
        ),
        (WRITTEN, {"workers": 3}, "workers must be 2, the number of lines in the schedule, got 3"),
        (["F0 I0", "F0 B0"], {"chunks": 1}, "the schedule must contain 0:F0 once, and either 0:B0 or both"),
        (
            ["F0 B0 I0 W0", "F0 B0"],
            {"chunks": 1},
            "the schedule must contain 0:F0 once, and either 0:B0 or both",
        ),
        (
            ["F0 F0 B0", "F0 B0"],
            {"chunks": 1},
            "the schedule cannot run: simulate: worker 0 must do each step once, got 0:F0",
        ),
        (
            ["F0 B0", "B0 F0"],
            {"chunks": 1},
            "the schedule cannot run: simulate: worker 1 must do 1:F0 before 1:B0",
        ),
        (["F0 B0 ?", "F0 B0"], {"chunks": 1}, "to name the part, got '?'"),
        (lambda *_: [7], {}, "the schedule function must return steps or text, got 7 (int)"),
        (lambda *_: 7, {}, "the schedule function must return steps or text, got 7 (int)"),
        ("zbv", {"workers": 3}, "workers must be at most parts=2, got 3"),
        ("FO BO", {}, "schedule must be 'gpipe' or"),
        ([], {}, r"schedule must be 'gpipe' or .* got \[\]"),
    ],
)
def test_infeasible_schedule_raises_with_the_reason(
    schedule: Any, options: dict[str, Any], message: str
) -> None:
    pattern = message if message.endswith("]") else re.escape(message)
    with pytest.raises((TypeError, ValueError), match=pattern):
        in_parts(perceptron(), 2, schedule=schedule, **options)


def test_consecutive_parts_on_distant_workers_raise() -> None:
    written = ["0:F0 0:B0", "2:F0 2:B0", "1:F0 1:B0", "3:F0 3:B0", "4:F0 4:B0"]
    with pytest.raises(
        ValueError,
        match="parts 0 and 1 must be on the same worker or on neighbouring workers, got workers 0 and 2",
    ):
        in_parts(perceptron(), 5, chunks=1, schedule=written)


def test_timeline_shows_both_halves_of_a_backward_pass() -> None:
    ((x, target),) = batches([8])
    with in_parts(perceptron(), 2, schedule="zbh1") as training:
        training.step(x, target)
        done = [f"{event.op}{event.chunk}" for event in training.timeline().events if event.worker == 1]
        assert done == training.schedule[1].split()
        assert "backward: weights (W)" in training.timeline().svg()


def test_failure_in_the_second_half_names_the_step() -> None:
    module = perceptron()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            raise ArithmeticError("no weights today")

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, Fails.apply(self.weight), self.bias)

    module[4] = Layer(12, 12)
    ((x, target),) = batches([8])
    with (
        pytest.raises(
            Exception, match=r"part 1 .*, step W0 \(micro-batch 0 of 4\): ArithmeticError: no weights"
        ),
        in_parts(module, [4, 5], schedule="zbh1") as training,  # type: ignore[arg-type]
    ):
        training.step(x, target)


def test_every_plan_sends_only_to_neighbours() -> None:
    for schedule in SCHEDULES:
        workers = 3
        parts = {"interleaved": 9, "zbv": 6, "dualpipev": 6}.get(schedule, workers)
        assert len(plan(schedule, workers, parts, 4)) == workers  # type: ignore[arg-type]
        assert in_parts(perceptron(), parts, schedule=schedule, workers=workers).graph.check() == ()

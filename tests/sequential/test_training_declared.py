"""Test a trainer before its first step: argument checks, graph and schedule; and test its timeline."""

from __future__ import annotations

import multiprocessing
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import on_both_placements
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trained import OPTIMIZERS, batches, in_parts, perceptron

from flowchan import GraphError
from flowchan.cli.loading import load
from flowchan.pipelines import Sequential
from flowchan.viz import to_dot

# --- checks before anything starts ---


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"loss": 7}, TypeError, "loss must be a function that takes output and target, got 7"),
        (
            {"optimizer": SGD([torch.zeros(1, requires_grad=True)], lr=0.1)},
            TypeError,
            r"partial\(SGD, lr=0.1\)",
        ),
        ({"optimizer": "sgd"}, TypeError, "optimizer must be a function"),
        (
            {"optimizer": list},
            TypeError,
            r"optimizer must return an object with a step\(\) method, got an object of type list",
        ),
        ({"optimizer": partial(SGD, lr=-1)}, ValueError, "Invalid learning rate: -1"),
        (
            {"schedule": "zigzag"},
            ValueError,
            "^training: schedule must be 'gpipe' or .* or 'dualpipev', got 'zigzag'",
        ),
        ({"workers": 2}, ValueError, "^training: .*use schedule='interleaved'"),
        ({"workers": 5, "schedule": "interleaved"}, ValueError, "^training: .*use fewer workers"),
        ({"workers": 0}, ValueError, "^training: workers must be at least 1, got 0"),
        ({"workers": 1.0}, TypeError, "^training: workers must be an int of at least 1, got 1.0"),
        ({"recompute": 1}, TypeError, "recompute must be True or False, got 1"),
        ({"clip": 0.0}, ValueError, "clip must be a maximum norm greater than 0"),
        ({"clip": 1.0, "optimizer": None}, ValueError, "clip must be None without optimizer="),
        ({"autocast": "bfloat16"}, TypeError, "autocast must be a floating-point dtype"),
        ({"autocast": torch.int8}, TypeError, "autocast must be a floating-point dtype"),
    ],
)
def test_trainer_rejects_a_wrong_argument_at_once(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        in_parts(perceptron(), 3, **{"optimizer": OPTIMIZERS["sgd"], **options})


def test_training_rejects_a_parameter_in_two_parts() -> None:
    module = perceptron()
    module[2] = module[4] = nn.Linear(16, 16)
    with pytest.raises(
        ValueError, match=r"each parameter must be in one part, got '4.weight' in part 1 .* and in part 2"
    ):
        in_parts(module, 5)


def test_unpicklable_loss_raises_before_start() -> None:
    lock = multiprocessing.Lock()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        with lock:
            return output.mean()

    with (
        pytest.raises(
            GraphError, match="its attribute 'loss', captured variable 'lock' is a multiprocessing"
        ),
        in_parts(perceptron(), 2, "process", loss=loss) as training,
    ):
        training.step(*next(batches([8])))


def test_target_of_different_size_raises_without_ending_training() -> None:
    ((x, target),) = batches([8])
    with in_parts(perceptron(), 2) as training:
        with pytest.raises(ValueError, match=r"target must have the same batch size as x \(8\), got 7"):
            training.step(x, target[:7])
        with pytest.raises(TypeError, match=r"x\[0\] must be a tensor"):
            training.step([1, 2], target)
        training.step(x, target)


def test_training_outside_its_block_raises() -> None:
    ((x, target),) = batches([8])
    training = in_parts(perceptron(), 2)
    with pytest.raises(
        RuntimeError, match=r"training has not started; .* `with pipe.trainer\(\.\.\.\) as training:`"
    ):
        training.step(x, target)
    with training:
        training.step(x, target)
        with pytest.raises(RuntimeError, match="training has already started"):
            training.__enter__()
    with pytest.raises(RuntimeError, match=r"is over; create a new one with pipe.trainer\(\.\.\.\)"):
        training.evaluate(x)


# --- graph and timeline ---


def test_training_shows_its_graph_and_schedule() -> None:
    training = in_parts(perceptron(), 3, chunks=3, schedule="1f1b")
    assert [stage.name for stage in training.graph.stages if stage.name.startswith("part")] == [
        "part 0",
        "part 1",
        "part 2",
    ]
    assert [(link.writer, link.reader) for link in training.graph.edges if link.feedback] == [
        ("part 1", "part 0"),
        ("part 2", "part 1"),
    ]
    assert training.graph.check() == ()
    assert training.schedule == ["F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]


def test_training_declared_in_a_file_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "from torch import nn\n"
        "from flowchan.pipelines import Sequential\n"
        "from flowchan.pipelines import Training\n"
        "def declared() -> Training:\n"
        "    return Sequential([nn.Linear(2, 2), nn.Linear(2, 2)]).trainer(loss=nn.functional.mse_loss)\n"
    )
    dot = to_dot(load(str(file)))
    assert "part 1" in dot
    assert "constraint=false" in dot
    assert "commands" not in dot


def test_picture_shows_layers_and_parameters_of_parts(
    tmp_path: Path,
) -> None:
    file = tmp_path / "pipe.py"
    file.write_text(
        "from torch import nn\n"
        "from flowchan.pipelines import Sequential\n"
        "def declared() -> Sequential:\n"
        "    return Sequential([nn.Linear(2, 2), *[nn.ReLU()] * 8, nn.Linear(2, 3)], parts=[9, 1])\n"
    )
    dot = to_dot(load(str(file)))
    first = "0: Linear<BR/>1: ReLU<BR/>2: ReLU<BR/>3: ReLU<BR/>… 4 more …<BR/>8: ReLU<BR/>6 parameters"
    assert first in dot
    assert "9: Linear<BR/>9 parameters" in dot
    assert ">errors<" not in dot
    assert "capacity" not in re.sub(r'tooltip="[^"]*"', "", dot.partition("part 0")[2])


@pytest.mark.parametrize(("parts", "workers"), [(4, 2), (5, 2), (3, 1), (9, 4)])
def test_graph_of_a_ring_passes_the_check(parts: int, workers: int) -> None:
    training = in_parts(perceptron(), parts, schedule="interleaved", workers=workers)
    assert training.graph.check() == ()


@on_both_placements
def test_timeline_shows_every_step_of_the_schedule(on: Any) -> None:
    with in_parts(perceptron(), 2, on, optimizer=partial(SGD, lr=0.1), schedule="1f1b") as training:
        for each in batches([8, 8]):
            training.step(*each)
        events = training.timeline().events
    for worker in range(2):
        actual = [f"{event.op}{event.chunk}" for event in events if (event.worker, event.step) == (worker, 1)]
        assert actual == [*training.schedule[worker].split(), "updateNone"]
    assert all(event.begin <= event.end for event in events)


def test_timeline_has_the_last_ten_steps() -> None:
    with in_parts(perceptron(), 2) as training:
        for each in batches([4] * 12):
            training.step(*each)
        steps = {event.step for event in training.timeline().events}
    assert steps == set(range(2, 12))


@on_both_placements
def test_timeline_of_the_pipe_includes_its_training(on: Any) -> None:
    ((x, target),) = batches([8])
    with Sequential(perceptron(), 2, on=on, chunks=4) as pipe:
        pipe(x)
        with pipe.trainer(loss=cross_entropy, schedule="gpipe") as training:
            training.step(x, target)
            inside = pipe.timeline().events
        pipe(x)
        after = pipe.timeline().events
    assert [event.op for event in inside].count("B") == 2 * 4
    assert inside[-16:] == training.timeline().events
    assert [len(inside), len(after)] == [8 + 16, 8 + 16 + 8]

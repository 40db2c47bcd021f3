"""Test the saved state of training: restarted training continues bit for bit."""

from __future__ import annotations

import io
import itertools
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from plain import on_both_placements
from torch import nn
from torch.nn.functional import cross_entropy
from trained import OPTIMIZERS, batches, perceptron

from flowchan import RunError
from flowchan.pipelines import Sequential
from flowchan.pipelines.sequential.training import Training

DATA = list(batches([8] * 40))


def trainer(
    module: nn.Sequential, on: Any = "thread", optimizer: Any = "adam", parts: Any = 3, **options: Any
) -> Training:
    options.setdefault("schedule", "1f1b")
    made = OPTIMIZERS.get(optimizer, optimizer) if isinstance(optimizer, str) else optimizer
    return Sequential(module, parts, on=on, chunks=4).trainer(loss=cross_entropy, optimizer=made, **options)


def in_file(state: dict[str, Any]) -> Any:
    """Save and load a state with torch's safe loader."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run_steps(training: Training, data: Any) -> list[float]:
    return [float(training.step(x, target)) for x, target in data]


def restarted(state: dict[str, Any], data: Any, on: Any, optimizer: Any, **options: Any) -> Any:
    """Load a state into a new ``Training`` object with other initial parameters, and train."""
    module = perceptron(seed=9)
    with trainer(module, on, optimizer, **options) as training:
        training.load_state_dict(in_file(state))
        return run_steps(training, data), module.state_dict()


def assert_equal_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@on_both_placements
@pytest.mark.each_value
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"schedule": None, "parts": 2}, {"schedule": "zbv", "parts": 4}])
def test_restarted_training_equals_an_uninterrupted_one(on: Any, optimizer: str, options: Any) -> None:
    whole, halves = perceptron(), perceptron()
    with trainer(whole, on, optimizer, **options) as training:
        expected = run_steps(training, DATA)
    with trainer(halves, on, optimizer, **options) as training:
        found = run_steps(training, DATA[:20])
        state = training.state_dict()
    after, parameters = restarted(state, DATA[20:], on, optimizer, **options)
    assert found + after == expected
    assert_equal_bits(parameters, whole.state_dict())


def test_state_moves_from_threads_to_processes() -> None:
    plain = perceptron()
    with trainer(plain) as training:
        expected = run_steps(training, DATA[:8])
    with trainer(perceptron()) as training:
        run_steps(training, DATA[:4])
        state = training.state_dict()
    after, _ = restarted(state, DATA[4:8], "process", "adam")
    assert after == pytest.approx(expected[4:], rel=1e-5)


def test_dropout_continues_with_the_saved_generator() -> None:
    def layers() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(6, 16), nn.Dropout(), nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 4)
        )

    torch.manual_seed(3)
    module = layers()
    with trainer(module) as training:
        run_steps(training, DATA[:4])
        state = training.state_dict() | {"generator": torch.get_rng_state()}
        expected = run_steps(training, DATA[4:8])
    with trainer(layers()) as training:
        loaded = in_file(state)
        torch.set_rng_state(loaded.pop("generator"))
        training.load_state_dict(loaded)
        assert run_steps(training, DATA[4:8]) == expected


@on_both_placements
def test_state_is_a_copy(on: Any) -> None:
    with trainer(perceptron(), on) as training:
        run_steps(training, DATA[:2])
        state = training.state_dict()
        before = in_file(state)
        expected = run_steps(training, DATA[2:4])
        training.load_state_dict(state)
        assert run_steps(training, DATA[2:4]) == expected
        assert str(state) == str(before)


@on_both_placements
def test_state_names_steps_parts_and_optimizers(on: Any) -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    with trainer(module, on, parts=[1, 1, 1]) as training:
        run_steps(training, DATA[:3])
        state = training.state_dict()
    assert list(state) == ["module", "parts", "steps", "optimizer", "optimizers"]
    assert list(state["module"]) == list(module.state_dict())
    assert (state["parts"], state["steps"], state["optimizer"]) == ([1, 1, 1], 3, "Adam")
    assert [None if one is None else float(one["state"][0]["step"]) for one in state["optimizers"]] == [
        3,
        None,
        3,
    ]


def test_state_before_the_first_batch_keeps_the_module() -> None:
    module = perceptron()
    with trainer(module, schedule=None, parts=2) as training:
        state = training.state_dict()
        assert state["steps"] == 0
        assert_equal_bits(state["module"], module.state_dict())
        training.load_state_dict(state)
        run_steps(training, DATA[:1])


def test_default_cut_comes_from_the_state() -> None:
    def layers() -> nn.Sequential:
        sizes = [6, 64, 6, 6, 6, 6, 4]
        return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))

    with trainer(layers(), schedule=None, parts=2) as training:
        run_steps(training, DATA[:2])
        state = training.state_dict()
    assert state["parts"] != [2, 1, 2, 1]
    with trainer(layers(), schedule=None, parts=2) as training:
        training.load_state_dict(state)
        run_steps(training, DATA[2:4])
        assert training.state_dict()["parts"] == state["parts"]
        assert training.state_dict()["steps"] == 4


@on_both_placements
def test_state_without_optimizer_holds_the_module(on: Any) -> None:
    module = perceptron()
    with trainer(module, on, None) as training:
        state = training.state_dict()
        assert state["optimizer"] is None
        with torch.no_grad():
            module[0].weight.zero_()
        training.load_state_dict(state)
        assert_equal_bits(module.state_dict(), perceptron().state_dict())


@on_both_placements
def test_numpy_learning_rate_is_saved_as_a_number(on: Any) -> None:
    optimizer = partial(torch.optim.SGD, lr=numpy.float64(0.1))
    with trainer(perceptron(), on, optimizer) as training:
        run_steps(training, DATA[:1])
        assert type(in_file(training.state_dict())["optimizers"][0]["param_groups"][0]["lr"]) is float


def test_loss_is_checked_after_a_restart() -> None:
    with trainer(perceptron()) as training:
        run_steps(training, DATA[:1])
        state = training.state_dict()
    adam = OPTIMIZERS["adam"]
    pipe = Sequential(perceptron(), 3, chunks=4)
    with pipe.trainer(
        loss=partial(cross_entropy, reduction="sum"), optimizer=adam, schedule="1f1b"
    ) as training:
        training.load_state_dict(state)
        with pytest.raises(RunError, match="loss must be a mean over samples"):
            training.step(*DATA[0])


# --- states that do not fit ---


def saved(optimizer: Any = "adam", module: nn.Sequential | None = None, **options: Any) -> dict[str, Any]:
    with trainer(module or perceptron(), optimizer=optimizer, **options) as training:
        run_steps(training, DATA[:1])
        return training.state_dict()


def other_shape() -> nn.Sequential:
    module = perceptron()
    module[0], module[2] = nn.Linear(6, 5), nn.Linear(5, 12)
    return module


UNFIT = {
    "another cut": (
        lambda: saved(parts=[2, 3, 4]),
        r"training: state\['parts'\] must be \[3, 3, 3\], the layer counts of this pipe, got \[2, 3, 4\]; "
        r"create the pipe with parts=\[2, 3, 4\]",
    ),
    "another number of parts": (
        lambda: saved(parts=2),
        r"state\['parts'\] must be \[3, 3, 3\], the layer counts of this pipe, got \[5, 4\]",
    ),
    "missing key": (
        lambda: saved(module=perceptron()[:7], parts=[3, 3, 1]) | {"parts": [3, 3, 3], "module": {}},
        r"training: state\['module'\] must have the keys of this module, got none of '0\.weight', '0\.bias', "
        r"'2\.weight' and 5 more; load the state of the same model",
    ),
    "unknown key": (
        lambda: (state := saved()) | {"module": {**state["module"], "extra": torch.zeros(1)}},
        r"training: state\['module'\] must have the keys of this module, got also 'extra'; load",
    ),
    "other shapes": (
        lambda: saved(module=other_shape()),
        r"training: state\['module'\]\['0\.weight'\] must have the shape \(16, 6\), got \(5, 6\); load",
    ),
    "another optimizer": (
        lambda: saved("sgd"),
        r"training: state\['optimizer'\] must be Adam to match optimizer=, got SGD; "
        r"pass the saved optimizer class",
    ),
    "other groups": (
        lambda: (state := saved()) | {"optimizers": [{**state["optimizers"][0], "param_groups": []}] * 3},
        r"training: state\['optimizers'\]\[0\] must fit the optimizer of part 0 \(layers '0' to '2'\), "
        r"got .*ValueError: loaded state dict has a different number of parameter groups; load",
    ),
    "no optimizers": (
        lambda: saved() | {"optimizers": []},
        r"training: state\['optimizers'\] must be a list with one entry for each of 3 parts, got \[\]",
    ),
    "another program's dictionary": (
        lambda: {"module": {}, "optimizer": {}},
        r"training: state must be the dictionary that state_dict\(\) returns, got one without "
        r"'parts', 'steps', 'optimizers'; save training.state_dict\(\)",
    ),
}


@on_both_placements
@pytest.mark.parametrize("case", UNFIT)
def test_unfit_state_raises_and_changes_nothing(on: Any, case: str) -> None:
    make, message = UNFIT[case]
    state = make()
    module = perceptron(seed=5)
    with trainer(module, on, parts=[3, 3, 3]) as training:
        with pytest.raises(ValueError, match=message):
            training.load_state_dict(state)
        assert_equal_bits(module.state_dict(), perceptron(seed=5).state_dict())
        run_steps(training, DATA[:1])


def test_state_must_be_a_dictionary() -> None:
    with (
        trainer(perceptron()) as training,
        pytest.raises(
            TypeError, match=r"training: state must be the dictionary that state_dict\(\) returns, got \[\]"
        ),
    ):
        training.load_state_dict([])  # type: ignore[arg-type]


def test_default_training_refuses_a_cut_into_another_number_of_parts() -> None:
    state = saved()
    with trainer(perceptron(), schedule=None, parts=2) as training:
        with pytest.raises(
            ValueError, match=r"state\['parts'\] must be 4 layer counts that add up to 9, got \[3, 3, 3\]"
        ):
            training.load_state_dict(state)
        run_steps(training, DATA[:1])


class Steps:
    """An optimizer without ``state_dict``."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = parameters

    def step(self) -> None:
        pass


def test_optimizer_without_state_raises() -> None:
    message = r"training: optimizer must have state_dict\(\) and load_state_dict\(\), got a Steps; use "
    with trainer(perceptron(), optimizer=Steps) as training:
        with pytest.raises(TypeError, match=message):
            training.state_dict()
        run_steps(training, DATA[:1])


@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_state_needs_an_active_training(call: str) -> None:
    state = saved()
    training = trainer(perceptron())
    arguments = [state] if call == "load_state_dict" else []
    with pytest.raises(RuntimeError, match="training has not started"):
        getattr(training, call)(*arguments)
    with training:
        run_steps(training, DATA[:1])
    with pytest.raises(RuntimeError, match="training is over"):
        getattr(training, call)(*arguments)

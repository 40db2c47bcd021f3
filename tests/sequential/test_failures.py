"""Test that a failed training step names the part, the step and the micro-batch, and leaves nothing
behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import on_both_placements
from support.waiting import wait_until
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from trained import OPTIMIZERS, Blocker, assert_same_state, batches, in_parts, perceptron, train_plainly

from flowchan import RunError, WorkerDied


class Custom(Exception):
    """Exception that cannot be pickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)
        self.lock = threading.Lock()


class At(nn.Module):
    """Layer that calls ``act`` in the forward or backward pass of micro-batch ``chunk``, counted from 0."""

    def __init__(self, chunk: int, act: Callable[[], None], backward: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.chunk, self.act, self.back = chunk, act, backward
        self.seen = {"forward": 0, "backward": 0}

    def count(self, variant: str) -> None:
        self.seen[variant] += 1
        if self.seen[variant] == self.chunk + 1 and self.back == (variant == "backward"):
            self.act()

    def forward(self, x: Tensor) -> Tensor:
        self.count("forward")
        return Watched.apply(x * self.weight, self)  # type: ignore[no-any-return]


class Watched(torch.autograd.Function):
    """Identity function that reports its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: At) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.layer.count("backward")
        return gradient, None


def bad() -> None:
    raise ValueError("bad")


def with_layer(layer: nn.Module) -> nn.Sequential:
    """Return nine layers for three parts, with ``layer`` in the middle of part 1."""
    module = perceptron()
    module[4] = nn.Sequential(nn.Linear(12, 12), layer)
    module[3] = nn.Linear(12, 12)
    return module


def failure_of(module: nn.Sequential, on: Any, steps: int = 1, **options: Any) -> RunError:
    """Run ``steps`` training steps, and return the error that the last step raises."""
    ((x, target),) = batches([8])
    options.setdefault("optimizer", OPTIMIZERS["sgd"])
    with in_parts(module, 3, on, **options) as training:
        for _ in range(steps - 1):
            training.step(x, target)
        with pytest.raises(RunError) as raised:
            training.step(x, target)
        with pytest.raises(RuntimeError, match="is over"):
            training.step(x, target)
    return raised.value


# --- exceptions ---


@on_both_placements
def test_failure_in_a_forward_pass_names_part_and_step(on: Any) -> None:
    error = failure_of(with_layer(At(2, bad)), on)
    assert error.message == "part 1 (layers '3' to '5'), step F2 (micro-batch 2 of 4): ValueError: bad"
    assert repr(error.exceptions[0].__cause__) == "ValueError('bad')"
    assert error.exceptions[0].stage == "part 1"


@on_both_placements
def test_failure_in_a_backward_pass_names_part_and_step(on: Any) -> None:
    error = failure_of(with_layer(At(1, bad, backward=True)), on, schedule="gpipe")
    assert error.message == "part 1 (layers '3' to '5'), step B1 (micro-batch 1 of 4): ValueError: bad"


@on_both_placements
def test_failure_in_the_loss_names_the_last_part(on: Any) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no loss")

    error = failure_of(perceptron(), on, loss=loss)
    assert error.message == "part 2 (layers '6' to '8'), step F0 (micro-batch 0 of 4): ValueError: no loss"


def test_loss_with_dimensions_raises_with_its_shape() -> None:
    error = failure_of(
        perceptron(), "thread", loss=lambda output, target: cross_entropy(output, target, reduction="none")
    )
    assert "step F0 (micro-batch 0 of 4): TypeError: loss must be a 0-dimensional tensor" in error.message
    assert "got shape (2,)" in error.message


@on_both_placements
def test_nan_loss_of_a_padded_micro_batch_raises(on: Any) -> None:
    ((x, target),) = batches([8])
    target[4:6] = -100  # cross_entropy's ignore_index, for all samples of micro-batch 2
    with in_parts(perceptron(), 3, on) as training, pytest.raises(RunError) as raised:
        training.step(x, target)
    assert re.match(
        r"part 2 \(.*\), step F2 \(micro-batch 2 of 4\): ValueError: loss must be finite "
        r"for a finite output, got NaN",
        raised.value.message,
    )


def test_nan_loss_is_allowed_if_the_plain_loss_is_nan() -> None:
    ((x, target),) = batches([8])
    with in_parts(perceptron(), 3, chunks=1) as training:
        assert torch.isnan(training.step(x, torch.full_like(target, -100)))
    x[0] = torch.inf
    with in_parts(perceptron(), 3) as training:
        assert torch.isnan(training.step(x, target))


@on_both_placements
def test_failure_in_the_optimizer_names_part_and_step(on: Any) -> None:
    class Fails(SGD):
        def step(self, closure: Any = None) -> None:
            if len(self.param_groups[0]["params"]) == 7:
                raise ValueError("no update")

    # part 1 is the only part with seven parameters: three linear layers and this one
    module = with_layer(nn.PReLU())
    module[5] = nn.Linear(12, 12)
    error = failure_of(module, on, optimizer=lambda parameters: Fails(parameters, lr=0.1))
    assert error.message == "part 1 (layers '3' to '5'), update at the end of step 0: ValueError: no update"


def test_failure_to_create_an_optimizer_names_the_part() -> None:
    parent = threading.get_ident()

    def made(parameters: Any) -> SGD:
        if threading.get_ident() != parent:
            raise ValueError("not here")
        return SGD(parameters, lr=0.1)

    error = failure_of(perceptron(), "thread", optimizer=made)
    assert re.fullmatch(r"part \d \(.*\), creating its optimizer: ValueError: not here", error.message)


def test_failure_while_recomputing_names_the_backward_step() -> None:
    error = failure_of(with_layer(At(5, bad)), "thread", recompute=True, schedule="gpipe")
    assert error.message == "part 1 (layers '3' to '5'), step B1 (micro-batch 1 of 4): ValueError: bad"


def test_failure_in_an_interleaved_schedule_names_the_part() -> None:
    module = with_layer(At(1, bad))
    error = failure_of(module, "thread", schedule="interleaved", workers=2)
    assert error.message == "part 1 (layers '3' to '5'), step F1 (micro-batch 1 of 4): ValueError: bad"


def test_failure_in_a_later_step_names_the_step_or_evaluation() -> None:
    module = with_layer(At(9, bad))
    assert "step F1 (micro-batch 1 of 4)" in failure_of(module, "thread", steps=3).message
    with in_parts(with_layer(At(3, bad)), 3) as training, pytest.raises(RunError) as raised:
        training.evaluate(next(batches([8]))[0])
    assert raised.value.message.startswith(
        "part 1 (layers '3' to '5'), evaluation, step F3 (micro-batch 3 of 4)"
    )


def test_unpicklable_exception_is_reported_by_its_text() -> None:
    def raises() -> None:
        raise Custom("too ", "much")

    error = failure_of(with_layer(At(0, raises)), "process")
    assert re.fullmatch(
        r"part 1 \(layers '3' to '5'\), step F0 \(micro-batch 0 of 4\): .*Custom: too much", error.message
    )


@on_both_placements
def test_layer_that_calls_exit_is_reported_as_a_failure(on: Any) -> None:
    error = failure_of(with_layer(At(1, sys.exit)), on)
    assert error.message == "part 1 (layers '3' to '5'), step F1 (micro-batch 1 of 4): SystemExit: "


@on_both_placements
def test_module_keeps_earlier_steps_after_a_failure(on: Any) -> None:
    module = with_layer(At(9, bad))
    plain, _ = train_plainly(module, OPTIMIZERS["sgd"], [*batches([8])] * 2)
    failure_of(module, on, steps=3)
    assert_same_state(module, plain)


# --- killed workers ---


def killed_at(blocker: Blocker, pid: Path, mark: Path | None = None) -> threading.Thread:
    """Kill the process that waits at the blocker, as soon as ``mark`` exists."""

    def kill() -> None:
        blocker.wait_held()
        if mark is not None:
            wait_until(mark.exists)
        os.kill(int(pid.read_text()), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.parametrize("backward", [False, True])
def test_killed_worker_is_reported_with_part_and_progress(tmp_path: Path, backward: bool) -> None:
    blocker, pid = Blocker(), tmp_path / "pid"

    def hold() -> None:
        pid.write_text(str(os.getpid()))
        blocker.wait()

    killer = killed_at(blocker, pid)
    error = failure_of(with_layer(At(6, hold, backward)), "process", steps=2)
    killer.join()
    cause = error.exceptions[0].__cause__
    assert isinstance(cause, WorkerDied)
    assert cause.exitcode == -signal.SIGKILL
    place = (
        r"part 1 \(layers '3' to '5'\), step 1, (after [FB]\d \(micro-batch \d of 4\)|before "
        r"any step that is known to be complete): "
    )
    assert re.match(
        place + r"WorkerDied: the process of worker part 1 1 was killed by SIGKILL", error.message
    )


def test_killed_worker_that_sent_no_output_has_no_known_step(tmp_path: Path) -> None:
    blocker, pid = Blocker(), tmp_path / "pid"

    def hold() -> None:
        pid.write_text(str(os.getpid()))
        blocker.wait()

    ((x, target),) = batches([8])
    module = nn.Sequential(nn.Linear(6, 4), At(6, hold))
    with in_parts(module, 2, "process", schedule="gpipe", optimizer=OPTIMIZERS["sgd"]) as training:
        training.step(x, target)
        killer = killed_at(blocker, pid)
        with pytest.raises(RunError) as raised:
            training.step(x, target)
        killer.join()
    assert raised.value.message.startswith(
        "part 1 (layer '1'), step 1, before any step that is known to be complete: WorkerDied"
    )


def test_killed_worker_is_reported_with_its_last_received_step(tmp_path: Path) -> None:
    """The worker is blocked in F2 of step 1, and the next part already has the result of F1."""
    blocker, pid, arrived = Blocker(), tmp_path / "pid", tmp_path / "arrived"

    def hold() -> None:
        pid.write_text(str(os.getpid()))
        blocker.wait()

    ((x, target),) = batches([8])
    module = nn.Sequential(At(6, hold), nn.Linear(6, 4), At(5, arrived.touch))

    with in_parts(module, [2, 1], "process", schedule="gpipe", optimizer=OPTIMIZERS["sgd"]) as training:
        training.step(x, target)
        killer = killed_at(blocker, pid, arrived)
        with pytest.raises(RunError) as raised:
            training.step(x, target)
        killer.join()
    place = "part 0 (layers '0' to '1'), step 1, after F1 (micro-batch 1 of 4): WorkerDied: "
    assert raised.value.message.startswith(place)


def test_worker_that_exits_ends_the_step() -> None:
    error = failure_of(with_layer(At(1, lambda: os._exit(3))), "process")
    assert re.match(r"part 1 .*, step 0, .*: WorkerDied: .* exited with code 3", error.message)


def test_worker_killed_between_steps_is_reported_in_the_next(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    module = with_layer(At(0, lambda: pid.write_text(str(os.getpid()))))  # type: ignore[arg-type,return-value]
    ((x, target),) = batches([8])
    with in_parts(module, 3, "process", optimizer=OPTIMIZERS["sgd"]) as training:
        training.step(x, target)
        os.kill(int(pid.read_text()), signal.SIGKILL)
        with pytest.raises(RunError, match=r"part 1 \(layers '3' to '5'\), step 1, .*SIGKILL"):
            training.step(x, target)


def test_worker_killed_after_the_last_step_loses_nothing(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    module = with_layer(At(0, lambda: pid.write_text(str(os.getpid()))))  # type: ignore[arg-type,return-value]
    data = list(batches([8]))
    plain, _ = train_plainly(module, OPTIMIZERS["sgd"], data)
    with (
        contextlib.suppress(RunError),  # raised if the death is noticed before the block ends
        in_parts(module, 3, "process", optimizer=OPTIMIZERS["sgd"]) as training,
    ):
        training.step(*data[0])
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert_same_state(module, plain)


# --- leaving the block ---


@on_both_placements
def test_exception_in_the_training_block_propagates(on: Any) -> None:
    def train() -> None:
        with in_parts(perceptron(), 3, on, optimizer=OPTIMIZERS["sgd"]) as training:
            training.step(*next(batches([8])))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


@on_both_placements
def test_ctrl_c_ends_the_step_and_the_training(on: Any) -> None:
    blocker = Blocker()

    def interrupt() -> None:
        blocker.wait_held()
        os.kill(os.getpid(), signal.SIGINT)
        blocker.open()

    def train() -> None:
        with in_parts(with_layer(At(1, blocker.wait)), 3, on, optimizer=OPTIMIZERS["sgd"]) as training:
            helper.start()
            training.step(*next(batches([8])))

    helper = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        train()
    helper.join()


def test_training_that_never_starts_releases_all_resources() -> None:
    in_parts(perceptron(), 3, "process")

"""Test that AsySGInCon matches its simulation bit for bit, and that its reads may be inconsistent."""

from __future__ import annotations

from typing import Any

import pytest
import simulations
from plain_client import PlainServer
from support.optional_packages import optional
from training_runs import SERVERS, assert_equal, backward, in_turn, state_of

from flowchan.pipelines.parameter_server.async_sgd import AsySGInCon

torch = optional("torch")
pytestmark = pytest.mark.usefixtures("one_compute_thread")

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
}


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_asysg_matches_its_simulation_bit_for_bit(kind: str, make: str) -> None:
    data = simulations.batches(workers=3, steps=10)
    expected, history = simulations.summed_sgd(data, count=8, outer=OPTIMIZERS[make])
    optimizer = AsySGInCon.optimizer(OPTIMIZERS[make], gradients=8)
    with SERVERS[kind](simulations.initial(), optimizer=optimizer) as server:
        found = in_turn(lambda model: AsySGInCon(server.client(), model), data)
        assert_equal(server.client().pull(), expected)
    for mine, theirs in zip(found, history, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert_equal(one, other)


def test_server_steps_after_32_gradients() -> None:
    server, model = (
        PlainServer(simulations.initial(), AsySGInCon.optimizer(OPTIMIZERS["sgd"])),
        simulations.model(),
    )
    training, ((batch,),) = AsySGInCon(server.client(), model), simulations.batches(workers=1, steps=1)
    for _ in range(31):
        backward(model, batch)
        training.step()
    assert_equal(state_of(model), simulations.initial())
    backward(model, batch)
    training.step()
    expected = simulations.initial()
    for name, gradient in simulations.gradients(expected, batch).items():
        torch.testing.assert_close(state_of(model)[name], expected[name] - 0.05 * 32 * gradient)


def test_only_pulls_within_steps_may_be_inconsistent() -> None:
    server, model = (
        PlainServer(simulations.initial(), AsySGInCon.optimizer(OPTIMIZERS["sgd"])),
        simulations.model(),
    )
    training, ((batch,),) = AsySGInCon(server.client(), model), simulations.batches(workers=1, steps=1)
    backward(model, batch)
    training.step()
    training.finish()
    assert [call for call, *_ in server.log] == ["pull", "push", "inconsistent pull", "pull"]


def test_optimizer_rejects_zero_gradients_per_step() -> None:
    with pytest.raises(ValueError, match=r"^AsySGInCon.optimizer: gradients must be at least 1, got 0"):
        AsySGInCon.optimizer(OPTIMIZERS["sgd"], gradients=0)

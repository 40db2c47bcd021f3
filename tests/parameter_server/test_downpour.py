"""Test that Downpour matches its simulation bit for bit and avoids the errors of TorchMPI."""

from __future__ import annotations

from typing import Any

import pytest
import simulations
from plain_client import PlainClient, PlainServer
from support.optional_packages import optional
from training_runs import SERVERS, assert_equal, backward, in_turn, state_of

from flowchan.pipelines.parameter_server.downpour import Downpour

torch = optional("torch")
pytestmark = pytest.mark.usefixtures("one_compute_thread")

SCHEDULES: list[dict[str, Any]] = [
    {},
    {"push_every": 3, "pull_every": 3},
    {"push_every": 2, "pull_every": 5, "momentum": 0.9},
    {"push_every": 4, "pull_every": 6, "start": 3},
    {"push_every": 2, "pull_every": 6, "prefetch": 4},
    {"push_every": 5, "pull_every": 4, "prefetch": 1, "start": 2, "momentum": 0.5},
]
TORCHMPI = {"push_every": 25, "pull_every": 50, "prefetch": 25, "start": 20, "momentum": 0.9}


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_downpour_matches_its_simulation_bit_for_bit(kind: str, schedule: dict[str, Any]) -> None:
    data = simulations.batches(workers=3, steps=16)
    expected, history = simulations.downpour(data, lr=0.1, **schedule)
    with SERVERS[kind](simulations.initial()) as server:
        found = in_turn(lambda model: Downpour(server.client(), model, lr=0.1, **schedule), data)
        assert_equal(server.client().pull(), expected)
    for mine, theirs in zip(found, history, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert_equal(one, other)


def test_torchmpi_schedule_calls_the_server_in_documented_steps() -> None:
    """TorchMPI prefetches ``prefetch`` steps after an integration. Downpour prefetches that many steps before
    an integration."""
    found = steps_of_calls(150, **TORCHMPI)
    assert found["push"] == [45, 70, 95, 120, 145]
    assert found["prefetch"] == [45, 95, 145]
    assert found["integrate"] == [70, 120]


def test_prefetch_begins_three_steps_before_integration() -> None:
    found = steps_of_calls(45, push_every=7, pull_every=20, prefetch=3)
    assert (found["prefetch"], found["integrate"]) == ([17, 37], [20, 40])


def steps_of_calls(steps: int, **schedule: Any) -> dict[str, list[int]]:
    """Return the steps that make a replica call the server, grouped by kind of call."""
    server, (data,) = PlainServer(simulations.initial()), simulations.batches(workers=1, steps=steps)
    model = simulations.model()
    training = Downpour(server.client(), model, lr=0.001, **schedule)
    found: dict[str, list[int]] = {}
    for step, batch in enumerate(data, 1):
        server.log.clear()
        backward(model, batch)
        training.step()
        for call, *_ in server.log:
            found.setdefault(call, []).append(step)
    return found


@pytest.mark.parametrize("schedule", [*SCHEDULES, TORCHMPI], ids=str)
def test_pull_never_rolls_back_a_single_replica(schedule: dict[str, Any]) -> None:
    """TorchMPI's first pull after a prefetch resets the model to its first parameters."""
    steps = 130 if schedule is TORCHMPI else 16
    (data,) = simulations.batches(workers=1, steps=steps)
    plain, model = simulations.model(), simulations.model()
    momentum = schedule.get("momentum", 0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=momentum, nesterov=momentum > 0)
    training = Downpour(PlainServer(simulations.initial()).client(), model, lr=0.01, **schedule)
    for batch in data:
        for one in (plain, model):
            backward(one, batch)
        optimizer.step()
        training.step()
        for name, expected in state_of(plain).items():
            torch.testing.assert_close(state_of(model)[name], expected, rtol=0, atol=1e-12)


def test_first_push_includes_updates_from_before_the_start() -> None:
    server, (data,) = PlainServer(simulations.initial()), simulations.batches(workers=1, steps=5)
    in_turn(lambda model: Downpour(server.client(), model, lr=0.1, start=3, push_every=2), [data])
    state = simulations.initial()
    for batch in data:
        state = simulations.sgd_step(state, batch, 0.1)
    for name, expected in state.items():
        torch.testing.assert_close(server.tensors[name], expected, rtol=0, atol=1e-12)


def test_constructor_copies_parameters_from_the_server() -> None:
    tensors = {name: x + 1 for name, x in simulations.initial().items()}
    model = simulations.model()
    Downpour(PlainServer(tensors).client(), model, lr=0.1)
    assert_equal(state_of(model), tensors)


def test_update_is_pushed_later_if_the_server_times_out() -> None:
    class SlowOnce(PlainClient):
        pushes = 0

        def push(self, *args: Any, **options: Any) -> Any:
            self.pushes += 1
            if self.pushes == 2:
                raise TimeoutError("the server is slow")
            return super().push(*args, **options)

    server, (data,) = PlainServer(simulations.initial()), simulations.batches(workers=1, steps=3)
    model = simulations.model()
    training = Downpour(SlowOnce(server), model, lr=0.1)
    state = simulations.initial()
    for step, batch in enumerate(data):
        state = simulations.sgd_step(state, batch, 0.1)
        backward(model, batch)
        if step == 1:
            with pytest.raises(TimeoutError):
                training.step()
        else:
            training.step()
    training.finish()
    for name, expected in state.items():
        torch.testing.assert_close(server.tensors[name], expected, rtol=0, atol=1e-12)


def test_parameters_without_a_gradient_do_not_change() -> None:
    server, model = PlainServer(simulations.initial()), simulations.model()
    training = Downpour(server.client(), model, lr=0.1)
    training.step()
    training.finish()
    assert_equal(state_of(model), simulations.initial())
    assert server.version == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0}, "Downpour: lr must be greater than 0 and finite, got 0"),
        ({"momentum": 1.0}, "Downpour: momentum must be at least 0 and less than 1, got 1.0"),
        ({"push_every": 0}, "Downpour: push_every must be at least 1, got 0"),
        ({"pull_every": 0}, "Downpour: pull_every must be at least 1, got 0"),
        ({"prefetch": 10}, "Downpour: prefetch must be at most 9, got 10"),
        ({"start": -1}, "Downpour: start must be at least 0, got -1"),
        ({"timeout": 0}, "Downpour: timeout must be greater than 0 seconds"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_downpour_rejects_out_of_range_arguments(options: dict[str, Any], message: str) -> None:
    client = PlainServer(simulations.initial()).client()
    with pytest.raises(ValueError, match=f"^{message}"):
        Downpour(client, simulations.model(), **{"lr": 0.1, **options})


def test_downpour_rejects_a_model_without_parameters() -> None:
    client = PlainServer(simulations.initial()).client()
    with pytest.raises(
        ValueError, match=r"^Downpour: model must have parameters that require gradients, got none"
    ):
        Downpour(client, torch.nn.ReLU(), lr=0.1)
    with pytest.raises(TypeError, match=r"^Downpour: model must be a torch.nn.Module, got dict"):
        Downpour(client, {}, lr=0.1)  # type: ignore[arg-type]

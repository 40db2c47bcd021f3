"""Test that DiLoCo matches its simulation bit for bit, even if workers are late or die."""

from __future__ import annotations

from typing import Any

import pytest
import simulations
from plain_client import PlainClient, PlainServer
from simulations import State
from support.optional_packages import optional
from training_runs import SERVERS, ClientInTurn, Turns, assert_equal, at_once, backward, plain_step, state_of

from flowchan.pipelines.parameter_server import diloco
from flowchan.pipelines.parameter_server.diloco import DiLoCo, nesterov

torch = optional("torch")
pytestmark = pytest.mark.usefixtures("one_compute_thread")

LR = 0.05
OUTERS: dict[str, Any] = {
    "nesterov": nesterov,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5),
}


def train(training: DiLoCo, model: Any, data: Any) -> State:
    for batch in data:
        backward(model, batch)
        plain_step(model, LR)
        training.step()
    return state_of(model)


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("outer", OUTERS)
def test_diloco_matches_its_simulation_bit_for_bit(kind: str, outer: str) -> None:
    """The workers contribute in a different order in each round."""
    every, order = 3, [0, 1, 2, 2, 0, 1, 1, 2, 0]
    data = simulations.batches(workers=3, steps=9)
    rounds = [[(r, data[w][r * every : (r + 1) * every]) for w in order[r * 3 : r * 3 + 3]] for r in range(3)]
    expected = simulations.diloco(rounds, lr=LR, outer=OUTERS[outer])
    turns = Turns(order)
    with SERVERS[kind](DiLoCo.tensors(simulations.model(), outer=OUTERS[outer])) as server:

        def work(w: int) -> list[State]:
            model = simulations.model()
            client = ClientInTurn(server.client(), w, turns)
            training = DiLoCo(client, model, every=every, outer=OUTERS[outer], workers=3, timeout=60)
            found = [train(training, model, data[w][r * every : (r + 1) * every]) for r in range(3)]
            training.finish()
            return found

        for found in at_once(work, 3):
            for one, other in zip(found, expected, strict=True):
                assert_equal(one, other)


def test_round_with_a_quorum_ends_after_the_grace_period() -> None:
    """The third worker never contributes, like a worker that was killed."""
    data = simulations.batches(workers=3, steps=4)
    rounds = [[(r, data[w][r * 2 : r * 2 + 2]) for w in (0, 1)] for r in range(2)]
    expected = simulations.diloco(rounds, lr=LR, outer=nesterov)
    server, turns = PlainServer(DiLoCo.tensors(simulations.model())), Turns([0, 1, 0, 1])

    def work(w: int) -> State:
        model = simulations.model()
        client = ClientInTurn(server.client(), w, turns)
        training = DiLoCo(client, model, every=2, workers=3, quorum=2, grace=0.05, timeout=60)
        return train(training, model, data[w])

    for found in at_once(work, 2):
        assert_equal(found, expected[-1])


def test_late_contribution_counts_in_the_next_round() -> None:
    data = simulations.batches(workers=2, steps=4)
    server = PlainServer(DiLoCo.tensors(simulations.model()))
    models = [simulations.model(), simulations.model()]
    quick, late = (
        DiLoCo(server.client(), model, every=2, workers=2, quorum=1, grace=0, timeout=60) for model in models
    )
    train(quick, models[0], data[0][:2])
    train(late, models[1], data[1][:2])  # starts with the initial parameters
    train(quick, models[0], data[0][2:])
    rounds = [[(0, data[0][:2])], [(0, data[1][:2])], [(1, data[0][2:])]]
    expected = simulations.diloco(rounds, lr=LR, outer=nesterov)
    assert_equal(state_of(models[1]), expected[1])
    assert_equal(state_of(models[0]), expected[2])


def test_next_call_continues_a_round_that_timed_out() -> None:
    """The second call must not contribute the replica's update again."""
    data = simulations.batches(workers=2, steps=2)
    server = PlainServer(DiLoCo.tensors(simulations.model()))
    models = [simulations.model(), simulations.model()]
    one, other = (
        DiLoCo(server.client(), model, every=1, workers=2, timeout=limit)
        for model, limit in zip(models, (0.02, 60), strict=True)
    )
    message = r"^DiLoCo: 1 of 2 replicas contributed to round 0 within 0.02 s; pass quorum= and grace="
    with pytest.raises(TimeoutError, match=message):
        train(one, models[0], data[0][:1])
    train(other, models[1], data[1][:1])
    one.step()
    (expected,) = simulations.diloco([[(0, data[0][:1]), (0, data[1][:1])]], lr=LR, outer=nesterov)
    assert_equal(state_of(models[0]), expected)
    assert_equal(state_of(models[1]), expected)


def test_other_replica_closes_round_if_last_contributor_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diloco, "TAKEOVER_S", 0.05)
    data = simulations.batches(workers=2, steps=1)
    (expected,) = simulations.diloco([[(0, data[0]), (0, data[1])]], lr=LR, outer=nesterov)
    server, turns = PlainServer(DiLoCo.tensors(simulations.model())), Turns([0, 1])

    class Dies(PlainClient):
        def push(self, values: Any, rule: Any = "add", **options: Any) -> Any:
            if rule == "copy":
                raise ConnectionError("this worker was killed")
            return super().push(values, rule, **options)

    def work(w: int) -> State | None:
        model, client = simulations.model(), (PlainClient, Dies)[w](server)
        training = DiLoCo(ClientInTurn(client, w, turns), model, every=1, workers=2, timeout=60)
        try:
            return train(training, model, data[w])
        except ConnectionError:
            return None

    survivor, dead = at_once(work, 2)
    assert dead is None
    assert_equal(survivor, expected)


def test_round_closes_once_if_two_replicas_close_it() -> None:
    """Both replicas see a complete round, and the server drops the push of the second replica."""
    data = simulations.batches(workers=2, steps=1)
    (expected,) = simulations.diloco([[(0, data[0]), (0, data[1])]], lr=LR, outer=nesterov)
    server, turns, dropped = PlainServer(DiLoCo.tensors(simulations.model())), Turns([0, 1]), []

    class BeatenOnce(PlainClient):
        """A client that loses a race: another replica closes the round between the client's pull and push."""

        def push(self, values: Any, rule: Any = "add", **options: Any) -> Any:
            handle = super().push(values, rule, **options)
            if rule == "copy":
                handle = super().push(values, rule, **options)
                dropped.append(handle.dropped)
            return handle

    def work(w: int) -> State:
        model = simulations.model()
        client = ClientInTurn(BeatenOnce(server), w, turns)
        return train(DiLoCo(client, model, every=1, workers=2, timeout=60), model, data[w])

    for found in at_once(work, 2):
        assert_equal(found, expected)
    assert dropped == [True]


def test_finished_replica_does_not_delay_later_rounds() -> None:
    data = simulations.batches(workers=2, steps=4)
    expected = simulations.diloco(
        [[(0, data[0][:2]), (0, data[1][:2])], [(1, data[0][2:])]], lr=LR, outer=nesterov
    )
    server, turns = PlainServer(DiLoCo.tensors(simulations.model())), Turns([0, 1, 0])

    def work(w: int) -> tuple[State, int]:
        model = simulations.model()
        training = DiLoCo(ClientInTurn(server.client(), w, turns), model, every=2, workers=2, timeout=60)
        train(training, model, data[w] if w == 0 else data[w][:2])
        training.finish()
        return state_of(model), training.rounds

    (last, rounds), _ = at_once(work, 2)
    assert rounds == 2
    assert_equal(last, expected[-1])


def test_finish_contributes_the_steps_of_an_incomplete_round() -> None:
    (data,) = simulations.batches(workers=1, steps=3)
    server, model = PlainServer(DiLoCo.tensors(simulations.model())), simulations.model()
    training = DiLoCo(server.client(), model, every=2, workers=1, timeout=60)
    train(training, model, data)
    training.finish()
    expected = simulations.diloco([[(0, data[:2])], [(1, data[2:])]], lr=LR, outer=nesterov)
    assert_equal(state_of(model), expected[-1])
    training.finish()
    with pytest.raises(RuntimeError, match=r"^DiLoCo: step\(\) must not be called after finish\(\)"):
        training.step()


def test_replacement_worker_keeps_the_outer_optimizer_state() -> None:
    """The server has the state of the outer optimizer, so a replacement worker keeps the momentum."""
    (data,) = simulations.batches(workers=1, steps=4)
    expected = simulations.diloco([[(0, data[:2])], [(1, data[2:])]], lr=LR, outer=nesterov)
    server = PlainServer(DiLoCo.tensors(simulations.model()))
    for part in (data[:2], data[2:]):
        model = simulations.model()
        train(DiLoCo(server.client(), model, every=2, workers=1, timeout=60), model, part)
    assert_equal(state_of(model), expected[-1])


def test_diloco_rejects_a_server_without_its_tensors() -> None:
    client = PlainServer(simulations.initial()).client()
    message = (
        r"^DiLoCo: client must belong to a server created with DiLoCo.tensors\(model\), got another server"
    )
    with pytest.raises(ValueError, match=message):
        DiLoCo(client, simulations.model(), workers=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "DiLoCo: every must be at least 1, got 0"),
        ({"workers": 0}, "DiLoCo: workers must be at least 1, got 0"),
        ({"quorum": 4, "grace": 1}, "DiLoCo: quorum must be at most 3, got 4"),
        ({"quorum": 2}, "DiLoCo: grace must be a number of seconds with quorum=2, got None; pass grace=0"),
        ({"grace": -1}, "DiLoCo: grace must be at least 0 seconds, got -1"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_diloco_rejects_out_of_range_arguments(options: dict[str, Any], message: str) -> None:
    client = PlainServer(DiLoCo.tensors(simulations.model())).client()
    with pytest.raises(ValueError, match=f"^{message}"):
        DiLoCo(client, simulations.model(), **{"workers": 3, **options})

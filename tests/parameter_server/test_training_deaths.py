"""Test that the other workers continue if one worker is killed while training over a parameter server."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import simulations
from support.optional_packages import optional
from training_runs import assert_equal, backward, plain_step, state_of

from flowchan import RunError
from flowchan.pipelines import DiLoCo, Downpour, ElasticAveraging, ParameterServer, map  # noqa: A004
from flowchan.pipelines.parameter_server.diloco import nesterov

torch = optional("torch")
pytestmark = pytest.mark.usefixtures("one_compute_thread")

LR = 0.05


def train(client: Any, name: str, worker: int) -> simulations.State:
    """Train 6 steps. Worker 3 is killed after 3 steps, or after 1 step of DiLoCo."""
    torch.set_num_threads(1)
    model, data = simulations.model(), simulations.batches(workers=3, steps=6)[worker - 1]
    if name == "DiLoCo":
        training: Any = DiLoCo(client, model, every=2, workers=3, quorum=2, grace=0.2, timeout=60)
    elif name == "Downpour":
        training = Downpour(client, model, lr=LR, push_every=2, pull_every=3, prefetch=1, timeout=60)
    else:
        training = ElasticAveraging(client, model, every=2, timeout=60)
    for step, batch in enumerate(data):
        if worker == 3 and step == (1 if name == "DiLoCo" else 3):
            os.kill(os.getpid(), signal.SIGKILL)
        backward(model, batch)
        if name != "Downpour":
            plain_step(model, LR)
        training.step()
    training.finish()
    return state_of(model)


@pytest.mark.parametrize("name", ["Downpour", "ElasticAveraging"])
def test_other_workers_finish_if_one_worker_is_killed(name: str) -> None:
    with ParameterServer(simulations.initial()) as server:
        workers = map(3, train, server.client(), name, on="process")
        with pytest.raises(RunError):
            workers.join()
        assert len(workers.join()) == 2


def test_diloco_matches_its_simulation_if_a_worker_is_killed() -> None:
    """The worker dies before its first contribution.

    A sum of two contributions does not depend on their order.
    """
    data = simulations.batches(workers=3, steps=6)
    rounds = [[(r, data[w][r * 2 : r * 2 + 2]) for w in (0, 1)] for r in range(3)]
    expected = simulations.diloco(rounds, lr=LR, outer=nesterov)
    with ParameterServer(DiLoCo.tensors(simulations.model())) as server:
        workers = map(3, train, server.client(), "DiLoCo", on="process")
        with pytest.raises(RunError):
            workers.join()
        found = workers.join()
        assert len(found) == 2
        for state in found:
            assert_equal(state, expected[-1])

"""Test that ElasticAveraging matches its simulation bit for bit and avoids the errors of TorchMPI."""

from __future__ import annotations

from typing import Any

import pytest
import simulations
from plain_client import PlainServer
from support.optional_packages import optional
from training_runs import SERVERS, assert_equal, backward, in_turn, plain_step, state_of

from flowchan.pipelines.parameter_server.elastic_averaging import ElasticAveraging

torch = optional("torch")
pytestmark = pytest.mark.usefixtures("one_compute_thread")

SCHEDULES: list[dict[str, Any]] = [
    {"every": 1, "alpha": 0.3},
    {"every": 4, "alpha": 0.1},
    {"every": 5, "alpha": 0.2, "start": 3},
    {"every": 6, "alpha": 0.3, "prefetch": 2, "start": 1},
]
TORCHMPI = {"every": 50, "prefetch": 25, "start": 20, "alpha": 0.9 / 4}
TORCHMPI_WITH_DATA_PARALLEL = {"every": 10, "prefetch": 3, "start": 50, "alpha": 0.9 / 4}


@pytest.mark.parametrize("kind", SERVERS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_elastic_averaging_matches_its_simulation_bit_for_bit(kind: str, schedule: dict[str, Any]) -> None:
    data = simulations.batches(workers=3, steps=16)
    expected, history = simulations.elastic_averaging(data, lr=0.1, **schedule)
    with SERVERS[kind](simulations.initial()) as server:
        found = in_turn(lambda model: ElasticAveraging(server.client(), model, **schedule), data, 0.1)
        assert_equal(server.client().pull(), expected)
    for mine, theirs in zip(found, history, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert_equal(one, other)


def test_centre_moves_towards_the_replica() -> None:
    """In TorchMPI, EASGD never sends an update, so the centre never moves."""
    server, model = PlainServer(simulations.initial()), simulations.model()
    training = ElasticAveraging(server.client(), model, every=1, alpha=0.25)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(8)
    training.step()
    for name, start in simulations.initial().items():
        torch.testing.assert_close(server.tensors[name], start + 2, rtol=0, atol=1e-12)
        torch.testing.assert_close(state_of(model)[name], start + 6, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "prefetched", "exchanged"),
    [(TORCHMPI, [45, 95, 145], [70, 120]), (TORCHMPI_WITH_DATA_PARALLEL, [57, 67, 77], [60, 70, 80])],
    ids=["easgd", "easgd_dataparallel"],
)
def test_torchmpi_schedule_exchanges_in_the_documented_steps(
    schedule: dict[str, Any], prefetched: list[int], exchanged: list[int]
) -> None:
    server, model = PlainServer(simulations.initial()), simulations.model()
    training = ElasticAveraging(server.client(), model, **schedule)
    found: dict[str, list[int]] = {}
    for step in range(1, exchanged[-1] + 26 if schedule is TORCHMPI else 81):
        server.log.clear()
        training.step()
        for call, *_ in server.log:
            found.setdefault(call, []).append(step)
    assert found == {"prefetch": prefetched, "integrate": exchanged, "push": exchanged}


def test_first_exchange_after_a_prefetch_uses_the_centre() -> None:
    """With a prefetch, TorchMPI's first integration uses the replica's own initial parameters."""
    server, model = PlainServer(simulations.initial()), simulations.model()
    training = ElasticAveraging(server.client(), model, every=3, prefetch=1, alpha=0.5)
    training.step()
    for x in server.tensors.values():  # as if other replicas had moved the centre
        x.add_(4)
    training.step()
    training.step()
    for name, start in simulations.initial().items():
        torch.testing.assert_close(state_of(model)[name], start + 2, rtol=0, atol=1e-12)


def test_finish_copies_the_centre_into_the_model() -> None:
    server, model = PlainServer(simulations.initial()), simulations.model()
    training = ElasticAveraging(server.client(), model, every=2)
    for batch in simulations.batches(workers=1, steps=5)[0]:
        backward(model, batch)
        plain_step(model, 0.1)
        training.step()
    training.finish()
    assert_equal(state_of(model), server.tensors)
    assert server.version == 2


@pytest.mark.parametrize("alpha", [0, 1, 1.5])
def test_elastic_averaging_rejects_alpha_out_of_range(alpha: float) -> None:
    client = PlainServer(simulations.initial()).client()
    with pytest.raises(ValueError, match=r"^ElasticAveraging: alpha must be between 0 and 1, got "):
        ElasticAveraging(client, simulations.model(), alpha=alpha)

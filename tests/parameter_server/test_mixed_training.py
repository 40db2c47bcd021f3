"""Test data-parallel groups of replicas in which only the leader uses the server."""

from __future__ import annotations

from typing import Any

import pytest
import simulations
from plain_client import PlainClient, PlainServer
from simulations import Batch, State
from support.optional_packages import optional
from training_runs import assert_equal, at_once, backward, in_turn, plain_step, state_of

from flowchan.collective import Group, members
from flowchan.pipelines.parameter_server.async_sgd import AsySGInCon
from flowchan.pipelines.parameter_server.diloco import DiLoCo
from flowchan.pipelines.parameter_server.downpour import Downpour
from flowchan.pipelines.parameter_server.elastic_averaging import ElasticAveraging

torch = optional("torch")
pytestmark = pytest.mark.usefixtures("one_compute_thread")

START: dict[str, Any] = {
    "Downpour": lambda client, model, group: Downpour(
        client, model, lr=0.1, push_every=2, pull_every=4, prefetch=1, momentum=0.5, group=group
    ),
    "ElasticAveraging": lambda client, model, group: ElasticAveraging(
        client, model, every=3, prefetch=1, alpha=0.3, group=group
    ),
    "DiLoCo": lambda client, model, group: DiLoCo(client, model, every=3, workers=1, group=group, timeout=60),
    "AsySGInCon": lambda client, model, group: AsySGInCon(client, model, group=group),
}
INNER_LR = {"ElasticAveraging": 0.1, "DiLoCo": 0.1}


def server_for(name: str) -> PlainServer:
    if name == "DiLoCo":
        return PlainServer(DiLoCo.tensors(simulations.model()))
    make = AsySGInCon.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1), gradients=3)
    return PlainServer(simulations.initial(), make if name == "AsySGInCon" else None)


class NoClient:
    """Client of a member that must not use the server."""

    version = 0

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"only the leader may call {name}")


@pytest.mark.parametrize("name", START)
def test_group_trains_like_one_replica(name: str) -> None:
    """TorchMPI's Downpour counts a group's gradients once per member."""
    data = simulations.batches(workers=1, steps=10)
    alone, together = server_for(name), server_for(name)
    (expected,) = in_turn(lambda model: START[name](alone.client(), model, None), data, INNER_LR.get(name))
    group = members(2)
    found = at_once(lambda w: train(name, group[w], together, data[0]), 2)
    for history in found:
        for one, other in zip(history, expected, strict=True):
            assert_equal(one, other)
    for tensor in simulations.initial():
        assert torch.equal(together.tensors[tensor], alone.tensors[tensor])
    assert together.version == alone.version


def train(name: str, member: Group, server: PlainServer, data: list[Batch]) -> list[State]:
    with member as g:
        model = simulations.model()
        if g.rank:  # the algorithm must replace these zeros with the server's parameters
            torch.nn.init.zeros_(model[0].weight)  # type: ignore[index]
        training = START[name](server.client() if g.rank == 0 else NoClient(), model, g)
        history = []
        for batch in data:
            backward(model, batch)
            for parameter in model.parameters():
                g.allreduce(parameter.grad, "mean")  # all members use the same batch
            if name in INNER_LR:
                plain_step(model, INNER_LR[name])
            training.step()
            history.append(state_of(model))
        training.finish()
        return history


def test_all_members_raise_the_error_of_their_leader() -> None:
    class Late(PlainClient):
        def pull(self, *args: Any, **options: Any) -> Any:
            raise TimeoutError("the server is slow")

    server, group = PlainServer(simulations.initial()), members(2)

    def work(w: int) -> str:
        with group[w] as g, pytest.raises(TimeoutError, match="the server is slow") as raised:
            Downpour(Late(server), simulations.model(), lr=0.1, group=g)
        return str(raised.value)

    assert at_once(work, 2) == ["the server is slow"] * 2


def test_two_groups_exchange_parameters_through_the_server() -> None:
    """The leaders of two groups of different sizes share a server. The members of each group keep equal
    parameters."""
    server = PlainServer(simulations.initial())
    groups = [*members(2), *members(3)]
    data = simulations.batches(workers=2, steps=6)

    def work(w: int) -> tuple[int, list[State]]:
        which = 0 if w < 2 else 1
        with groups[w] as g:
            model = simulations.model()
            training = ElasticAveraging(server.client(), model, every=2, alpha=0.4, group=g)
            history = []
            for batch in data[which]:
                backward(model, batch)
                plain_step(model, 0.1)
                training.step()
                history.append(state_of(model))
            return which, history

    found = at_once(work, 5)
    for which, history in found:
        first = found[0] if which == 0 else found[2]
        for one, other in zip(history, first[1], strict=True):
            assert_equal(one, other)
    assert server.version == 6
    assert not torch.equal(found[0][1][-1]["0.weight"], found[2][1][-1]["0.weight"])

"""Test that each node has a separate random number generator with the same values as the CPU's generator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from support.optional_packages import optional

from flowchan.pipelines import RemoteNodes

torch = optional("torch")


@pytest.fixture(scope="module")
def nodes(two_nodes: RemoteNodes) -> RemoteNodes:
    return two_nodes


DRAWS: dict[str, Callable[[Any], Any]] = {
    "rand": lambda device: torch.rand(5, device=device),
    "randn": lambda device: torch.randn(3, 7, device=device),
    "randint": lambda device: torch.randint(100, (5,), device=device),
    "randperm": lambda device: torch.randperm(9, device=device),
    "normal": lambda device: torch.normal(0.0, 2.0, (5,), device=device),
    "bernoulli": lambda device: torch.full((9,), 0.4, device=device).bernoulli(),
    "uniform_": lambda device: torch.empty(5, device=device).uniform_(2, 3),
    "multinomial": lambda device: torch.ones(5, device=device).multinomial(3),
    "rand_like": lambda device: torch.rand_like(torch.empty(5, device=device)),
    "kaiming": lambda device: torch.nn.Linear(3, 4, device=device).weight.detach(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_seeded_values_equal_local_ones(nodes: RemoteNodes, name: str) -> None:
    torch.manual_seed(5)
    found = [DRAWS[name](device).cpu() for device in nodes]
    torch.manual_seed(5)
    expected = DRAWS[name]("cpu")
    assert all(torch.equal(one, expected) for one in found)


def test_draws_on_one_node_do_not_affect_other_generators(nodes: RemoteNodes) -> None:
    torch.manual_seed(5)
    torch.rand(100, device=nodes[0])
    other, local = torch.rand(3, device=nodes[1]), torch.rand(3)
    assert torch.equal(other.cpu(), local)


def test_manual_seed_of_the_module_seeds_one_node(nodes: RemoteNodes) -> None:
    torch.manual_seed(1)
    with nodes[0]:
        torch.remote.set_device(nodes[0])
        torch.remote.manual_seed(2)
    found = [torch.rand(3, device=device).cpu() for device in nodes]
    for seed, one in zip((2, 1), found, strict=True):
        torch.manual_seed(seed)
        assert torch.equal(one, torch.rand(3))


def test_generator_state_restores_values(nodes: RemoteNodes) -> None:
    state = torch.remote.get_rng_state(nodes[1])
    first = torch.rand(3, device=nodes[1]).cpu()
    torch.remote.set_rng_state(state, nodes[1])
    assert torch.equal(torch.rand(3, device=nodes[1]).cpu(), first)
    torch.remote.set_rng_state(state, nodes[0])
    assert torch.equal(torch.rand(3, device=nodes[0]).cpu(), first)


def test_forked_generators_are_restored(nodes: RemoteNodes) -> None:
    torch.manual_seed(1)
    with torch.random.fork_rng([one.index for one in nodes], device_type="remote"):
        torch.manual_seed(2)
        torch.rand(9, device=nodes[1])
    found = torch.rand(3, device=nodes[1]).cpu()
    torch.manual_seed(1)
    assert torch.equal(found, torch.rand(3))


def test_local_generator_for_a_remote_draw_is_refused(nodes: RemoteNodes) -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(RuntimeError, match=r"[Gg]enerator.*torch\.remote\.manual_seed"):
        torch.rand(3, device=nodes[0], generator=generator)
    with pytest.raises(RuntimeError, match=r"[Gg]enerator.*torch\.remote\.manual_seed"):
        torch.empty(3, device=nodes[0]).normal_(generator=generator)


def test_copied_module_draws_the_same_dropout(nodes: RemoteNodes) -> None:
    module = torch.nn.Dropout(0.5)
    torch.manual_seed(1)
    found = copy.deepcopy(module).to(nodes[0])(torch.ones(20, device=nodes[0])).cpu()
    torch.manual_seed(1)
    assert torch.equal(found, module(torch.ones(20)))

"""Test that training on a node matches local training bit for bit, and never waits."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import pytest
from support.optional_packages import optional
from training_cases import MODELS, OPTIMIZERS, STEPS, assert_same, made, train, trained

from flowchan.pipelines import RemoteNodes

torch = optional("torch")
DEFINING_STEPS = 2
"""Number of steps after which all templates exist. An optimizer creates its state in its first step."""


@pytest.fixture(scope="module")
def nodes(two_nodes: RemoteNodes) -> RemoteNodes:
    return two_nodes


def misses(nodes: RemoteNodes) -> int:
    return sum(one.misses for one in nodes.stats())


class CountedSteps:
    """Context that forbids waiting and counts the template misses of each step."""

    def __init__(self, nodes: RemoteNodes) -> None:
        self.nodes, self.misses = nodes, [0]

    def __enter__(self) -> None:
        self.nodes.strict("error")
        self.misses = [misses(self.nodes)]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.nodes.strict("off")

    def after_step(self, step: int) -> None:
        self.misses.append(misses(self.nodes))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_training_on_a_node_equals_local_training(nodes: RemoteNodes, kind: str, optimizer: str) -> None:
    steps = CountedSteps(nodes)
    found = trained(kind, optimizer, nodes[1], steps)
    assert_same(found, trained(kind, optimizer, "cpu"))
    assert len(steps.misses) == STEPS + 1
    assert steps.misses[DEFINING_STEPS:] == [steps.misses[-1]] * (STEPS - DEFINING_STEPS + 1)


def test_default_optimizer_equals_local_training(nodes: RemoteNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "default", lambda parameters: torch.optim.Adam(parameters))
    assert_same(trained("mlp", "default", nodes[0]), trained("mlp", "default", "cpu"))


def test_training_resumes_on_another_node_from_saved_state(nodes: RemoteNodes) -> None:
    expected = trained("mlp", "adam", "cpu")
    model, batches = made("mlp")
    model.to(nodes[0])
    optimizer = OPTIMIZERS["adam"](model.parameters())
    torch.manual_seed(1)
    losses = train(model, batches[:10], optimizer, nodes[0])
    generator = torch.remote.get_rng_state(nodes[0])
    other, _ = made("mlp", seed=5)
    other.to(nodes[1]).load_state_dict(model.state_dict())
    resumed = OPTIMIZERS["adam"](other.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    torch.remote.set_rng_state(generator, nodes[1])
    losses += train(other, batches[10:], resumed, nodes[1])
    assert all(torch.equal(loss.cpu(), expected[f"loss {step}"]) for step, loss in enumerate(losses))
    assert all(torch.equal(value.cpu(), expected[name]) for name, value in other.state_dict().items())


def test_data_loader_feeds_a_node(nodes: RemoteNodes) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    seen = [(x.to(nodes[1]), y.to(nodes[1], non_blocking=True)) for x, y in loader]
    assert torch.equal(torch.cat([x for x, _ in seen]).cpu(), data.tensors[0])
    assert torch.equal(torch.cat([y for _, y in seen]).cpu(), data.tensors[1])


@pytest.mark.parametrize("kind", MODELS)
def test_evaluation_equals_local_evaluation(nodes: RemoteNodes, kind: str) -> None:
    model, batches = made(kind)
    model.eval()
    with torch.no_grad():
        expected = model(batches[0][0])
        found = model.to(nodes[0])(batches[0][0].to(nodes[0])).cpu()
    with torch.inference_mode():
        inferred = model(batches[0][0].to(nodes[0])).cpu()
    assert torch.equal(found, expected)
    assert torch.equal(inferred, expected)


def test_clipped_gradients_equal_local_ones(nodes: RemoteNodes) -> None:
    results: list[Any] = []
    for device in ("cpu", nodes[1]):
        model, batches = made("conv")
        model.to(device)
        x, target = batches[0]
        torch.nn.functional.cross_entropy(model(x.to(device)), target.to(device)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        results.append([norm.cpu(), *(parameter.grad.cpu() for parameter in model.parameters())])
    assert all(map(torch.equal, *results))

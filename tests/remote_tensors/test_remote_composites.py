"""Test that recurrent layers, dropout and attention on a node match the CPU's values and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.optional_packages import optional

from flowchan.pipelines import RemoteNodes

torch = optional("torch")
LENGTHS = (4, 4, 2, 1)


@pytest.fixture(scope="module")
def nodes(two_nodes: RemoteNodes) -> RemoteNodes:
    return two_nodes


def values(function: Any, arguments: list[Any], device: Any) -> list[Any]:
    """Call ``function`` on ``device``, with and without gradients. Return results and gradients on the
    CPU."""
    moved = [one.detach().to(device).requires_grad_(one.is_floating_point()) for one in arguments]
    torch.manual_seed(3)
    results = function(*moved)
    weights = [torch.arange(float(one.numel())).reshape(one.shape).cos().to(device) for one in results]
    sum((one * weight).sum() for one, weight in zip(results, weights, strict=True)).backward()
    torch.manual_seed(3)
    with torch.no_grad():
        again = function(*moved)
    return [one.cpu() for one in (*results, *again)] + [
        one.grad.cpu() for one in moved if one.grad is not None
    ]


def assert_equal_on_node(nodes: RemoteNodes, function: Any, arguments: list[Any]) -> None:
    expected = values(function, arguments, "cpu")
    found = values(function, arguments, nodes[0])
    assert len(found) == len(expected)
    assert [torch.equal(*both) for both in zip(found, expected, strict=True)] == [True] * len(found)


def module_values(module: Any, inputs: list[Any], device: Any) -> list[Any]:
    """Call a copy of ``module`` on ``device`` in the same way. Also return the gradients of its
    parameters."""
    moved = copy.deepcopy(module).to(device)
    found = values(lambda *given: flat(moved(*given)), inputs, device)
    return found + [parameter.grad.cpu() for parameter in moved.parameters()]


def flat(result: Any) -> list[Any]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, torch.nn.utils.rnn.PackedSequence):
        return [result.data]
    return [one for part in result for one in flat(part)]


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("LSTM", {}),
    ("LSTM", {"num_layers": 2, "dropout": 0.3, "bidirectional": True, "batch_first": True}),
    ("LSTM", {"bias": False}),
    ("LSTM", {"proj_size": 3, "bidirectional": True}),
    ("LSTM", {"dtype": torch.float64, "num_layers": 2}),
    ("GRU", {}),
    ("GRU", {"num_layers": 2, "dropout": 0.3, "bidirectional": True, "batch_first": True}),
    ("RNN", {"num_layers": 2, "bias": False}),
    ("RNN", {"nonlinearity": "relu", "bidirectional": True}),
]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_recurrent_layer_matches_the_cpu(nodes: RemoteNodes, kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = getattr(torch.nn, kind)(5, 7, **options)
    inputs = [torch.randn(4, 3, 5, dtype=options.get("dtype"))]
    expected, found = (module_values(module, inputs, device) for device in ("cpu", nodes[0]))
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_packed_sequences_match_the_cpu(nodes: RemoteNodes, kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = getattr(torch.nn, kind)(5, 7, **options)
    inputs = [torch.randn(length, 5, dtype=options.get("dtype")) for length in LENGTHS]

    def results(device: Any) -> list[Any]:
        moved = copy.deepcopy(module).to(device)
        run = lambda *given: flat(moved(torch.nn.utils.rnn.pack_sequence(list(given))))  # noqa: E731
        return values(run, inputs, device) + [parameter.grad.cpu() for parameter in moved.parameters()]

    assert all(map(torch.equal, results(nodes[0]), results("cpu")))


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_recurrent_cell_matches_the_cpu(nodes: RemoteNodes, kind: str) -> None:
    torch.manual_seed(0)
    module, inputs = getattr(torch.nn, kind)(5, 7), [torch.randn(3, 5)]
    expected, found = (module_values(module, inputs, device) for device in ("cpu", nodes[0]))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("name", ["dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d"])
def test_dropout_matches_the_cpu(nodes: RemoteNodes, name: str, p: float) -> None:
    function = getattr(torch.nn.functional, name)
    assert_equal_on_node(nodes, lambda x: [function(x, p, True)], [torch.randn(5, 4, 3)])


@pytest.mark.parametrize(
    "case", ["plain", "causal", "float mask", "bool mask", "dropout", "scale", "grouped"]
)
def test_attention_matches_the_cpu(nodes: RemoteNodes, case: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 33, 8) for _ in range(3))
    options: dict[str, Any] = {
        "causal": {"is_causal": True},
        "dropout": {"dropout_p": 0.2},
        "scale": {"scale": 0.3},
        "grouped": {"enable_gqa": True},
    }.get(case, {})
    if case == "grouped":
        key, value = key[:, :2], value[:, :2]
    masks = {"float mask": torch.randn(33, 33), "bool mask": torch.rand(33, 33).gt(0.3).fill_diagonal_(True)}
    mask = [masks[case]] if case in masks else []

    def attend(*given: Any) -> list[Any]:
        return [torch.nn.functional.scaled_dot_product_attention(*given, **options)]

    assert_equal_on_node(nodes, attend, [query, key, value, *mask])


def test_multi_head_attention_returns_equal_weights(nodes: RemoteNodes) -> None:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)

    def attend(device: Any) -> list[Any]:
        moved = copy.deepcopy(module).to(device)
        return values(lambda given: moved(given, given, given), [x], device)

    assert all(map(torch.equal, attend(nodes[0]), attend("cpu")))

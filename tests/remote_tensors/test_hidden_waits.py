"""Test the strict mode, which reports hidden waits for a node."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.optional_packages import optional

torch = optional("torch")
pytestmark = pytest.mark.usefixtures("one_compute_thread")

WAIT_S = 60


@pytest.fixture
def strict_nodes(two_nodes: Any) -> Iterator[Any]:
    """Provide nodes. Turn their strict mode off after the test."""
    yield two_nodes
    two_nodes.strict("off")


HIDDEN: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "if": lambda x: 1 if x[0] > 0 else 2,
    "tolist": lambda x: x.tolist(),
    "repr": lambda x: repr(x),
    "str": lambda x: str(x),
    "format": lambda x: f"{x[0]:.2f}",
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 1),
    "index by mask": lambda x: x[x > 1],
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x),
}

NOT_HIDDEN: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: x * 2 + 1,
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "copy into local": lambda x: torch.empty(3).copy_(x),
    "upload": lambda x: torch.ones(3).to(x.device),
    "in-place": lambda x: x.clone().add_(1),
    "iteration": lambda x: list(x),
    "length": lambda x: len(x),
    "shape": lambda x: x.shape,
    "synchronize": lambda x: torch.remote.synchronize(x.device),
    "event": lambda x: torch.remote.current_stream(x.device).record_event().synchronize(),
    "where with three arguments": lambda x: torch.where(x > 1, x, 0.0),
    "softmax": lambda x: x.softmax(0),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_hidden_wait_warns_with_the_users_line(strict_nodes: Any, what: str) -> None:
    function = HIDDEN[what]
    x = torch.tensor([1.0, 2.0, 3.0]).to(strict_nodes[0])
    strict_nodes.strict("warn")
    with pytest.warns(RuntimeWarning, match="waits for") as caught:
        function(x)
    assert {(one.filename, one.lineno) for one in caught} == {(__file__, line_of(function))}
    assert str(strict_nodes[0]) in str(caught[0].message)


@pytest.mark.parametrize("what", HIDDEN)
def test_hidden_wait_raises_at_the_users_line(strict_nodes: Any, what: str) -> None:
    function = HIDDEN[what]
    x = torch.tensor([1.0, 2.0, 3.0]).to(strict_nodes[0])
    strict_nodes.strict("error")
    with pytest.raises(RuntimeError, match="waits for") as caught:
        function(x)
    assert any(
        str(entry.path) == __file__ and entry.lineno + 1 == line_of(function) for entry in caught.traceback
    )
    strict_nodes.strict("off")
    function(x)
    assert x.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("what", NOT_HIDDEN)
def test_explicit_wait_and_asynchronous_calls_pass_in_strict_mode(strict_nodes: Any, what: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0]).to(strict_nodes[0])
    strict_nodes.strict("error")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NOT_HIDDEN[what](x)
        strict_nodes.sync(WAIT_S)


def test_copy_to_another_node_does_not_count_as_wait(strict_nodes: Any) -> None:
    strict_nodes.strict("error")
    x = torch.ones(3, device=strict_nodes[0])
    y = torch.zeros(3, device=strict_nodes[1]).copy_(x) + x.to(strict_nodes[1])
    assert y.cpu().tolist() == [2.0] * 3


def test_strict_mode_applies_only_to_the_nodes_that_set_it(strict_nodes: Any) -> None:
    from flowchan.pipelines import RemoteNodes

    strict_nodes.strict("error")
    with RemoteNodes(1) as others:
        assert torch.ones(2, device=others[0]).tolist() == [1.0, 1.0]


def test_strict_rejects_unknown_modes(strict_nodes: Any) -> None:
    with pytest.raises(ValueError, match="strict: mode must be 'off', 'warn' or 'error', got 'raise'"):
        strict_nodes.strict("raise")


def test_stats_count_waits(strict_nodes: Any) -> None:
    x = torch.ones(3, device=strict_nodes[0])
    before = strict_nodes.stats()[0].waits
    for _ in range(3):
        x.sum().item()
    assert strict_nodes.stats()[0].waits - before >= 3
    assert strict_nodes.stats()[1].node == 1


def line_of(function: Callable[..., Any]) -> int:
    return inspect.unwrap(function).__code__.co_firstlineno

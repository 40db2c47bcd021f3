"""Run a backward pass in two halves.

The first half computes the gradients of the inputs, which the previous part is waiting for. The second half
computes the gradients of the weights.

In autograd's graph, a linear layer ``y = x @ w.T + b`` is one node. The node receives the gradient of ``y``
and computes only those gradients of ``x``, ``w`` and ``b`` that are requested. The first half requests only
the inputs. A fork is a node with one path to the inputs and another to weights. At each fork, the first half
records the arriving gradient. The second half starts at the forks with the recorded gradients, and requests
the weights that can be reached without passing through another fork. Nothing is computed twice. ::

    loss ──> [node] ──────────> [node] ─────────> inputs      first half: along here
                └──> weights       └──> weights               second half: from each node down

Some weights get their gradients in the first half. A node that is a Python function would otherwise compute
everything twice. Nodes that share a weight cannot be split, because one node's path to the weight may lead
through another node. Hooks on tensors inside a layer are called in both halves, but take effect only once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

Gradients = tuple[Tensor | None, ...]


class SplitBackward:
    """Backward pass from ``roots`` to the leaves ``inputs`` and to all weights, in two halves.

    ``given`` lists the gradients of the roots, or is ``None`` if the roots are losses. :meth:`first` adds to
    the ``grad`` of the inputs, and :meth:`second` adds to the ``grad`` of the weights.
    """

    def __init__(
        self, roots: Sequence[Tensor], given: Sequence[Tensor] | None, inputs: Sequence[Tensor]
    ) -> None:
        self._roots = [
            (root, given[place] if given is not None else None) for place, root in enumerate(roots)
        ]
        self._inputs = list(inputs)
        leads = _leading((root.grad_fn for root in roots), {id(one) for one in inputs})
        self._aside = [
            (root, own) for root, own in self._roots if root.grad_fn is None or not leads[root.grad_fn]
        ]
        own_inputs = {id(one) for one in inputs}
        self._aside = [(root, own) for root, own in self._aside if id(root) not in own_inputs]
        self._forks, self._at_once = _forks(leads)

    def first(self) -> None:
        """Compute the gradients of the inputs, and of all weights that cannot be computed separately."""
        requested = [*self._inputs, *self._at_once]
        if not requested:
            return
        for fork in self._forks:
            fork.listen()
        _back(self._roots, requested, keep=True)

    def second(self) -> None:
        """Compute the gradients of the remaining weights."""
        at_once = {id(one) for one in self._at_once}
        if self._aside:
            weights = _weights(root.grad_fn for root, _ in self._aside)
            weights += [root for root, _ in self._aside if root.grad_fn is None]
            _back(self._aside, [one for one in weights if id(one) not in at_once])
        for fork in self._forks:
            fork.go_back()


@dataclass(slots=True)
class _Fork:
    """Node with paths that lead to the inputs, and other paths that lead only to ``weights``."""

    node: Node
    weights: list[Tensor]
    recorded: list[Gradients] = field(default_factory=list)
    listening: Any = None

    def listen(self) -> None:
        # The hook must not refer to the fork, because the garbage collector cannot free a cycle through the
        # node.
        recorded = self.recorded

        def hook(gradients: Gradients) -> Gradients | None:
            # In the second half, return the recorded gradients, which already include the effect of the
            # tensor's hooks.
            if recorded:
                return recorded[0]
            recorded.append(gradients)
            return None

        self.listening = self.node.register_prehook(hook)

    def go_back(self) -> None:
        if self.recorded:
            roots = [
                (GradientEdge(self.node, place), gradients)
                for place, gradients in enumerate(self.recorded[0])
                if gradients is not None
            ]
            _back(roots, self.weights)
        if self.listening is not None:
            self.listening.remove()


def _back(roots: Iterable[tuple[Any, Tensor | None]], requested: list[Tensor], keep: bool = False) -> None:
    pairs = list(roots)
    if pairs and requested:
        starts, given = zip(*pairs, strict=True)
        torch.autograd.backward(starts, given, retain_graph=keep, inputs=requested)


def _leading(roots: Iterable[Node | None], inputs: set[int]) -> dict[Node, bool]:
    """Return, for each node of the graph, whether it leads to one of the inputs."""
    leads: dict[Node, bool] = {}
    waiting = [root for root in roots if root is not None]
    while waiting:
        node = waiting[-1]
        following = _following(node)
        unknown = [one for one in following if one not in leads]
        if node not in leads and unknown:
            waiting += unknown
            continue
        waiting.pop()
        leads[node] = id(_variable(node)) in inputs or any(leads[one] for one in following)
    return leads


def _forks(leads: dict[Node, bool]) -> tuple[list[_Fork], list[Tensor]]:
    """Return the forks whose weights can be left to the second half, and the weights that cannot."""
    forks = [
        _Fork(node, _weights(one for one in _following(node) if not leads[one]))
        for node, leads_on in leads.items()
        if leads_on
    ]
    uses = Counter(id(one) for fork in forks for one in fork.weights)
    inseparable = {
        id(one): one for fork in forks for one in fork.weights if uses[id(one)] > 1 or not _allows(fork.node)
    }
    for fork in forks:
        fork.weights = [one for one in fork.weights if id(one) not in inseparable]
    return [fork for fork in forks if fork.weights], list(inseparable.values())


def _allows(node: Node) -> bool:
    return _starts_at_nodes() and not isinstance(node, torch.autograd.function.BackwardCFunction)


@cache
def _starts_at_nodes() -> bool:
    """Return True if this version of torch can start a backward pass inside a graph."""
    one = torch.ones(1, requires_grad=True)
    root = (one * 2).grad_fn
    assert root is not None
    try:
        torch.autograd.backward([GradientEdge(root, 0)], [torch.ones(1)], inputs=[one])
    except (AttributeError, TypeError, RuntimeError):
        return False
    return one.grad is not None


def _weights(nodes: Iterable[Node | None]) -> list[Tensor]:
    """Return the leaves that can be reached from the nodes."""
    found: dict[int, Tensor] = {}
    waiting = [node for node in nodes if node is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        variable = _variable(node)
        if variable is not None:
            found[id(variable)] = variable
        fresh = [one for one in _following(node) if one not in seen]
        seen.update(fresh)
        waiting += fresh
    return list(found.values())


def _variable(node: Node) -> Tensor | None:
    """Return the leaf for which a node accumulates gradients, or ``None`` for any other node."""
    return getattr(node, "variable", None) if node.name().endswith("AccumulateGrad") else None


def _following(node: Node) -> list[Node]:
    return [one for one, _ in node.next_functions if one is not None]

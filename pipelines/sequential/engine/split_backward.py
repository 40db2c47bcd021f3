"""A backward pass in two halves: the gradients of the inputs first, for the part before waits for them, and
those of the weights whenever there is time.

autograd's graph of a linear layer ``y = x @ w.T + b`` has one node that gets the gradient of ``y`` and makes
those of ``x``, ``w`` and ``b``, as many of them as are asked for. So the first half asks for the inputs only,
and notes what came to each such node, where a way to the inputs and one to weights part. The second half
starts again at these nodes, with what was noted, and asks for the weights that are reached from there without
meeting another one. Nothing is computed twice. ::

    loss ──> [node] ──────────> [node] ─────────> inputs      first half: along here
                └──> weights       └──> weights               second half: from each node down

A node that doesn't allow it makes the gradients of its weights in the first half: a function written in
Python, which would compute everything both times. So do nodes that share a weight, for one's way to it may
lead through another. Hooks of tensors within a layer are called in both halves, and count once.
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
    """The backward pass from ``roots``, with their gradients ``given`` or as losses, to the leaves ``inputs``
    and to all weights. Adds to the ``grad`` of both: :meth:`first` to that of the inputs, :meth:`second` to
    that of the weights."""

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
        """The gradients of the inputs, and of the weights of nodes that do both at once."""
        asked = [*self._inputs, *self._at_once]
        if not asked:
            return
        for fork in self._forks:
            fork.listen()
        _back(self._roots, asked, keep=True)

    def second(self) -> None:
        """The gradients of the weights."""
        at_once = {id(one) for one in self._at_once}
        if self._aside:
            weights = _weights(root.grad_fn for root, _ in self._aside)
            weights += [root for root, _ in self._aside if root.grad_fn is None]
            _back(self._aside, [one for one in weights if id(one) not in at_once])
        for fork in self._forks:
            fork.go_back()


@dataclass(slots=True)
class _Fork:
    """A node from which some ways lead to the inputs, and others only to ``weights``."""

    node: Node
    weights: list[Tensor]
    noted: list[Gradients] = field(default_factory=list)
    listening: Any = None

    def listen(self) -> None:
        # The node must not know the fork, which knows the node: nobody would collect that circle.
        noted = self.noted

        def hook(came: Gradients) -> Gradients | None:
            if noted:  # the second half; hooks of the tensor have changed what was noted once already
                return noted[0]
            noted.append(came)
            return None

        self.listening = self.node.register_prehook(hook)

    def go_back(self) -> None:
        if self.noted:
            roots = [
                (GradientEdge(self.node, place), came)
                for place, came in enumerate(self.noted[0])
                if came is not None
            ]
            _back(roots, self.weights)
        if self.listening is not None:
            self.listening.remove()


def _back(roots: Iterable[tuple[Any, Tensor | None]], asked: list[Tensor], keep: bool = False) -> None:
    pairs = list(roots)
    if pairs and asked:
        starts, given = zip(*pairs, strict=True)
        torch.autograd.backward(starts, given, retain_graph=keep, inputs=asked)


def _leading(roots: Iterable[Node | None], inputs: set[int]) -> dict[Node, bool]:
    """For each node of the graph whether it leads to one of the inputs."""
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
    """The nodes whose weights can wait, and the weights that can't."""
    forks = [
        _Fork(node, _weights(one for one in _following(node) if not leads[one]))
        for node, way in leads.items()
        if way
    ]
    uses = Counter(id(one) for fork in forks for one in fork.weights)
    here = {
        id(one): one for fork in forks for one in fork.weights if uses[id(one)] > 1 or not _allows(fork.node)
    }
    for fork in forks:
        fork.weights = [one for one in fork.weights if id(one) not in here]
    return [fork for fork in forks if fork.weights], list(here.values())


def _allows(node: Node) -> bool:
    return _starts_at_nodes() and not isinstance(node, torch.autograd.function.BackwardCFunction)


@cache
def _starts_at_nodes() -> bool:
    """Whether this torch lets a backward pass begin within a graph."""
    one = torch.ones(1, requires_grad=True)
    root = (one * 2).grad_fn
    assert root is not None
    try:
        torch.autograd.backward([GradientEdge(root, 0)], [torch.ones(1)], inputs=[one])
    except (AttributeError, TypeError, RuntimeError):
        return False
    return one.grad is not None


def _weights(nodes: Iterable[Node | None]) -> list[Tensor]:
    """The leaves that are reached from some nodes."""
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
    """The leaf behind a node that adds to its ``grad``."""
    return getattr(node, "variable", None) if node.name().endswith("AccumulateGrad") else None


def _following(node: Node) -> list[Node]:
    return [one for one, _ in node.next_functions if one is not None]

"""Helpers for the training tests: models, batches, and plain training as the reference."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support.waiting import wait_blocked
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam

from flowchan import Channel
from flowchan.pipelines.sequential import Sequential
from flowchan.pipelines.sequential.training import Training

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "adam": partial(Adam, lr=0.01),
}

schedules = pytest.mark.parametrize(
    ("schedule", "parts", "workers"),
    [
        ("gpipe", 3, 3),
        ("1f1b", 3, 3),
        ("interleaved", 4, 2),
        ("interleaved", 5, 2),
        ("interleaved", 3, 1),
        ("zbh1", 3, 3),
        ("zbv", 4, 2),
        ("dualpipev", 4, 2),
        ("1f1b", 1, 1),
    ],
)
"""All schedules with their numbers of parts and workers, and the smallest pipe."""


def perceptron(seed: int = 0) -> nn.Sequential:
    """Return nine layers, for samples of 6 numbers and for 4 classes."""
    torch.manual_seed(seed)
    sizes = [6, 16, 12, 12, 4]
    layers: list[nn.Module] = []
    for size, following in itertools.pairwise(sizes):
        layers += [nn.Linear(size, following), nn.Tanh()]
    return nn.Sequential(*layers[:-1], nn.Identity(), nn.Identity())


def batches(sizes: Iterable[int], seed: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches for :func:`perceptron`."""
    generator = torch.Generator().manual_seed(seed)
    for size in sizes:
        yield torch.randn(size, 6, generator=generator), torch.randint(4, (size,), generator=generator)


def train_plainly(
    module: nn.Module,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    data: Iterable[tuple[Any, Tensor]],
    clip: float | None = None,
) -> tuple[nn.Module, list[float]]:
    """Train a copy of the module with a plain loop, and return the copy and its losses."""
    module = copy.deepcopy(module)
    made = optimizer(module.parameters())
    losses = []
    for x, target in data:
        made.zero_grad()
        loss = cross_entropy(module(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        made.step()
        losses.append(float(loss.detach()))
    return module, losses


class Blocker:
    """Object that blocks workers in any thread or process until it is opened."""

    def __init__(self) -> None:
        self.channel: Channel[Any] = Channel(1, across="processes")

    def wait(self) -> None:
        for _ in self.channel:
            raise AssertionError("nothing is ever put into a blocker")

    def wait_held(self) -> None:
        wait_blocked(self.channel, readers=1)

    def open(self) -> None:
        self.channel.close()


def in_parts(
    module: nn.Sequential, parts: int, on: Any = "thread", chunks: int = 4, **options: Any
) -> Training:
    """Return a trainer for a module, with cross entropy and one part per worker."""
    options.setdefault("loss", cross_entropy)
    options.setdefault("schedule", "1f1b")
    return Sequential(module, parts, on=on, chunks=chunks).trainer(**options)


def assert_same_state(module: nn.Module, plain: nn.Module, **tolerance: Any) -> None:
    """Assert that parameters and buffers have the same keys in the same order, and nearly equal values."""
    state, other = module.state_dict(), plain.state_dict()
    assert list(state) == list(other)
    for name in state:
        torch.testing.assert_close(
            state[name], other[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )

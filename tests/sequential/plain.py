"""Plain modules, their outputs for micro-batches, and a layer that calls a given function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

on_both_placements = pytest.mark.parametrize("on", ["thread", "process"])
"""Run a test on threads and on processes."""


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    ).eval()


def conv() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 5),
    ).eval()


def plain(module: nn.Sequential, x: Tensor, chunks: int = 8) -> Tensor:
    """Return the module's outputs for the micro-batches, computed one at a time."""
    with torch.no_grad():
        return torch.cat([module(piece) for piece in x.tensor_split(min(chunks, len(x)))])


def is_same(y: Tensor, expected: Tensor, on: str) -> bool:
    """Compare two outputs, bit for bit on threads, and within a tolerance on processes.

    In a worker process, tensors have other addresses, and torch's kernels may round differently for another
    alignment.
    """
    return torch.equal(y, expected) if on == "thread" else torch.allclose(y, expected, rtol=1e-5, atol=1e-6)


class Watched(nn.Module):
    """Layer that calls a function with each micro-batch that has values; works only on threads."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta":
            self.function(x)
        return x

"""Create readers of ``Weights`` and compare states, for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from flowchan.pipelines import Weights, WeightsReader

everywhere = pytest.mark.parametrize("where", ["here", "remote"])
"""Run a test with a reader on the trainer's machine, and with a reader that gets weights over a channel."""


def reader_of(weights: Weights, where: str) -> WeightsReader:
    """Return a reader. A remote reader behaves as if it ran on another machine."""
    reader = weights.reader()
    if where == "remote":
        reader._source = dataclasses.replace(reader._source, machine="another machine")
    return reader


def remote_reader(weights: Weights) -> WeightsReader:
    return reader_of(weights, "remote")


def equal_bits(one: Any, other: Any) -> bool:
    """Return whether two states have the same names, dtypes, shapes and bytes."""
    return {name: _form(value) for name, value in one.items()} == {
        name: _form(value) for name, value in other.items()
    }


def _form(value: Any) -> tuple[Any, ...]:
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    import torch

    flat = value.detach().contiguous().reshape(-1)
    return str(value.dtype), tuple(value.shape), bytes(flat.view(torch.uint8).tolist())

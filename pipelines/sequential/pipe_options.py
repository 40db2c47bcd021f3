"""Define the options of :class:`Sequential`: their types, defaults and ``help`` entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch

from flowchan.declare.placements import Placement


class SequentialOptions(TypedDict, total=False):
    """Keyword options of a pipe."""

    on: Literal["thread", "process"] | Placement
    """``"thread"`` (default), ``"process"`` (with shared parameters), or a host pool (with copies)."""
    chunks: int | None
    """Micro-batches per call or training step (default: at most 8, each large enough to be worthwhile)."""
    balance: Literal["time", "memory"] | None
    """Cost to distribute evenly, ``"time"`` or ``"memory"`` (default: time, with the first batch)."""
    sample: Any
    """A typical batch on which ``balance`` measures the layers (default: none)."""
    param_scale: float
    """With ``"memory"``: factor by which to multiply the parameters' size in bytes (default: 1)."""
    devices: Sequence[torch.device | str] | None
    """One device per part. Inputs are moved to the part's device (default: where the layers are)."""
    recompute: bool
    """Whether the backward pass recomputes activations instead of keeping them (default: False)."""
    deferred_batch_norm: bool
    """Whether running statistics cover whole batches (True, the default) or micro-batches."""
    dim: int
    """Batch dimension of inputs and outputs (default: 0)."""
    join: Callable[[list[Any]], Any] | None
    """Function that combines the list of micro-batch outputs (default: concatenation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialSettings:
    """Values of the options of one pipe."""

    on: Literal["thread", "process"] | Placement = "thread"
    chunks: int | None = None
    balance: Literal["time", "memory"] | None = None
    sample: Any = None
    param_scale: float = 1.0
    devices: Sequence[torch.device | str] | None = None
    recompute: bool = False
    deferred_batch_norm: bool = True
    dim: int = 0
    join: Callable[[list[Any]], Any] | None = None

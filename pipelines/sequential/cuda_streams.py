"""Synchronise the caller's CUDA streams with the workers' streams, which are the default streams.

A program may call a pipe under ``torch.cuda.stream(…)``. Without these waits, a worker could read a tensor
before the caller's stream has computed it. The caller's stream could also read an output too early. The waits
are on the device; the calling thread does not block. ``record_stream`` keeps the memory of a tensor until the
other stream has used it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flowchan.pipelines.sequential.tensor_trees import tensors


def to_workers(value: Any) -> None:
    """Make the default streams wait for the current streams, which compute the tensors of ``value``."""
    for tensor, current, default in _on_other_streams(value):
        default.wait_stream(current)
        tensor.record_stream(default)


def from_workers(value: Any) -> None:
    """Make the current streams wait for the default streams, which compute the tensors of ``value``."""
    for tensor, current, default in _on_other_streams(value):
        current.wait_stream(default)
        tensor.record_stream(current)


def _on_other_streams(value: Any) -> Iterator[tuple[Tensor, torch.cuda.Stream, torch.cuda.Stream]]:
    """Yield each CUDA tensor whose device has a current stream other than its default stream."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    for tensor in tensors(value):
        if tensor.is_cuda:
            current, default = (
                torch.cuda.current_stream(tensor.device),
                torch.cuda.default_stream(tensor.device),
            )
            if current != default:
                yield tensor, current, default

"""Treat NumPy arrays and torch tensors alike, and import each library only when it is needed."""

from __future__ import annotations

import sys
import warnings
from typing import Any


def is_tensor(value: Any) -> bool:
    """Return whether the value is a torch tensor."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_tensor(array: Any) -> Any:
    """Return a tensor that shares an array's memory, or return a tensor unchanged."""
    if is_tensor(array):
        return array
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # a received array is read-only, and rules never write to it
        return torch.from_numpy(array)


def as_kind(value: Any, like: Any) -> Any:
    """Return the value as a tensor if ``like`` is a tensor, else as an array, without copying."""
    if is_tensor(like):
        return as_tensor(value)
    return value.numpy() if is_tensor(value) else value


def as_array(value: Any) -> Any:
    """Return a tensor as an array without copying, or the value itself if it has no such array."""
    try:
        return value.numpy() if is_tensor(value) else value
    except (TypeError, RuntimeError):  # NumPy lacks the element type, or the tensor is conjugated
        return value


def copy(value: Any, out: Any) -> None:
    """Copy an array into an array, or a tensor into a tensor."""
    if out is value:
        return
    if is_tensor(out):
        out.copy_(value)
    else:
        out[...] = value


def dtype_name(dtype: Any) -> str:
    """Return the name of a torch or NumPy element type, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def is_inexact(dtype: Any) -> bool:
    """Return whether an element type is floating-point or complex."""
    return dtype_name(dtype).startswith(("float", "bfloat", "complex"))

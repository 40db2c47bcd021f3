"""Copy a received message into the caller's tensor or array."""

from __future__ import annotations

import sys
from typing import Any


def fill(call: str, into: Any, message: Any) -> None:
    """Copy a message into a tensor or an array. Error messages begin with ``call``, a method's name."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kinds = tuple(kind for kind in (torch and torch.Tensor, numpy and numpy.ndarray) if kind)
    if not isinstance(into, kinds):
        raise TypeError(f"{call}: into must be a tensor or an array, got {type(into).__name__}")
    if not isinstance(message, type(into)) and not isinstance(into, type(message)):
        raise ValueError(
            f"{call}: into must be of the same type as the message ({type(message).__name__}), got "
            f"{type(into).__name__}"
        )
    expected, received = (into.dtype, tuple(into.shape)), (message.dtype, tuple(message.shape))
    if expected != received:
        raise ValueError(
            f"{call}: into must have dtype {received[0]} and shape {received[1]} like the message, got "
            f"{expected[0]} and {expected[1]}"
        )
    if hasattr(into, "copy_"):
        with torch.no_grad():  # type: ignore[union-attr]
            into.copy_(message)
    else:
        into[...] = message

"""Split and join nested values: a tensor or ``None``, or a tuple, list or dictionary of nested values.

All tensors have a batch dimension, by default the first. A batch is split along this dimension into
micro-batches of nearly equal size; the first ones may have one more sample than the others. Outputs are
joined in the same order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowchan.items.text import short, shown


class Inputs(NamedTuple):
    """Positional and keyword arguments of a call that does not have exactly one positional argument."""

    args: tuple[Any, ...]
    named: dict[str, Any]


class Micro(NamedTuple):
    """Micro-batch number ``chunk`` of the ``chunks`` micro-batches of batch number ``batch``.

    ``skips`` are stashed tensors by name, which travel with the value to later parts. ``events`` holds the
    start and end times of each finished part, in seconds of ``time.monotonic()``.
    """

    batch: int
    chunk: int
    chunks: int
    value: Any
    skips: dict[str, Tensor | None]
    events: tuple[tuple[float, float], ...]

    def __repr__(self) -> str:
        return f"micro-batch {self.chunk} of {self.chunks} of batch {self.batch}"


def leaves(value: Any, name: str = "x") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested value with their paths, such as ``x['mask'][0]``."""
    if isinstance(value, Inputs):
        for place, inner in enumerate(value.args):
            yield from leaves(inner, f"argument {place}")
        for key, inner in value.named.items():
            yield from leaves(inner, key)
    elif isinstance(value, (tuple, list)):
        for place, inner in enumerate(value):
            yield from leaves(inner, f"{name}[{place}]")
    elif type(value) in (dict, OrderedDict):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}[{short(key)}]")
    else:
        yield name, value


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a value, in order, without other leaves."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Replace each tensor in a value with ``function(tensor)``; other leaves stay unchanged."""
    if isinstance(value, Tensor):
        return function(value)
    return _together(lambda found: function(found[0]) if isinstance(found[0], Tensor) else found[0], [value])


def split(value: Any, chunks: int, name: str = "x", dim: int = 0) -> list[Any]:
    """Split a value into ``chunks`` micro-batches, but at most one per sample.

    An empty batch is a single micro-batch.

    Raises ``TypeError`` for a leaf that is not a tensor, and ``ValueError`` if the tensors' batch sizes
    differ. The messages contain the path of the leaf.
    """
    samples = batch_size(value, name, dim)
    if chunks == 1:
        return [value]
    sizes = evenly(samples, max(1, min(chunks, samples)))
    # Split each tensor in one operation, so that the backward pass also joins the gradients in one operation.
    pieces = {id(tensor): torch.split(tensor, sizes, dim) for tensor in tensors(value)}

    def piece(number: int, tensor: Tensor) -> Tensor:
        return pieces[id(tensor)][number]

    return [mapped(partial(piece, number), value) for number in range(len(sizes))]


def batch_size(value: Any, name: str = "x", dim: int = 0) -> int:
    """Return the size that all tensors have in dimension ``dim``; raise the same errors as :func:`split`."""
    if isinstance(value, Tensor) and value.dim() > dim:
        return value.shape[dim]
    sizes: dict[str, int] = {}
    for path, leaf in leaves(value, name):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"Sequential: {path} must be a tensor, got {shown(leaf)}; convert arrays with "
                "torch.from_numpy, and keep other values in the module"
            )
        if leaf.dim() == 0:
            raise ValueError(
                f"Sequential: {path} must have a batch dimension, got the scalar {leaf.item()!r}; add a "
                "first dimension"
            )
        if leaf.dim() <= dim:
            raise ValueError(
                f"Sequential: {path} must have dimension {dim}, the batch dimension, got shape "
                f"{tuple(leaf.shape)}"
            )
        sizes[path] = leaf.shape[dim]
    if not sizes:
        raise TypeError(f"Sequential: {name} must contain at least one tensor, got {shown(value)}")
    first, *others = sizes.items()
    for path, size in others:
        if size != first[1]:
            raise ValueError(
                f"Sequential: {path} must have the same batch size as {first[0]} ({first[1]}), got {size}; "
                f"the {'first dimension' if not dim else f'dimension {dim}'} of all tensors must be "
                "equal"
            )
    return first[1]


def without_gradient(value: Any, remedy: str) -> Any:
    """Return the value, or raise ``ValueError`` if a tensor in it requires grad.

    Gradients could not flow past this point.
    """
    if torch.is_grad_enabled():
        for path, leaf in leaves(value):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ValueError(
                    f"Sequential: {path} must not require grad, because gradients cannot flow past the input "
                    f"of the pipe here; {remedy}, or pass {path}.detach()"
                )
    return value


def join(values: list[Any], dim: int = 0) -> Any:
    """Concatenate the tensors of several micro-batches along the batch dimension."""
    if len(values) == 1:
        return values[0]

    def whole(found: list[Any]) -> Any:
        if all(one is None for one in found):
            return None
        if any(one is None for one in found):
            raise ValueError(
                "Sequential: the output must be a tensor for every micro-batch or None for every "
                "micro-batch, got a mixture; pass join= to combine them"
            )
        return torch.cat(found, dim)

    return _together(whole, values)


def evenly(total: int, count: int) -> list[int]:
    """Divide ``total`` into ``count`` nearly equal numbers, larger numbers first."""
    size, larger = divmod(total, count)
    return [size + (place < larger) for place in range(count)]


def join_checked(values: list[Any], sizes: list[int], batch: str, dim: int = 0) -> Any:
    """Join micro-batches that had ``sizes`` samples, like :func:`join`.

    Raises ``ValueError`` if any of their sizes has changed.
    """
    for chunk, (value, size) in enumerate(zip(values, sizes, strict=True)):
        if (found := batch_size(value, "the output", dim)) != size:
            raise ValueError(
                f"Sequential: the output for micro-batch {chunk} of {batch} must have {size} samples like "
                f"its input, got {found}; keep the batch dimension, or pass join="
            )
    return join(values, dim)


def _together(function: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    """Apply ``function`` to each list of corresponding leaves in several values."""
    first = values[0]
    kind = type(first)
    if isinstance(first, (tuple, list)):
        inner = [_together(function, list(found)) for found in zip(*values, strict=True)]
        return kind(*inner) if hasattr(first, "_fields") else kind(inner)
    if kind in (dict, OrderedDict):
        return kind((key, _together(function, [value[key] for value in values])) for key in first)
    return function(values)

"""Values: tensors and ``None``, or tuples, lists and dictionaries of them, nested as they like. One dimension
of all tensors, the first if not told otherwise, is the batch.

A batch is split along it into micro-batches as equal as possible (the first ones are larger by one sample),
and what comes out is joined again in the same order.
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
    """The arguments of a call that has not just one."""

    args: tuple[Any, ...]
    named: dict[str, Any]


class Micro(NamedTuple):
    """One micro-batch on its way: number ``chunk`` of the ``chunks`` that batch number ``batch`` was split
    into.

    ``skips`` are tensors that travel beside the value to a later part, by name. ``events`` holds one pair for
    each part that is done: when it began and when it ended, in seconds of ``time.monotonic``.
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
    """Everything in a nested value that is no tuple, list or dictionary, with its path: ``x['mask'][0]``."""
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
    """The tensors of a value, in order; what is none is left out."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """A value of the same structure with ``function(tensor)`` in place of each tensor; other leaves stay."""
    if isinstance(value, Tensor):
        return function(value)
    return _together(lambda found: function(found[0]) if isinstance(found[0], Tensor) else found[0], [value])


def split(value: Any, chunks: int, name: str = "x", dim: int = 0) -> list[Any]:
    """The value in ``chunks`` micro-batches, or as many as it has samples if they are fewer; an empty batch
    is one.

    Raises ``TypeError`` for a leaf that is no tensor and ``ValueError`` where the tensors have no common
    batch size, each with the path of the leaf.
    """
    samples = batch_size(value, name, dim)
    if chunks == 1:
        return [value]
    sizes = evenly(samples, max(1, min(chunks, samples)))
    # all at once, for then a backward pass puts them together at once as well
    pieces = {id(tensor): torch.split(tensor, sizes, dim) for tensor in tensors(value)}

    def piece(number: int, tensor: Tensor) -> Tensor:
        return pieces[id(tensor)][number]

    return [mapped(partial(piece, number), value) for number in range(len(sizes))]


def batch_size(value: Any, name: str = "x", dim: int = 0) -> int:
    """The common size of all tensors of the value in dimension ``dim``. Raises as :func:`split` does."""
    if isinstance(value, Tensor) and value.dim() > dim:
        return value.shape[dim]
    sizes: dict[str, int] = {}
    for path, leaf in leaves(value, name):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{path} must be a tensor, not {shown(leaf)}; a batch is a tensor, or tuples, "
                "lists and dicts of them: "
                "make tensors of arrays by torch.from_numpy, and keep what is no tensor in the module"
            )
        if leaf.dim() == 0:
            raise ValueError(
                f"{path} has no dimension to split along; its first one must be the batch: {leaf.item()!r}"
            )
        if leaf.dim() <= dim:
            raise ValueError(
                f"{path} has no dimension {dim}, which is the batch here; its shape is {tuple(leaf.shape)}"
            )
        sizes[path] = leaf.shape[dim]
    if not sizes:
        raise TypeError(f"{name} must hold at least one tensor, not {shown(value)}")
    first, *others = sizes.items()
    for path, size in others:
        if size != first[1]:
            raise ValueError(
                f"{path} has a batch of {size}, but {first[0]} one of {first[1]}; "
                f"the {'first dimension' if not dim else f'dimension {dim}'} of all tensors must be the same"
            )
    return first[1]


def without_gradient(value: Any, remedy: str) -> Any:
    """The value. ``ValueError`` if a tensor in it requires a gradient, which would end here."""
    if torch.is_grad_enabled():
        for path, leaf in leaves(value):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise ValueError(
                    f"Sequential: {path} requires a gradient, but none goes back from here to what made it: "
                    f"{remedy}, or give {path}.detach()"
                )
    return value


def join(values: list[Any], dim: int = 0) -> Any:
    """One value again: the tensors of the micro-batches, concatenated along the batch."""
    if len(values) == 1:
        return values[0]

    def whole(found: list[Any]) -> Any:
        if all(one is None for one in found):
            return None
        if any(one is None for one in found):
            raise ValueError(
                "the output is None for some micro-batches and a tensor for others; say by join= what the "
                "output of the batch is"
            )
        return torch.cat(found, dim)

    return _together(whole, values)


def evenly(total: int, count: int) -> list[int]:
    """``total`` in ``count`` numbers as equal as possible, the larger ones first."""
    size, larger = divmod(total, count)
    return [size + (place < larger) for place in range(count)]


def join_checked(values: list[Any], sizes: list[int], batch: str, dim: int = 0) -> Any:
    """As :func:`join`, of micro-batches that had ``sizes`` samples. Raises ``ValueError`` where they have
    others now."""
    for chunk, (value, size) in enumerate(zip(values, sizes, strict=True)):
        if (came := batch_size(value, "the output", dim)) != size:
            raise ValueError(
                f"the module made {came} samples of the {size} of micro-batch {chunk} of {batch}; "
                "micro-batches can be joined only where the first dimension stays the batch"
            )
    return join(values, dim)


def _together(function: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    """``function`` applied to the leaves that stand at the same place of each value."""
    first = values[0]
    kind = type(first)
    if isinstance(first, (tuple, list)):
        inner = [_together(function, list(found)) for found in zip(*values, strict=True)]
        return kind(*inner) if hasattr(first, "_fields") else kind(inner)
    if kind in (dict, OrderedDict):
        return kind((key, _together(function, [value[key] for value in values])) for key in first)
    return function(values)

"""Combine values from several workers, or from several members of a group.

Dictionaries, lists and tuples are combined leaf by leaf, always in the given order. All processes that
combine the same values therefore get the same result. Operations need no neutral element.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from flowchan.public import public

T = TypeVar("T")

Function = Callable[[Any, Any], Any]
Named = Literal["sum", "mean", "prod", "min", "max", "and", "or", "xor"]


@public
class Reduced(NamedTuple, Generic[T]):
    """Combined values of all workers of a stage in one round of ``allreduce``.

    Attributes:
        value: The combined value.
        contributors: Number of workers that contributed. This number decreases as workers end.
        round: Number of the round, from 0.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> sums = graph.source([1, 2]).allreduce("sum").collect()
        >>> graph.run()[sums]
        [Reduced(value=1, contributors=1, round=0), Reduced(value=2, contributors=1, round=1)]
    """

    value: T
    contributors: int
    round: int


def combined(values: Sequence[Any], function: Function) -> Any:
    """Combine the values with a function, or return None if there are none.

    Raise ``ValueError`` if the keys or lengths of the values differ. Exceptions of the function propagate.
    """
    total = values[0] if values else None
    for value in values[1:]:
        total = _combine(total, value, function, "")
    return total


def reduced(values: Sequence[Any], op: str | Function) -> Any:
    """Combine values, which may be arrays of equal shape.

    ``op`` is a function, or the name of one in :data:`OPERATIONS`.
    """
    total = combined(values, of_one_shape(OPERATIONS[op]) if isinstance(op, str) else op)
    return _divided(total, len(values)) if op == "mean" else total


def _combine(a: Any, b: Any, function: Function, path: str) -> Any:
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            raise ValueError(
                "values must have the same keys, got "
                f"{', '.join(sorted(map(repr, a.keys() ^ b.keys())))} in only some of "
                f"them{f' (in {path})' if path else ''}"
            )
        return {key: _combine(a[key], b[key], function, f"{path}[{key!r}]") for key in a}
    if type(a) is type(b) and type(a) in (list, tuple):
        if len(a) != len(b):
            raise ValueError(
                f"lists must have the same length, got {len(a)} and {len(b)}{f' in {path}' if path else ''}"
            )
        return type(a)(
            _combine(x, y, function, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))
        )
    return function(a, b)


def of_one_shape(plain: Function) -> Function:
    """Wrap ``plain`` so that it rejects arrays of different shapes, but accepts a number with any array."""

    def function(a: Any, b: Any) -> Any:
        shapes = getattr(a, "shape", ()), getattr(b, "shape", ())
        first, second = (tuple(shape) if isinstance(shape, tuple) else () for shape in shapes)
        if first and second and first != second:
            raise ValueError(f"arrays must have the same shape, got {first} and {second}")
        return plain(a, b)

    return function


def _divided(total: Any, by: int) -> Any:
    if isinstance(total, dict):
        return {key: _divided(value, by) for key, value in total.items()}
    if type(total) in (list, tuple):
        return type(total)(_divided(value, by) for value in total)
    return total / by


def _of_each_element(name: str, plain: Function) -> Function:
    """Wrap ``plain`` so that arrays and tensors go to the function ``name`` of NumPy or torch instead."""

    def function(a: Any, b: Any) -> Any:
        for library, kind in (("numpy", "ndarray"), ("torch", "Tensor")):
            module = sys.modules.get(library)
            if module is not None and isinstance(a, getattr(module, kind)):
                return getattr(module, name)(a, b)
        return plain(a, b)

    return function


OPERATIONS: dict[str, Function] = {
    "sum": operator.add,
    "mean": operator.add,
    "prod": operator.mul,
    "min": _of_each_element("minimum", min),
    "max": _of_each_element("maximum", max),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
"""Combining functions by name. For "mean", the function adds, and the caller divides the sum."""

"""Values of any shape under any function, from members that may run out of them.

Everybody gets the values of all who contribute and combines them for itself, in the order of the ranks: so
all have the same result, the function needs no neutral element, and what it raises is raised by all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Function = Callable[[Any, Any], Any]


def combined(contributions: Iterable[tuple[bool, Any]], function: Function) -> tuple[Any, int]:
    """The combination of those that are contributed, and how many they are."""
    values = [value for contributes, value in contributions if contributes]
    total = values[0] if values else None
    for value in values[1:]:
        total = _together(total, value, function, "")
    return total, len(values)


def _together(a: Any, b: Any, function: Function, path: str) -> Any:
    """Leaf by leaf through dictionaries, lists and tuples."""
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            raise ValueError(
                f"combine takes values with the same keys from all members; only some have "
                f"{sorted(map(repr, a.keys() ^ b.keys()))}{f' in {path}' if path else ''}"
            )
        return {key: _together(a[key], b[key], function, f"{path}[{key!r}]") for key in a}
    if type(a) is type(b) and type(a) in (list, tuple):
        if len(a) != len(b):
            raise ValueError(
                f"combine takes lists of the same length from all members, not of {len(a)} and {len(b)}"
                f"{f' in {path}' if path else ''}"
            )
        return type(a)(
            _together(x, y, function, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))
        )
    return function(a, b)

"""Define windows, which are groups of items with the same key, formed by count or by time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from flowchan.public import public

T = TypeVar("T")


@public
@dataclass(frozen=True, slots=True)
class Window(Generic[T]):
    """Items of one window, all with the same key.

    Attributes:
        key: Key of the items; None without a key function.
        start: Start of the window: a time in seconds, or the index of its first item among the items with
            this key.
        end: End of the window, in the same unit; it is not part of the window.
        items: The items in order of arrival.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> windows = graph.source(range(4)).window(2).collect()
        >>> graph.run()[windows]
        [Window(key=None, start=0, end=2, items=[0, 1]), Window(key=None, start=2, end=4, items=[2, 3])]
    """

    key: Hashable
    start: float
    end: float
    items: list[T]


def window_type(item: Any) -> Any:
    """Return the window type for a stream of items."""
    return Window if item is None else Window[item]

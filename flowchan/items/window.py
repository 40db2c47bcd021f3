"""Windows: groups of items of one key that belong together by number or by time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Window(Generic[T]):
    """Items of one key in one window.

    Attributes:
        key: Key of the items; None without a key function.
        start: Time in seconds, or number of the first item of the key, at which the window begins.
        end: Time or number before which the window ends.
        items: The items, in the order of their arrival.

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
    """Return the type of the windows of a stream of items."""
    return Window if item is None else Window[item]

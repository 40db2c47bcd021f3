"""Define the state that a keyed stage keeps for each key."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from flowchan.items.text import shown
from flowchan.public import public

T = TypeVar("T")

MISSING: Any = object()
"""Marks a key that has no state."""


@public
class KeyedState(Generic[T]):
    """State of one key, which a keyed stage passes to its function with each item.

    The state exists from the first use of ``value`` until :meth:`clear`. After each item, the value is
    pickled. If the worker dies, its replacement continues with the value after the last finished item. If the
    function raises, the state is the same as before the call.

    Attributes:
        key: Key of the item.

    Example:
        >>> from flowchan import Graph, KeyedState
        >>> def count(word: str, state: KeyedState[int]) -> tuple[str, int]:
        ...     state.value += 1
        ...     return word, state.value
        >>> graph = Graph()
        >>> words = graph.source(["a", "b", "a"])
        >>> counts = words.map(count, key=str.lower, state=int, on="process", workers=2).collect()
        >>> graph.run()[counts]
        [('a', 1), ('b', 1), ('a', 2)]
    """

    __slots__ = ("_make", "_used", "_value", "key")

    def __init__(self, key: Hashable, value: T, make: Callable[[], T]) -> None:
        self.key = key
        self._value = value
        self._make = make
        self._used = False

    def __repr__(self) -> str:
        value = "no value" if self._value is MISSING else f"value {shown(self._value)}"
        return f"<KeyedState of key {shown(self.key)} with {value}>"

    @property
    def value(self) -> T:
        """Return the value for this key.

        The first use calls the stage's ``state`` function. You may assign a new value, or change the value in
        place. The value must be picklable.

        Example:
            >>> from flowchan import Graph
            >>> def add(number, state):
            ...     state.value += number
            ...     return state.value
            >>> graph = Graph()
            >>> sums = graph.source([1, 2, 3]).map(add, key=lambda number: "all", state=int).collect()
            >>> graph.run()[sums]
            [1, 3, 6]
        """
        self._used = True
        if self._value is MISSING:
            self._value = self._make()
        return self._value

    @value.setter
    def value(self, value: T) -> None:
        self._used = True
        self._value = value

    def clear(self) -> None:
        """Remove the state of this key, and free its memory.

        Example:
            >>> from flowchan import Graph
            >>> def first_of_two(number, state):
            ...     state.value += 1
            ...     if state.value == 2:
            ...         state.clear()
            ...         return False
            ...     return True
            >>> graph = Graph()
            >>> odd = graph.source([1, 2, 3]).filter(first_of_two, key=lambda number: 0, state=int).collect()
            >>> graph.run()[odd]
            [1, 3]
        """
        self._used = True
        self._value = MISSING

"""Determine which source items have left the graph, in runs that can be resumed.

Algorithm. Each source item has a number. Items carry marks that identify the source items from which they
descend. The mark of a source item is the item's number. A stage with one output per item passes the marks on.
A stage that splits an item gives each part a new mark: the pair of the item's first mark and the part's
position. The stage then reports the item's marks and the number of parts. When a part leaves the graph, the
stage reports the part's marks and 0 parts. :class:`Lineage` combines these reports: a mark has left the graph
when all its parts have.

Invariants. Reports may arrive in any order, and more than once if a worker was replaced. Marks depend only on
the items. A replacement therefore reports the same marks as the dead worker. An item without marks is not
tracked. The source items from which it descends therefore never count as finished.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

Mark = int | tuple[Any, int]
"""Number of a source item or, for a part of an item, the pair of the item's mark and the part's position."""
Marks = tuple[Mark, ...]
Left = tuple[Marks, int]
"""Report about one item: its marks, and the number of its parts, or 0 if it left the graph.

A report is a plain tuple, because each item needs one and channels encode tuples fast.
"""


@dataclass(frozen=True, slots=True)
class FinishedItems:
    """Items of one source that earlier runs have finished.

    All sources of a graph share one sequence of numbers. The items of the source with the index ``source``
    have the numbers ``source``, ``source + sources``, and so on. Bit n of ``bits`` is set if item n is
    finished.
    """

    source: int = 0
    sources: int = 1
    bits: bytes = b""

    def tracked(self, elements: Iterable[Any]) -> Iterator[tuple[Marks, Any]]:
        """Yield the source's elements that are not finished, each with its marks."""
        remaining = iter(elements)
        numbers = count(self.source, self.sources)
        for number in range(self.source, 8 * len(self.bits), self.sources):
            next(numbers)
            for element in remaining:
                if not self.is_finished(number):
                    yield (number,), element
                break
            else:
                return
        yield from zip(zip(numbers), remaining, strict=False)

    async def tracked_later(
        self, elements: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[tuple[Marks, Any], None]:
        """Yield the unfinished elements of an asynchronous source, each with its marks."""
        numbers = count(self.source, self.sources)
        async with contextlib.aclosing(elements):
            async for element in elements:
                number = next(numbers)
                if not self.is_finished(number):
                    yield (number,), element

    def is_finished(self, number: int) -> bool:
        """Return whether the item with this number is finished."""
        place, bit = divmod(number, 8)
        return place < len(self.bits) and bool(self.bits[place] >> bit & 1)

    def length(self) -> int:
        """Return the smallest number of items with which the source includes its last finished item."""
        last = range(self.source, 8 * len(self.bits), self.sources)
        return next((place + 1 for place in reversed(range(len(last))) if self.is_finished(last[place])), 0)


NOTHING_FINISHED = FinishedItems()


@dataclass(slots=True)
class _Split:
    """State of an item that was split into parts.

    The state contains the marks of the item, the number of its parts (when that is known), and the parts that
    have left.
    """

    marks: Marks = ()
    number: int | None = None
    left: set[int] = field(default_factory=set)


class Lineage:
    """Tracks the split items that still have parts in the graph."""

    def __init__(self) -> None:
        self._parts: dict[Mark, _Split] = {}

    def finished(self, marks: Marks, parts: int) -> list[int]:
        """Process a report that an item left the graph or was split.

        Args:
            marks: Marks of an item.
            parts: Number of parts that replace the item; 0 if it left the graph.

        Returns:
            Numbers of the source items that are now finished.
        """
        numbers: list[int] = []
        remaining = list(marks)
        if parts and marks:
            known = self._parts.setdefault(marks[0], _Split())
            known.marks, known.number = marks, parts
            remaining = self._ended(marks[0])
        while remaining:
            mark = remaining.pop()
            if isinstance(mark, int):
                numbers.append(mark)
            else:
                whole, place = mark
                self._parts.setdefault(whole, _Split()).left.add(place)
                remaining += self._ended(whole)
        return numbers

    def _ended(self, whole: Mark) -> list[Mark]:
        """Return the marks of an item if all of its parts have left the graph, or an empty list otherwise."""
        known = self._parts[whole]
        if known.number is None or len(known.left) < known.number:
            return []
        del self._parts[whole]
        return list(known.marks)

"""Track the source items from which each item descends, in a run that can be resumed (R14).

In such a run, channels carry pairs of marks and the user's item; a batch is a list of such pairs. The marks
identify the source items from which the item descends (``lineage``). A wrapper around the user's function
removes the marks before each call and adds them to the result. When an item leaves the graph or is split, the
worker reports this before it takes the next item. If the worker dies before the report, its replacement
processes the item again and reports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Any

from flowchan.declare.callables import is_async
from flowchan.declare.values import Stage
from flowchan.items.failed import Failed
from flowchan.run.policy.lineage import FinishedItems, Left, Mark, Marks


def unmarked(item: Any) -> Any:
    """Return the user's item without its marks."""
    if type(item) is tuple:
        return item[1]
    return list(map(unmarked, item)) if type(item) is list else item


def marks_of(item: Any) -> Marks:
    """Return the marks of an item or of all members of a batch. An unreadable item has no marks."""
    if type(item) is tuple:
        return item[0]  # type: ignore[no-any-return]
    return tuple(mark for member in item for mark in marks_of(member)) if type(item) is list else ()


def _part(item: Any, place: int) -> Any:
    """Change the marks of an item, or of each member of a batch, to the mark of its part number ``place``."""
    if type(item) is list:
        return [_part(member, place) for member in item]
    marks, value = item
    return _part_marks(marks, place), value


def _part_marks(marks: Marks, place: int) -> Marks:
    return ((marks[0], place),) if marks else ()


class Tracking:
    """Tracks the marks of the items that a worker takes and puts.

    ``tell`` reports items that have left the graph.
    """

    def __init__(self, stage: Stage, finished: FinishedItems, tell: Callable[[Left], None]) -> None:
        self._operator = stage.operator
        self._in_process = stage.placement.own_process
        self.finished = finished
        self._tell = tell
        self._whole: Mark | None = None  # first mark of the item that is being split
        self._parts = 0  # number of this item's parts that have been put
        self._unbatching = False

    def left(self, item: Any) -> None:
        """Report that an item has left the graph."""
        self._tell((marks_of(item), 0))

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the user's function so that callers pass items with marks."""
        if self._operator.calls != "item":
            return function

        async def call_later(item: Any) -> Any:
            return self._marked(item, await function(unmarked(item)))

        def call(item: Any) -> Any:
            return self._marked(item, function(unmarked(item)))

        def elements(item: Any) -> Any:
            return function(unmarked(item))

        if self._operator.iterates:
            return elements
        return call_later if is_async(function) else call

    def _marked(self, item: Any, result: Any) -> Any:
        if self._operator.one_output:
            return marks_of(item), result
        if self._operator.ends or (self._operator.lets_go and not result):
            self.left(item)
        return result

    def parts(self, item: Any, elements: Iterable[Any]) -> Iterator[Any]:
        """Yield the elements into which an item is split, with marks. Then report the split."""
        marks = self._begin_split(item)
        number = 0
        for element in elements:
            yield _part_marks(marks, number), element
            number = self._put(number)
        self._tell((marks, number))

    async def parts_later(self, item: Any, elements: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Like :meth:`parts`, yield the elements that an asynchronous generator produces."""
        marks = self._begin_split(item)
        number = 0
        async with contextlib.aclosing(elements):
            async for element in elements:
                yield _part_marks(marks, number), element
                number = self._put(number)
        self._tell((marks, number))

    def _begin_split(self, item: Any) -> Marks:
        """Begin to split an item. In a retry of the same item, remember the parts that were already put."""
        marks = marks_of(item)
        whole = marks[0] if marks else None
        if whole != self._whole:
            self._whole, self._parts = whole, 0
        return marks

    def _put(self, number: int) -> int:
        """Record that the part with this number was put or skipped, and return the next number."""
        self._parts = max(self._parts, number + 1)
        return number + 1

    def unbatched(self, item: Any) -> Iterable[Any]:
        """Return the elements of an item, each with its marks. The members of a batch already have marks."""
        if type(item) is list:
            self._unbatching = True
            return item
        return self.parts(item, item[1])

    def copies(self, item: Any, number: int) -> list[Any]:
        """Return a copy of an item for each of ``number`` branches, and report the split."""
        self._split(item, number)
        return [_part(item, place) for place in range(number)]

    def _split(self, item: Any, number: int) -> None:
        if type(item) is list:
            for member in item:
                self._split(member, number)
        else:
            self._tell((item[0], number))

    def without_failed(self, items: list[Any], results: tuple[Marks, Any], kept: Any) -> Any:
        """Return the ``kept`` results of a batch with the marks of the members that did not fail."""
        _, values = results
        if kept is values:
            return results
        remaining = [
            item for item, value in zip(items, values, strict=True) if not isinstance(value, Exception)
        ]
        return marks_of(remaining), kept

    def failed(self, item: Any, failed: Failed[Any]) -> Any:
        """Return ``failed`` with the marks of the item that failed.

        The result has no marks if unknown parts of the item may be in the graph. The item then never counts
        as finished, so each later run processes it again.
        """
        marks = marks_of(item)
        if self._operator.iterates and self._in_process:  # dead workers may have put parts of the item
            return (), failed
        if self._unbatching and type(item) is list:  # some members may already be in the graph
            return (), failed
        if marks and marks[0] == self._whole and self._parts:
            self._tell((marks, self._parts + 1))
            marks = _part_marks(marks, self._parts)
        return marks, failed

"""Iterate asynchronously over a result of a run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any


class ResultIterator(AsyncIterator[Any]):
    """Iterator that ``Run.aiter`` returns.

    If the program drops the iterator, the result loses its reader, even if the event loop no longer runs.

    Args:
        items: Items of the result.
        leave: Called when the iterator is freed.
    """

    def __init__(self, items: AsyncGenerator[Any, None], leave: Callable[[], None]) -> None:
        self._items, self._leave = items, leave

    def __anext__(self) -> Awaitable[Any]:
        return self._items.__anext__()

    def aclose(self) -> Awaitable[None]:
        """Stop reading and release the remaining items."""
        return self._items.aclose()

    def __del__(self) -> None:
        self._leave()

"""Define the writing end of a ``per_worker`` input, which has one port for each worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from flowchan.channel.ports import Out
from flowchan.errors import Closed
from flowchan.items.arguments import is_whole
from flowchan.items.text import shown


class Addressed:
    """Send each item to the worker that the sender chooses.

    If the reading stage declares its input with ``per_worker``, the sender gets an ``Addressed`` instead of
    an ``Out``. Items are pairs ``(worker, item)``; workers are numbered from 1. A worker that has ended
    receives no more items: ``put`` then calls ``unwanted`` or, without this callback, raises ``Closed``.

    Args:
        ports: Writing end of each worker's channel, in worker order.
        unwanted: Called once for each item whose worker has ended. Default: ``put`` raises ``Closed``.
    """

    def __init__(self, ports: Sequence[Out[Any]], unwanted: Callable[[], None] | None = None) -> None:
        self.ports = tuple(ports)
        self._unwanted = unwanted

    def put(self, item: tuple[int, Any], timeout: float | None = None) -> None:
        """Put an item into its worker's channel, waiting up to ``timeout`` seconds for room."""
        port, item = self._addressee(item)
        try:
            port.put(item, timeout)
        except Closed as end:
            self._ended(port, end)

    def put_nowait(self, item: tuple[int, Any], /) -> None:
        """Put an item into its worker's channel, or raise ``Full`` if the channel is full."""
        self.put(item, 0)

    def put_many(self, items: Iterable[tuple[int, Any]], timeout: float | None = None) -> None:
        """Put the items of an iterable in order, waiting up to ``timeout`` seconds in total."""
        until = None if timeout is None else time.monotonic() + timeout
        number = 0
        try:
            for item in items:
                self.put(item, None if until is None else max(0.0, until - time.monotonic()))
                number += 1
        except Exception as error:
            error.items_put = number  # type: ignore[attr-defined]
            raise

    async def aput(self, item: tuple[int, Any]) -> None:
        """Put an item like ``put``, without blocking the event loop."""
        port, item = self._addressee(item)
        try:
            await port.aput(item)
        except Closed as end:
            self._ended(port, end)

    def _addressee(self, item: Any) -> tuple[Out[Any], Any]:
        if not isinstance(item, tuple) or len(item) != 2 or not is_whole(item[0]):
            raise TypeError(
                f"put: item must be a pair (worker, item), got {shown(item)}; the reader is declared with "
                "per_worker, so each item needs the number of a worker"
            )
        worker, inner = item
        if not 1 <= worker <= len(self.ports):
            raise ValueError(f"put: worker must be between 1 and {len(self.ports)}, got {worker}")
        return self.ports[worker - 1], inner

    def _ended(self, port: Out[Any], end: Closed) -> None:
        """Count an item as unwanted if only its worker's channel is closed. Otherwise, raise ``end``."""
        # If the channel is open, the error comes from a signal handler and concerns another channel.
        if self._unwanted is None or not port.channel.closed or self.closed:
            raise end
        self._unwanted()

    @property
    def closed(self) -> bool:
        """Return whether the channels of all workers are closed, so that no put can succeed."""
        return all(port.closed for port in self.ports)

    @property
    def channel(self) -> Any:
        """Return one worker's channel: preferably a broken one, then an open one, then the first."""
        channels = [port.channel for port in self.ports]
        still_open = next((channel for channel in channels if not channel.closed), channels[0])
        return next((channel for channel in channels if channel.broken), still_open)

    def close(self) -> None:
        """Close the port of each worker."""
        for port in self.ports:
            port.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for port in self.ports:
            port.__exit__(type, error, traceback)


def ports_of_end(end: Out[Any] | Addressed) -> tuple[Out[Any], ...]:
    """Return the ports that make up a writing end."""
    return end.ports if isinstance(end, Addressed) else (end,)

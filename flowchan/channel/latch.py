"""Define a latch that threads and coroutines can wait for."""

from __future__ import annotations

import contextlib

from flowchan.channel.channel import Channel
from flowchan.errors import Drained, Empty


class Latch:
    """Event that can be set once, implemented as a channel that closes.

    ``threading.Event`` is unsafe here. A Ctrl-C during ``Event.wait`` can leave the event's lock held. A
    Ctrl-C just before ``wait`` takes effect only when the wait ends.
    """

    def __init__(self) -> None:
        self._channel: Channel[None] = Channel(1)

    def set(self) -> None:
        """Set the event."""
        self._channel.close()

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._channel.closed

    async def awaited(self) -> None:
        """Wait until the event is set, without blocking the event loop."""
        with contextlib.suppress(Drained):
            await self._channel.aget()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds, and return whether the event is set."""
        try:
            self._channel.get(timeout)
        except Drained:
            return True
        except Empty:
            return False
        raise AssertionError("a latch's channel never holds an item")

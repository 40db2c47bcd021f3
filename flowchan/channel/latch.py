"""Something that happens once, for all who wait for it."""

from __future__ import annotations

import contextlib

from flowchan.channel.channel import Channel
from flowchan.errors import Drained, Empty


class Latch:
    """Is set once, for all who wait. A channel that closes, in place of ``threading.Event``: Ctrl-C during
    ``Event.wait`` can leave its lock held; just before, it is not heard until the wait ends."""

    def __init__(self) -> None:
        self._channel: Channel[None] = Channel(1)

    def set(self) -> None:
        self._channel.close()

    def is_set(self) -> bool:
        return self._channel.closed

    async def awaited(self) -> None:
        """Returns once it is set."""
        with contextlib.suppress(Drained):
            await self._channel.aget()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is set within ``timeout`` seconds."""
        try:
            self._channel.get(timeout)
        except Drained:
            return True
        except Empty:
            return False
        raise AssertionError("nobody puts into a latch")

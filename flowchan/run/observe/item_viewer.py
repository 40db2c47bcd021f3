"""Show the items of a run's channel to ``flowchan peek``. The items stay in the channel.

Algorithm. One thread serves one viewer. The thread reads the channel every ``LOOK_EVERY_S`` seconds, and
sends each item that it has not shown before. Each time, it takes the channel's lock, copies at most
``MOST_BYTES``, and changes nothing. Readers get the same items in the same order, and the viewer takes up no
room in the channel. An item that passes through the channel in between is not shown.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from flowchan.channel.channel import Channel
from flowchan.items.arguments import near_misses
from flowchan.items.item_texts import SeenItem

LOOK_EVERY_S = 0.05
"""Seconds between two peeks at the items in the channel."""
MOST_ITEMS = 1000
"""Maximum number of items that one peek copies."""
MOST_BYTES = 1 << 20
"""Maximum number of bytes that one peek copies. A larger item is shown as its size."""
SEND_S = 10.0
"""Seconds after which a viewer that reads nothing loses the connection."""


class ItemViewer:
    """Connection to one viewer of items. Closing it ends its thread.

    Args:
        connection: Connection to the viewer, which it owns from now on.
        channels: Channels of the run, by name.
        request: The viewer's request: a JSON object with the channel's name in ``peek``, and the number of
            items in ``count``.
        line: Encodes a message to the viewer.
    """

    def __init__(
        self,
        connection: socket.socket,
        channels: Mapping[str, Channel[Any]],
        request: bytes,
        line: Callable[[dict[str, Any]], bytes],
    ) -> None:
        self._connection, self._line = connection, line
        self._over = threading.Event()
        connection.settimeout(SEND_S)
        self._thread = threading.Thread(
            target=self._serve, args=(channels, request), name="flowchan item viewer", daemon=True
        )
        self._thread.start()

    def _serve(self, channels: Mapping[str, Channel[Any]], request: bytes) -> None:
        with self._connection, contextlib.suppress(OSError, MemoryError):  # OSError: the viewer has left
            try:
                asked = json.loads(request)
                name, count = str(asked["peek"]), int(asked["count"])
            except (ValueError, TypeError, KeyError):
                return
            if name in channels:
                self._show(channels[name], count)
            else:
                self._send({"event": "refused", "why": _unknown(name, channels)})

    def _show(self, channel: Channel[Any], count: int) -> None:
        stats = channel.stats()
        self._send({"event": "channel", "inside": stats.inside, "leased": stats.leased})
        first = 0
        while count > 0:
            over = self._over.is_set()
            seen = [SeenItem(*one) for one in channel._peek(first, min(count, MOST_ITEMS), MOST_BYTES)]
            for item in seen:
                message = {"number": item.number, "taken": item.leased, "text": item.text()}
                self._send({"event": "item", **message})
            count -= len(seen)
            if seen:
                first = seen[-1].number + 1
            elif over or channel.drained or channel.broken:
                break
            if count:
                self._pause()
        self._send({"event": "end"})

    def _pause(self) -> None:
        """Wait for ``LOOK_EVERY_S`` seconds. Raise ``OSError`` if the viewer has left."""
        viewer = select.poll()
        viewer.register(self._connection, select.POLLIN)
        if viewer.poll(LOOK_EVERY_S * 1000):
            raise ConnectionResetError

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.sendall(self._line(message))

    def end(self, timeout: float) -> None:
        """End the connection after a last peek, and wait up to ``timeout`` seconds for its thread."""
        self._over.set()
        self._thread.join(timeout)


def _unknown(name: str, channels: Mapping[str, Any]) -> str:
    near = near_misses(name, channels)
    rest = f"did you mean {near[0]!r}?" if near else f"the channels are {', '.join(channels)}"
    return f"channel must be a channel of the run, got {name!r}; {rest}"

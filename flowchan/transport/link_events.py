"""Define the events of a link, and the loop that waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PEER_TIMEOUT_S = 10.0
"""Seconds without a message after which an agent gives up on the driver, or a client on a channel's owner.
"""

STUCK = "its connections broke for {:.1f} s before any item arrived ({})"
"""Reasons for giving up on a peer, from the attributes of :class:`LinkBroken`."""

AHEAD, BEHIND = 1 << 16, 1024
"""Capacities of an agent's rings.

The first is for a worker's inputs, including items that the driver sends ahead. The second is for the
worker's outputs.
"""


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """A connection of the link has ended. This event occurs once for each connection.

    Attributes:
        why: Why it ended.
        stuck: Seconds since connections began to break before any of the items in transit arrived. The value
            is 0 unless at least two connections in a row broke before any item arrived. Parts of items and
            acknowledgements count as arrivals.
        in_vain: Number of consecutive connections in which nothing arrived.
    """

    why: str
    stuck: float = 0.0
    in_vain: int = 0


@dataclass(frozen=True, slots=True)
class StreamFinished:
    """At the owner: a worker sends nothing more on this stream, and all items that it sent have been put."""

    stream: int


@dataclass(frozen=True, slots=True)
class ItemRefused:
    """An item for this input port contains descriptors, so it cannot leave this machine."""

    stream: int
    port: int


@dataclass(frozen=True, slots=True)
class ItemTooLarge:
    """An item has arrived whose ``size`` in bytes exceeds the limit of the channel behind this port."""

    stream: int
    port: int
    size: int


@dataclass(frozen=True, slots=True)
class OutputToFetch:
    """At an agent: an item has arrived, but its payload is on another host, at ``location``."""

    stream: int
    port: int
    location: bytes


@dataclass(frozen=True, slots=True)
class OutputNotRemade:
    """At the owner: an output was lost with its host, and processing its input again did not reproduce it."""

    stream: int
    port: int


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """This process has closed the link. No more events follow."""


@dataclass(frozen=True, slots=True)
class LinkIdle:
    """No event has occurred within the timeout.

    Attributes:
        connected: True if the link was connected at the beginning of that time. If the link has broken since
            then, the next event reports the break.
        silent: Seconds since the last byte arrived or, without a connection, since the connection broke.
    """

    connected: bool
    silent: float


LinkEvent = (
    LinkBroken | StreamFinished | ItemRefused | ItemTooLarge | OutputToFetch | OutputNotRemade | LinkClosed
)

_EVENTS: dict[str, type[LinkEvent]] = {
    "broken": LinkBroken,
    "finished": StreamFinished,
    "refused": ItemRefused,
    "too large": ItemTooLarge,
    "to fetch": OutputToFetch,
    "not remade": OutputNotRemade,
    "closed": LinkClosed,
}


def next_event(link: Any, timeout: float | None = None) -> LinkEvent | None:
    """Wait up to ``timeout`` seconds for the next event of ``link``. Return the event or None."""
    kind, *values = link.wait(timeout) or ("",)
    if kind == "broken":
        state = link.state()
        return LinkBroken(values[0], state["stuck_for"], state["breaks_in_vain"])
    return _EVENTS[kind](*values) if kind else None


def watch(link: Any, wait: float, wait_unconnected: float | None = None) -> Iterator[LinkEvent | LinkIdle]:
    """Yield the events of ``link`` until the link is closed.

    Args:
        link: Native link.
        wait: Seconds without an event after which to yield :class:`LinkIdle`.
        wait_unconnected: The same, for a link that has just lost its connection or waits for its first one
            (default: ``wait``). While the link has no connection, the pauses grow; see
            :func:`unconnected_pause`.
    """
    connected_at = time.monotonic()
    while True:
        connected = bool(link.state()["connected"])
        if connected:
            connected_at = time.monotonic()
        pause = wait
        if not connected and wait_unconnected is not None:
            pause = unconnected_pause(connected_at, wait, wait_unconnected)
        event = next_event(link, pause)
        if event is None:
            silent = link.state()["heard_ago"] if connected else time.monotonic() - connected_at
            yield LinkIdle(connected, silent)
        elif isinstance(event, LinkClosed):
            return
        else:
            yield event


def unconnected_pause(since: float, most: float, least: float) -> float:
    """Return how long to wait until a link without a connection is checked again.

    The pause is a tenth of the time since the link had a connection. Therefore, even a large
    number of links to slow hosts does not keep this process busy.

    Args:
        since: Monotonic time at which the link was last connected, or at which the first wait began.
        most: Longest pause in seconds.
        least: Shortest pause in seconds.

    Returns:
        The pause in seconds.
    """
    return min(most, max(least, (time.monotonic() - since) / 10))

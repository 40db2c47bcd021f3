"""What happens to a link: typed events, and the loop in which every owner of a link hears them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PEER_TIMEOUT_S = 10.0
"""Seconds for which an agent goes on without hearing the driver, and others without the home of a channel."""

AHEAD, BEHIND = 1 << 16, 1024
"""Places of the rings that an agent has for a worker's inputs, which hold what the link has sent ahead, and
for its outputs."""


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """A connection has ended. Comes once for each connection."""

    why: str


@dataclass(frozen=True, slots=True)
class LineFinished:
    """At the owner: a worker sends nothing more on this line, and everything it sent has been put."""

    line: int


@dataclass(frozen=True, slots=True)
class ItemRefused:
    """An item on this input port of a line holds descriptors, so it can't leave this machine."""

    line: int
    port: int


@dataclass(frozen=True, slots=True)
class ItemTooLarge:
    """An item of ``size`` bytes has arrived that the channel behind this port can't take."""

    line: int
    port: int
    size: int


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The link was closed in this process. Nothing more happens to it."""


@dataclass(frozen=True, slots=True)
class LinkIdle:
    """Nothing has happened for a while.

    ``connected`` was read before that while began: a break since then is the next event. ``silent`` counts
    the seconds since the last byte arrived or, without a connection, since there was one.
    """

    connected: bool
    silent: float


LinkEvent = LinkBroken | LineFinished | ItemRefused | ItemTooLarge | LinkClosed

_EVENTS: dict[str, type[LinkEvent]] = {
    "broken": LinkBroken,
    "finished": LineFinished,
    "refused": ItemRefused,
    "too large": ItemTooLarge,
    "closed": LinkClosed,
}


def next_event(link: Any, timeout: float | None = None) -> LinkEvent | None:
    """Wait for the next event of ``link``; return None when there is none within ``timeout`` seconds."""
    kind, *values = link.wait(timeout) or ("",)
    return _EVENTS[kind](*values) if kind else None


def watch(link: Any, wait: float, wait_apart: float | None = None) -> Iterator[LinkEvent | LinkIdle]:
    """Yield what happens to ``link`` until it is closed.

    Args:
        link: The native link.
        wait: Seconds without an event after which :class:`LinkIdle` comes.
        wait_apart: The same while there is no connection, ``wait`` by default.
    """
    connected_at = time.monotonic()
    while True:
        connected = bool(link.state()["connected"])
        if connected:
            connected_at = time.monotonic()
        event = next_event(link, wait if connected or wait_apart is None else wait_apart)
        if event is None:
            silent = link.state()["heard_ago"] if connected else time.monotonic() - connected_at
            yield LinkIdle(connected, silent)
        elif isinstance(event, LinkClosed):
            return
        else:
            yield event

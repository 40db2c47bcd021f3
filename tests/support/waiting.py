"""How tests wait for a state: they look at counts until the state is there, and never sleep in its place.

``WAIT_LIMIT_S`` is no promise about time. It is where a wait that will never end is given up, so that one
broken
promise fails one test and not the whole suite.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

GIL: bool = getattr(sys, "_is_gil_enabled", lambda: True)()

WAIT_LIMIT_S = 60.0


def wait_until(
    condition: Callable[[], bool],
    peer_timeout: float = WAIT_LIMIT_S,
    what: Callable[[], object] | None = None,
) -> None:
    """Returns once ``condition()`` holds. Gives up with an AssertionError that shows ``what()``."""
    tick = threading.Event()
    give_up = time.monotonic() + peer_timeout
    while not condition():
        if time.monotonic() > give_up:
            raise AssertionError(
                f"waited {peer_timeout:g} s in vain; last seen: {what() if what else condition}"
            )
        tick.wait(0.001)  # lets other threads and processes have the CPU


def wait_freed(gone: weakref.ref[Any]) -> None:
    """Returns once the object is freed."""

    def is_freed() -> bool:
        merge_counts()
        return gone() is None

    wait_until(is_freed)


def merge_counts() -> None:
    """Without a GIL an object of which another thread than its maker drops the last reference is freed when
    its maker next runs Python code, which may be late, or when the collector runs."""
    if not GIL:
        gc.collect()


def wait_blocked(channel: Any, readers: int = 0, writers: int = 0) -> None:
    """Returns once at least so many readers and so many writers are waiting in the channel, wherever they
    run."""

    def blocked() -> bool:
        stats = channel.stats()
        return bool(stats.waiting_readers >= readers and stats.waiting_writers >= writers)

    wait_until(
        blocked, what=lambda: f"{channel.stats()} where readers={readers}, writers={writers} were expected"
    )


def wait_stats(channel: Any, **expected: int) -> None:
    """Returns once ``channel.stats()`` has exactly the given values, e.g. ``wait_stats(ch, items_in=3)``."""

    def reached() -> bool:
        stats = channel.stats()
        return all(getattr(stats, name) == value for name, value in expected.items())

    wait_until(reached, what=lambda: f"{channel.stats()} where {expected} was expected")


def nobody_waits(*channels: Any) -> bool:
    """Neither plain readers and writers nor selects."""
    return all(
        stats.waiting_readers == stats.waiting_writers == stats.selecting == 0
        for stats in (channel.stats() for channel in channels)
    )

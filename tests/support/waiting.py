"""Wait for a state in a test. The helpers poll until the state is reached instead of sleeping.

``WAIT_LIMIT_S`` is not a promise about speed. The limit ends a wait that would otherwise last forever, so
that a defect fails one test and does not hang the whole suite.
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
    """Wait until ``condition()`` is true. After the limit, raise an AssertionError that shows ``what()``."""
    tick = threading.Event()
    began = time.monotonic()
    while True:
        checked = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        waited = now - began
        if waited > peer_timeout:
            raise AssertionError(
                f"waited {peer_timeout:g} s in vain; last seen: {what() if what else condition}"
            )
        # lets other threads and processes run; slow conditions are checked less often
        tick.wait(max(min(0.001 + waited / 10, 0.01), 4 * (now - checked)))


def wait_freed(reference: weakref.ref[Any]) -> None:
    """Wait until the object is freed."""

    def is_freed() -> bool:
        merge_counts()
        return reference() is None

    wait_until(is_freed)


def merge_counts() -> None:
    """Free objects that lost their last reference in a thread other than their creator.

    A free-threaded interpreter frees such objects late: during a garbage collection, or when the thread that
    created them runs Python code again.
    """
    if not GIL:
        gc.collect()


def wait_blocked(channel: Any, readers: int = 0, writers: int = 0) -> None:
    """Wait until at least ``readers`` readers and ``writers`` writers of any process are waiting in the
    channel."""

    def blocked() -> bool:
        stats = channel.stats()
        return bool(stats.waiting_readers >= readers and stats.waiting_writers >= writers)

    wait_until(
        blocked, what=lambda: f"{channel.stats()} where readers={readers}, writers={writers} were expected"
    )


def wait_stats(channel: Any, **expected: int) -> None:
    """Wait until ``channel.stats()`` has exactly the given values, such as ``wait_stats(ch, items_in=3)``."""

    def reached() -> bool:
        stats = channel.stats()
        return all(getattr(stats, name) == value for name, value in expected.items())

    wait_until(reached, what=lambda: f"{channel.stats()} where {expected} was expected")


def no_waiters(*channels: Any) -> bool:
    """Return whether no reader, writer or select is waiting in the channels."""
    return all(
        stats.waiting_readers == stats.waiting_writers == stats.selecting == 0
        for stats in (channel.stats() for channel in channels)
    )

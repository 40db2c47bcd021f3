"""Make a worker wait for its items in transit to other programs before it reports its end.

A run closes its services after the other stages have ended. The services must get all requests before that.
"""

from __future__ import annotations

from collections.abc import Callable

_waits: list[Callable[[], object]] = []


def before_end(wait: Callable[[], object]) -> None:
    """Have a function called in each worker process before the worker reports its end."""
    _waits.append(wait)


def deliver_items() -> None:
    """Wait, for a limited time, until other programs have the items that this process has put."""
    for wait in _waits:
        wait()

"""Compute how much time a call with several steps has left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

RemainingTime = Callable[[], float | None]
"""Function that returns the time in seconds that the next step may take; None means no limit."""


def countdown(timeout: Any) -> RemainingTime:
    """Return a function that returns how many of the ``timeout`` seconds are left.

    If ``timeout`` is invalid, the returned function returns it unchanged, and the next step of the call
    raises the error.
    """
    try:
        give_up = time.monotonic() + timeout
    except TypeError:  # usually because ``timeout`` is None
        return lambda: timeout
    return lambda: min(timeout, max(0.0, give_up - time.monotonic()))

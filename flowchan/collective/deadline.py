"""Time that remains for a call with several steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

RemainingTime = Callable[[], float | None]
"""Function that returns the seconds that remain for the next step, or None without a limit."""


def countdown(timeout: Any) -> RemainingTime:
    """Return a function that returns the remaining part of the ``timeout`` seconds.

    If ``timeout`` is invalid, the function returns it unchanged, and the next step of the call raises the
    error.
    """
    try:
        give_up = time.monotonic() + timeout
    except TypeError:  # most often None
        return lambda: timeout
    return lambda: min(timeout, max(0.0, give_up - time.monotonic()))

"""The remaining time of a call that has several steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

RemainingTime = Callable[[], float | None]
"""A function that returns the remaining seconds for the next step, or None without a limit."""


def countdown(timeout: Any) -> RemainingTime:
    """Start a countdown of ``timeout`` seconds.

    An invalid ``timeout`` is passed on unchanged, so that the next step raises the error.
    """
    try:
        give_up = time.monotonic() + timeout
    except TypeError:  # usually None
        return lambda: timeout
    return lambda: min(timeout, max(0.0, give_up - time.monotonic()))

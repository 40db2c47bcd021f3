"""The time that a call has, for all that it does one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Left = Callable[[], float | None]
"""The seconds that are left now, for the next step; None: there is no limit."""


def countdown(timeout: Any) -> Left:
    """Of a ``timeout`` that begins now. What is no time at all stays what it is, for the step to complain."""
    try:
        give_up = time.monotonic() + timeout
    except TypeError:  # None, most often
        return lambda: timeout
    return lambda: min(timeout, max(0.0, give_up - time.monotonic()))

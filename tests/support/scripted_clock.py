"""Provide a clock that moves only when a test moves it."""

from __future__ import annotations


class ScriptedClock:
    """Stand-in for the module ``time`` in the module under test.

    Attributes:
        now: Current time in seconds, which the test sets.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        """Return the current time."""
        return self.now

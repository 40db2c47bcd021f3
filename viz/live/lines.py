"""Print a line about a run every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from flowchan.run.policy.stats import RunStats

PLAIN_EVERY = 5.0
"""Seconds between lines."""


class Lines:
    """Writes lines about a run.

    ``words`` makes a line from the statistics, and ``clock`` returns the time.
    """

    def __init__(
        self, stream: TextIO, words: Callable[[RunStats], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._words, self._clock = stream, words, clock
        self._next = clock() + PLAIN_EVERY

    def show(self, stats: RunStats) -> None:
        """Write a line if one is due."""
        if self._clock() >= self._next:
            self._next = self._clock() + PLAIN_EVERY
            self.print_line(self._words(stats))

    def print_line(self, line: str) -> None:
        """Write a line immediately."""
        print(line, file=self._stream, flush=True)

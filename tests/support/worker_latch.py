"""Provide a latch that holds workers in a test."""

from __future__ import annotations

from typing import Any

from flowchan import Channel
from support.waiting import wait_blocked


class Gate:
    """Latch for workers. The latch reaches worker processes as a captured variable."""

    def __init__(self) -> None:
        self.channel: Channel[Any] = Channel(1, across="processes")

    def wait(self, value: Any = None) -> Any:
        """Wait in the worker until the latch opens, and return ``value``."""
        for _ in self.channel:
            raise AssertionError("nothing is ever put into a gate")
        return value

    def wait_held(self, workers: int = 1) -> None:
        """Wait until the latch holds ``workers`` workers."""
        wait_blocked(self.channel, readers=workers)

    def open(self) -> None:
        self.channel.close()

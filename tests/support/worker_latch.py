"""What tests hold workers up with."""

from __future__ import annotations

from typing import Any

from flowchan import Channel
from support.waiting import wait_blocked


class Gate:
    """Holds workers up until it is opened. It reaches worker processes as a captured variable does."""

    def __init__(self) -> None:
        self.channel: Channel[Any] = Channel(1, across="processes")

    def wait(self, value: Any = None) -> Any:
        """Called by the worker; gives ``value``."""
        for _ in self.channel:
            raise AssertionError("nothing is ever put into a gate")
        return value

    def wait_held(self, workers: int = 1) -> None:
        """Returns once so many workers are held up."""
        wait_blocked(self.channel, readers=workers)

    def open(self) -> None:
        self.channel.close()

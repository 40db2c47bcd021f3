"""Define the channels between a child and the program that started it."""

from __future__ import annotations

from typing import Any, NamedTuple

from flowchan import Channel
from flowchan.pipelines.marshalled import Marshalled


class SentOnce(Marshalled[Any]):
    """Large value, which is written to shared memory once and which several children read there."""


class ChildLinks(NamedTuple):
    """Number, speed and channels of one child. The child's worker gets this tuple as its only item.

    The program owns the channels and closes them when the child has exited.

    Attributes:
        number: Number of the child.
        speed: Relative speed of the child's host.
        down: Carries the child's function and then the values that the program sends.
        up: Carries the values that the child sends.
        joins: Carries the numbered messages of ``join``.
        answers: Carries the numbers of the messages that ``pause`` has received.
        reports: Carries pairs of a child's number and either its process ID or text that it has printed. All
            children share this channel.
    """

    number: int
    speed: float
    down: Channel[Any]
    up: Channel[Any]
    joins: Channel[tuple[int, Any]]
    answers: Channel[int]
    reports: Channel[tuple[int, int | str]]

    def close(self) -> None:
        """Close the channels of this child. Values in a channel can still be received."""
        for channel in (self.down, self.up, self.joins, self.answers):
            channel.close()

    def flush(self) -> None:
        """Wait until the program has received everything that the child sent."""
        for channel in (self.up, self.answers, self.reports):
            channel.flush()

"""The channels between a child and the program that started it."""

from __future__ import annotations

from typing import Any, NamedTuple

from flowchan import Channel
from flowchan.pipelines.marshalled import Marshalled


class SentOnce(Marshalled[Any]):
    """Large value for several children on this machine. Its memory is written once and read in place."""


class ChildLinks(NamedTuple):
    """Number, speed and channels of one child: the item of its worker.

    The program owns the channels and closes them when the child has ended.

    Attributes:
        number: Number of the child.
        speed: Relative speed of its host.
        down: The child's program, then the values that the program sends.
        up: Values that the child sends.
        joins: Numbered messages of ``join``.
        answers: Numbers of the messages that ``pause`` has returned.
        reports: Pairs of a child's number and its process id or printed text; all children share it.
    """

    number: int
    speed: float
    down: Channel[Any]
    up: Channel[Any]
    joins: Channel[tuple[int, Any]]
    answers: Channel[int]
    reports: Channel[tuple[int, int | str]]

    def close(self) -> None:
        """Close the channels of this child. Values that were sent can still be received."""
        for channel in (self.down, self.up, self.joins, self.answers):
            channel.close()

    def flush(self) -> None:
        """Wait until the program has everything that the child has sent."""
        for channel in (self.up, self.answers, self.reports):
            channel.flush()

"""Define the stream that closes a loop of a graph."""

from __future__ import annotations

from typing import TypeVar

from flowchan.declare.stream import Stream, origins, streams_argument
from flowchan.declare.values import Origin

T = TypeVar("T")


class Feedback(Stream[T]):
    """Stream whose writer is declared later and named by :meth:`feed`. A ``graph.stage`` must read it."""

    __slots__ = ()

    def feed(self, stream: Stream[T]) -> None:
        """Close the loop: the reader of this feedback receives the items of ``stream``.

        This call counts as the one reader of ``stream``.

        Args:
            stream: Stream that a stage of the same graph writes.

        Raises:
            TypeError: ``stream`` is not a stream that a stage writes.
            ValueError: This feedback already has a writer.

        Example:
            again = graph.feedback()
            work, done = graph.stage(steer, start, again)
            again.feed(work.map(step))
        """
        streams_argument("feed", (stream,))
        if isinstance(stream, Feedback):
            raise TypeError(f"feed: stream must be the stream of a stage, got {stream!r}")
        fed_by = self.graph._loops[self._origin].fed_by
        if fed_by is not None:
            raise ValueError(f"{self!r} is already fed by {str(fed_by)!r}; declare another graph.feedback()")
        self.graph._feed(self._origin, *origins(self.graph, stream))

    def _own(self, call: str) -> Origin:
        raise ValueError(
            f"{call}: {self!r} is a feedback without a stage; call {call} on the stream that feeds it"
        )

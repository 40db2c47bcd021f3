"""Define the stream that forms a loop in a graph."""

from __future__ import annotations

from typing import TypeVar

from flowchan.declare.stream import Stream
from flowchan.declare.stream_handle import origins, streams_argument
from flowchan.declare.values import Origin
from flowchan.public import public

T = TypeVar("T")


@public
class Feedback(Stream[T]):
    """Stream whose writer is declared later, with :meth:`feed`. Only a ``graph.stage`` can read it.

    Example:
        >>> from flowchan import Graph, In, Out
        >>> def countdown(start: In[int], again: In[int], work: Out[int], done: Out[str]) -> None:
        ...     number = start.get()
        ...     while number:
        ...         work.put(number)
        ...         number = again.get()
        ...     done.put("done")
        >>> graph = Graph()
        >>> again = graph.feedback()
        >>> work, done = graph.stage(countdown, graph.source([3]), again)
        >>> again.feed(work.map(lambda number: number - 1))
        >>> result = done.collect()
        >>> graph.run()[result]
        ['done']
    """

    __slots__ = ()

    def feed(self, stream: Stream[T]) -> None:
        """Close the loop by sending the items of ``stream`` to the stage that reads this feedback.

        The feedback becomes the only reader of ``stream``.

        Args:
            stream: Stream that a stage of the same graph writes.

        Raises:
            TypeError: ``stream`` is not a stream, or is itself a feedback stream.
            ValueError: This feedback already has a writer.

        Example:
            >>> from flowchan import Graph, In, Out
            >>> def retry_once(items: In[int], again: In[int], work: Out[int]) -> None:
            ...     work.put(items.get())
            ...     print(again.get())
            >>> graph = Graph()
            >>> again = graph.feedback()
            >>> work = graph.stage(retry_once, graph.source([1]), again)
            >>> again.feed(work.map(lambda number: number + 1))
            >>> results = graph.run()
            2
        """
        streams_argument("feed", (stream,))
        if isinstance(stream, Feedback):
            raise TypeError(f"feed: stream must be the output of a stage, got {stream!r}")
        fed_by = self.graph._loops[self._origin].fed_by
        if fed_by is not None:
            raise ValueError(f"{self!r} is already fed by {str(fed_by)!r}; declare another graph.feedback()")
        self.graph._feed(self._origin, *origins(self.graph, stream))

    def _own(self, call: str) -> Origin:
        raise ValueError(
            f"{call}: {self!r} is a feedback stream, which no stage writes to; "
            f"call {call} on the stream that feeds it"
        )

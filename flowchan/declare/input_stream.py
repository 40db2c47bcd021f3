"""Define the stream into which the program puts items while the graph runs."""

from __future__ import annotations

from typing import TypeVar

from flowchan.declare.stream import Stream
from flowchan.public import public

T = TypeVar("T")


@public
class Input(Stream[T]):
    """Stream of items that the program puts into ``run[stream]`` while the graph runs.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> words = graph.input()
        >>> lengths = words.map(len).collect()
        >>> with graph.start() as run:
        ...     run[words].put_many(["a", "bb"])
        >>> run.wait()[lengths]
        [1, 2]
    """

    __slots__ = ()

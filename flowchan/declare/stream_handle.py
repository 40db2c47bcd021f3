"""Define the handle of an output channel, without the methods that declare further stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

from flowchan.declare.annotations import type_name
from flowchan.declare.builder import Builder
from flowchan.declare.values import Origin
from flowchan.items.arguments import refuses_misspelt, whole
from flowchan.items.text import shown

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True, repr=False)
class StreamHandle(Generic[T_co]):
    """Handle of a stage's output channel. Two handles for the same port are equal."""

    graph: Builder
    stage: str
    port: str
    name: str = field(compare=False)
    item: Any = field(default=None, compare=False)

    def __repr__(self) -> str:
        kind = "" if self.item is None else f" of {type_name(self.item)}"
        return f"<Stream {self.name!r}{kind} in graph {self.graph.name!r}>"

    @refuses_misspelt("buffer")
    def buffer(self, capacity: int) -> Self:
        """Set the capacity of this stream's channel, without adding a stage.

        Args:
            capacity: Capacity in items, at least 1.

        Returns:
            This stream.

        Raises:
            TypeError: ``capacity`` is not an int.
            ValueError: ``capacity`` is less than 1, or this stream is a feedback stream.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> text = graph.source(range(3)).map(str).buffer(8).collect()
            >>> [edge.capacity for edge in graph.edges if edge.reader == "collect"]
            [8]
        """
        self.graph._resize(self._own("buffer"), whole("buffer", "capacity", capacity, 1))
        return self

    @property
    def _origin(self) -> Origin:
        return Origin(self.stage, self.port)

    def _own(self, call: str) -> Origin:
        """Return the origin of this stream. A feedback stream, which no stage writes to, raises an error."""
        return self._origin


def streams_argument(call: str, values: tuple[Any, ...]) -> tuple[StreamHandle[Any], ...]:
    """Return the values, or raise ``TypeError`` unless all of them are streams."""
    for index, value in enumerate(values, 1):
        if not isinstance(value, StreamHandle):
            hint = f"; write {call}(*streams)" if isinstance(value, (list, tuple, set)) else ""
            raise TypeError(f"{call}: argument {index} must be a stream, got {shown(value)}{hint}")
    return values


def origins(graph: Builder, *streams: StreamHandle[Any]) -> tuple[Origin, ...]:
    """Return the origins of these streams as inputs for a stage of ``graph``."""
    return tuple(
        stream._origin if stream.graph is graph else graph._is_foreign(stream.name, stream.graph)
        for stream in streams
    )

"""The declaration of a graph: how its stages begin. Nothing here runs."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, TypeVar, Unpack

from flowchan.declare.annotations import element_type, returned_type
from flowchan.declare.general import General
from flowchan.declare.options import SOURCE_OPTIONS, PlainOptions, shows
from flowchan.declare.placements import PlacementOption
from flowchan.declare.shapes import Many, SourceObject
from flowchan.declare.stream import Feedback, Input, Stream, origins, streams_argument, streams_of
from flowchan.declare.values import DEFAULT_CAPACITY, DEFAULT_RESTARTS
from flowchan.items.arguments import known_options, no_misspelt_option, refuses_misspelt, text
from flowchan.items.text import shown

T = TypeVar("T")


class Blueprint(General):
    """A graph as declared: its ``name``, the stages in the order of declaration, and the channels between
    them.

    Stages are declared by :meth:`source`, :meth:`input`, :meth:`merge`, :meth:`stage` and by the operators
    of the
    ``Stream`` values which these return. :meth:`feedback` lets a graph lead back.
    """

    @refuses_misspelt("Graph")
    def __init__(self, name: str = "graph") -> None:
        super().__init__(name)
        self._started: set[str] = set()  # stages that a run has started: an iterator of theirs is read

    def source(
        self,
        items: Iterable[T] | Callable[..., Many[T]] | type[SourceObject[Many[T]]],
        *args: Any,
        name: str | None = None,
        on: PlacementOption = "thread",
        capacity: int = DEFAULT_CAPACITY,
        restarts: int = DEFAULT_RESTARTS,
        restartable: bool = False,
        gpus: int = 0,
        **kwargs: Any,
    ) -> Stream[T]:
        """A stream of the elements of ``items``: an iterable, or a callable that gives one when it is called
        with ``args`` and ``kwargs`` inside the run. An async generator function is cancelled where it awaits
        as soon as nobody wants its elements any more. ``restartable``: iterating again gives the same
        elements, so a worker process that died may be replaced, up to ``restarts`` times, by one that goes on
        behind what is out already. ``gpus``: that its worker has for itself."""
        function: Callable[..., Any] | None = None
        options: dict[str, Any] = {}
        if callable(items) and (args or kwargs or not isinstance(items, Iterable)):
            no_misspelt_option("source", items, kwargs, SOURCE_OPTIONS)
            function, item = items, element_type(returned_type(items))
        elif not isinstance(items, Iterable) and not hasattr(items, "__getitem__"):
            if isinstance(items, AsyncIterable):
                raise TypeError(
                    "source: give the function, to be called inside the run, and its arguments, "
                    f"not {shown(items)}: "
                    "graph.source(tail, path)"
                )
            raise TypeError(
                f"source: items must be an iterable or a callable that gives one, not {shown(items)}"
            )
        elif args or kwargs:
            known_options("source", kwargs, SOURCE_OPTIONS)
            raise TypeError(f"source: items is not callable, so it takes no more arguments: {shown(items)}")
        else:
            options, item = {"iterable": items}, element_type(type(items))
        stage = self._declare(
            "source",
            name=name,
            function=function,
            args=args,
            kwargs=kwargs,
            options=options,
            input_ports=(),
            outputs=[("out", item)],
            capacity=capacity,
            on=on,
            restarts=restarts,
            restartable=restartable,
            gpus=gpus,
        )
        return streams_of(self, stage)[0]

    @refuses_misspelt("input")
    def input(self, name: str | None = None, capacity: int = DEFAULT_CAPACITY) -> Input[Any]:
        """A stream of the items that are put from outside while the graph runs."""
        stage = self._declare("input", name=name, input_ports=(), outputs=[("out", None)], capacity=capacity)
        (out,) = stage.outputs
        return Input(self, stage.name, out.port, out.name)

    @shows(PlainOptions)
    def merge(self, *streams: Stream[T], **options: Unpack[PlainOptions]) -> Stream[T]:
        """The items of all streams, as they come; it ends when the last of them ends."""
        known_options("merge", options, PlainOptions.__annotations__)
        if not streams:
            raise TypeError("merge: give at least one stream")
        items = [stream.item for stream in streams_argument("merge", streams)]
        stage = self._declare(
            "merge",
            inputs=origins(self, *streams),
            input_ports=[str(port) for port in range(len(streams))],
            outputs=[("out", items[0] if all(item == items[0] for item in items) else None)],
            **options,
        )
        return streams_of(self, stage)[0]

    @refuses_misspelt("feedback")
    def feedback(self, name: str = "feedback") -> Feedback[Any]:
        """A stream of the items that a stage declared later puts: how a graph leads back. A :meth:`stage`
        reads it, and ``feedback.feed(stream)`` says what it is once that stage is declared. ``name`` stands
        for it in messages.

        A loop has no source that ends it. Its stages end it, one of them by returning when its work is done:
        then its outputs close, and the others see the end of their inputs."""
        return Feedback(self, *self._leads_back(text("feedback", "name", name)), name)

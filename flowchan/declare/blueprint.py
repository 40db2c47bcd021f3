"""Declare the sources and inputs of a graph, and join streams with merges and feedback loops."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Callable, Iterable
from typing import Any, TypeVar, Unpack

from flowchan.declare.annotations import element_type, returned_type
from flowchan.declare.broadcast import Broadcast
from flowchan.declare.feedback import Feedback
from flowchan.declare.general import General
from flowchan.declare.input_stream import Input
from flowchan.declare.options import SOURCE_OPTIONS, PlainOptions, shows
from flowchan.declare.placements import PlacementOption
from flowchan.declare.shapes import Many, SourceObject
from flowchan.declare.stream import Stream, streams_of
from flowchan.declare.stream_handle import origins, streams_argument
from flowchan.declare.values import DEFAULT_CAPACITY, DEFAULT_RESTARTS, Edge
from flowchan.items.arguments import known_options, no_misspelt_option, refuses_misspelt, text
from flowchan.items.recording import MAX_BYTES, MOST, recording_options
from flowchan.items.text import shown
from flowchan.items.tracebacks import methods_end_at_caller

T = TypeVar("T")


@methods_end_at_caller
class Blueprint(General):
    """Declared graph: a name, stages in declaration order, and the channels between them.

    :meth:`source`, :meth:`input`, :meth:`merge`, :meth:`stage` and the operators of ``Stream`` declare
    stages. :meth:`feedback` declares a loop.
    """

    @refuses_misspelt("Graph")
    def __init__(self, name: str = "graph") -> None:
        super().__init__(name)
        self._started: set[str] = set()  # stages whose iterators earlier runs have used up
        self._broadcasts: list[Broadcast[Any]] = []

    def source(
        self,
        items: Iterable[T] | Callable[..., Many[T]] | type[SourceObject[Many[T]]],
        *args: Any,
        name: str | None = None,
        on: PlacementOption = "thread",
        capacity: int = DEFAULT_CAPACITY,
        restarts: int = DEFAULT_RESTARTS,
        restartable: bool = False,
        gpus: float = 0,
        **kwargs: Any,
    ) -> Stream[T]:
        """Declare a stage that emits the elements of an iterable.

        Args:
            items: Iterable, or a callable that returns an iterable. The callable may be an async generator
                function. The run calls the callable; checking or drawing the graph does not call it.
            *args: Positional arguments for the callable.
            name: Name of the stage (default: the name of the callable, or ``"source"``).
            on: Placement of the worker: ``"thread"`` (default), ``"process"``, ``"hosts"`` or a pool of
                hosts.
            capacity: Capacity of the output channel in items (default: 64).
            restarts: Maximum number of dead worker processes that are replaced within 60 seconds of work
                (default: 10).
            restartable: True if a second iteration yields the same elements (default: False). A dead worker
                process is then replaced, and the replacement skips the elements already emitted.
            gpus: Number of GPUs reserved for the worker (default: 0). A number below 1 is a share of one GPU.
                Requires a worker process.
            **kwargs: Keyword arguments for the callable.

        Returns:
            The stream of the elements.

        Raises:
            TypeError: ``items`` is neither iterable nor callable, or an option is unknown.
            ValueError: An option is out of range.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> numbers = graph.source(range(3)).collect()
            >>> same = graph.source(range, 3, on="process").collect()
            >>> results = graph.run()
            >>> results[numbers], results[same]
            ([0, 1, 2], [0, 1, 2])
        """
        function: Callable[..., Any] | None = None
        options: dict[str, Any] = {}
        if callable(items) and (args or kwargs or not isinstance(items, Iterable)):
            no_misspelt_option("source", items, kwargs, SOURCE_OPTIONS)
            function, item = items, element_type(returned_type(items))
        elif not isinstance(items, Iterable) and not hasattr(items, "__getitem__"):
            if isinstance(items, AsyncIterable):
                raise TypeError(
                    f"source: items must be an iterable or a callable, got {shown(items)}; pass the async "
                    "generator function and its arguments: graph.source(tail, path)"
                )
            raise TypeError(
                f"source: items must be an iterable or a callable that returns one, got {shown(items)}"
            )
        elif args or kwargs:
            known_options("source", kwargs, SOURCE_OPTIONS)
            raise TypeError(f"source: items must be a callable if arguments are passed, got {shown(items)}")
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
        """Declare a stream into which the program puts items while the graph runs.

        Args:
            name: Name of the stage (default: ``"input"``).
            capacity: Capacity of the channel in items (default: 64).

        Returns:
            The stream. Put items into ``run[stream]``.

        Raises:
            TypeError: An argument has the wrong type, or its name is unknown.
            ValueError: ``capacity`` is less than 1.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> questions = graph.input("questions")
            >>> answers = questions.map(str.upper).collect()
            >>> with graph.start() as run:
            ...     run[questions].put("why?")
            >>> run.wait()[answers]
            ['WHY?']
        """
        stage = self._declare("input", name=name, input_ports=(), outputs=[("out", None)], capacity=capacity)
        (out,) = stage.outputs
        return Input(self, stage.name, out.port, out.name)

    @refuses_misspelt("broadcast")
    def broadcast(self, initial: T) -> Broadcast[T]:
        """Create a value that all workers read and that the program can change while the graph runs.

        Workers in threads and processes on this machine can read the value. A graph with such a value cannot
        have stages on hosts.

        Args:
            initial: The first version of the value, which must be picklable if the graph has worker
                processes.

        Returns:
            The value, with the methods ``get()`` and ``set(value)``.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> limit = graph.broadcast(3)
            >>> small = graph.source(range(10)).filter(lambda n: n < limit.get()).collect()
            >>> graph.run()[small]
            [0, 1, 2]
        """
        value = Broadcast((self.name, str(self.where), len(self._broadcasts) + 1), initial)
        self._broadcasts.append(value)
        return value

    @shows(PlainOptions)
    def merge(self, *streams: Stream[T], **options: Unpack[PlainOptions]) -> Stream[T]:
        """Declare a stage that emits the items of several streams in order of arrival.

        Args:
            *streams: Streams of this graph, at least one.
            **options: ``name`` (str) and ``capacity`` (in items; default: 64) of the stage.

        Returns:
            One stream, which ends when all inputs have ended.

        Raises:
            TypeError: An argument is not a stream, or no stream was passed.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> both = graph.merge(graph.source([1, 2]), graph.source([3])).collect()
            >>> sorted(graph.run()[both])
            [1, 2, 3]
        """
        known_options("merge", options, PlainOptions.__annotations__)
        if not streams:
            raise TypeError("merge: streams must contain at least one stream, got none")
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
        """Declare a stream whose writer is declared later, to form a loop.

        Only a stage with ports can read the stream. The end of a source does not end a loop. One of the
        loop's stages must therefore return when the work is done. The run then closes the outputs of this
        stage, which ends the inputs of the other stages.

        Args:
            name: Name of the loop in messages (default: ``"feedback"``).

        Returns:
            The stream. Call ``feed(stream)`` on it to close the loop.

        Raises:
            TypeError: ``name`` is not a string.

        Example:
            >>> from flowchan import Graph, In, Out
            >>> def countdown(start: In[int], again: In[int], work: Out[int]) -> None:
            ...     number = start.get()
            ...     while number:
            ...         print(number)
            ...         work.put(number)
            ...         number = again.get()
            >>> graph = Graph()
            >>> again = graph.feedback()
            >>> work = graph.stage(countdown, graph.source([2]), again)
            >>> again.feed(work.map(lambda number: number - 1))
            >>> results = graph.run()
            2
            1
        """
        return Feedback(self, *self._leads_back(text("feedback", "name", name)), name)

    @refuses_misspelt("record")
    def record(
        self, channel: str, path: str | os.PathLike[str], *, most: int = MOST, max_bytes: int = MAX_BYTES
    ) -> None:
        """Record the items of one channel in a file. Each later run overwrites the file.

        The call inserts a stage between the channel's writer and reader. The stage runs on a thread of the
        program, writes each item to the file and passes it on. At a limit, or if an item cannot be written,
        recording stops with a warning and the run continues. Declare all other stages before this call.

        Args:
            channel: Name of the channel, as in pictures and in ``run.stats()``.
            path: Path of the file. :class:`Recording` reads it.
            most: Maximum number of items in the file (default: 1,000,000).
            max_bytes: Maximum size of the file in bytes (default: 1,000,000,000).

        Raises:
            TypeError: An argument has the wrong type, or its name is unknown.
            ValueError: No stage reads a channel with this name, or not all workers share the channel. The
                error is also raised if the file cannot be written or a limit is out of range.

        Example:
            >>> import os, tempfile
            >>> from flowchan import Graph, Recording
            >>> path = os.path.join(tempfile.mkdtemp(), "words.rec")
            >>> graph = Graph()
            >>> lengths = graph.source(["a", "bb", "ccc"], name="words").map(len).collect()
            >>> graph.record("words", path, most=2)
            >>> graph.run()[lengths]
            [1, 2, 3]
            >>> list(Recording(path))
            ['a', 'bb']
        """
        edge = self._recordable(text("record", "channel", channel))
        recording = recording_options(path, self.name, channel, most, max_bytes)
        self._insert("record", edge, {"recording": recording})

    def _recordable(self, channel: str) -> Edge:
        edges = {edge.name: edge for edge in self.edges if edge.reader is not None and self._is_shared(edge)}
        if channel not in edges:
            names = ", ".join(map(repr, edges)) or "none"
            raise ValueError(
                f"record: channel must be one of {names} (the channels that all workers of the writer and "
                f"the reader share), got {channel!r}"
            )
        return edges[channel]

    def _is_shared(self, edge: Edge) -> bool:
        """Return whether all workers of the writer and of the reader use this one channel."""
        writer, reader = self.stage_named(edge.writer), self.stage_named(edge.reader or "")
        return not (edge.to_worker or writer.output_per_worker or writer.service or reader.service)

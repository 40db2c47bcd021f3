"""Define streams: handles of output channels, with the operators that declare the next stage.

Declaring runs nothing. Each operator adds one frozen ``Stage`` to the graph and returns the handle of its
output. An argument that is wrong on its own raises ``TypeError`` or ``ValueError`` at the caller's line.
``check`` reports the errors that only the whole graph shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, Unpack, overload

from flowchan.declare.annotations import element_type, returned_type, type_name
from flowchan.declare.builder import Builder
from flowchan.declare.options import (
    ItemOptions,
    NameOption,
    OrderedOptions,
    PlainOptions,
    WorkOptions,
    shows,
)
from flowchan.declare.shapes import AnyFunction, Awaited, Built, Effect, Fold, Many
from flowchan.declare.values import Origin, Stage
from flowchan.items.arguments import callable_argument, known_options, refuses_misspelt, seconds, whole
from flowchan.items.combining import OPERATIONS, Function, Named, Reduced
from flowchan.items.failed import Failed
from flowchan.items.text import shown
from flowchan.items.tracebacks import methods_end_at_caller

_MISSING: Any = object()

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
F_co = TypeVar("F_co", covariant=True)


@methods_end_at_caller
@dataclass(frozen=True, slots=True, repr=False)
class Stream(Generic[T_co]):
    """Output of a stage in a graph, on which you declare the next stage.

    Exactly one stage reads a stream; use :meth:`tee` for several readers. Two handles of the same port are
    equal. For type checkers, a stream of integers is a ``Stream[int]``.

    Attributes:
        graph: Graph that the stream belongs to.
        stage: Name of the stage that writes the stream.
        port: Name of the output port of that stage.
        name: Name of the channel, shown in reports and pictures.
        item: Type of the items, or ``None`` if unknown.

    The operators that call a function for each item share the options that :meth:`map` lists. If the function
    is a class with a ``__call__`` method, each worker builds one instance of it.
    """

    graph: Builder
    stage: str
    port: str
    name: str = field(compare=False)
    item: Any = field(default=None, compare=False)

    def __repr__(self) -> str:
        kind = "" if self.item is None else f" of {type_name(self.item)}"
        return f"<Stream {self.name!r}{kind} in graph {self.graph.name!r}>"

    @overload
    def map(self, function: Awaited[T_co, B], **options: Unpack[OrderedOptions]) -> Tried[B, T_co]: ...
    @overload
    def map(self, function: Built[T_co, B], **options: Unpack[OrderedOptions]) -> Tried[B, T_co]: ...
    @overload
    def map(self, function: Callable[[T_co], B], **options: Unpack[OrderedOptions]) -> Tried[B, T_co]: ...
    @shows(OrderedOptions)
    def map(self, function: AnyFunction, **options: Unpack[OrderedOptions]) -> Stream[Any]:
        """Declare a stage that emits ``function(item)`` for each item.

        Args:
            function: Function of one item, an ``async def`` function, or a class whose instances are called.
                After :meth:`batch` it may return a list as long as the batch. An exception in that list fails
                only the item at its index.
            **options: Keyword options of the stage:
                name (str): Name of the stage (default: the function's name).
                on (str or pool): Placement of the workers: ``"thread"`` (default), ``"process"``, ``"hosts"``
                    for the hosts of ``flowchan run --hosts``, or a pool of ``flowchan.hosts``.
                workers (int): Number of workers (default: 1).
                ordered (bool): Keep the order of the input with several workers (default: True).
                capacity (int): Capacity of the output channel in items (default: 64).
                retries (int): Number of retries of an item for which the function raised (default: 0).
                retry_delay (float): Seconds before each retry (default: 0).
                retry_on (type or tuple): Exception types that trigger a retry (default: all).
                timeout (float): Limit for one item in seconds (default: none). An item that exceeds it fails
                    with ``TimeoutError``. It needs worker processes or an ``async def`` function.
                restarts (int): Maximum number of replacements of dead worker processes in one run (default:
                    10).
                max_deaths (int): Number of worker deaths after which an item counts as failed (default: 3).
                gpus (int): GPUs reserved for each worker process (default: 0, which shares all of them).

        Returns:
            The stream of results. Failed items go to its stream :attr:`errors`, if a stage reads that stream.
            Otherwise the first failure ends the run.

        Raises:
            TypeError: ``function`` cannot be called, or an option has the wrong type or an unknown name.
            ValueError: An option is out of range.

        Example:
            sizes = paths.map(os.path.getsize, workers=4)
            parsed = pages.map(parse, on="process", workers=8, retries=2)
        """
        return self._one("map", function, returned_type, options)

    @overload
    def flat_map(
        self, function: Built[T_co, Many[B]], **options: Unpack[OrderedOptions]
    ) -> Tried[B, T_co]: ...
    @overload
    def flat_map(
        self, function: Callable[[T_co], Many[B]], **options: Unpack[OrderedOptions]
    ) -> Tried[B, T_co]: ...
    @shows(OrderedOptions)
    def flat_map(self, function: AnyFunction, **options: Unpack[OrderedOptions]) -> Stream[Any]:
        """Declare a stage that emits each element of the iterable ``function(item)``.

        Args:
            function: Function that returns an iterable, an async generator function, or a class whose
                instances are called.
            **options: Keyword options of the stage, listed by :meth:`map`.

        Returns:
            The stream of the elements: any number for each item.

        Raises:
            TypeError: ``function`` cannot be called, or an option has the wrong type or an unknown name.
            ValueError: An option is out of range.

        Example:
            words = lines.flat_map(str.split)
        """
        return self._one("flat_map", function, lambda called: element_type(returned_type(called)), options)

    @shows(OrderedOptions)
    def filter(self, function: Effect[T_co], **options: Unpack[OrderedOptions]) -> Tried[T_co, T_co]:
        """Declare a stage that emits the items for which ``function(item)`` is true.

        Args:
            function: Function of one item whose result is tested for truth. It may be an ``async def``
                function or a class whose instances are called.
            **options: Keyword options of the stage, listed by :meth:`map`.

        Returns:
            The stream of the items that pass.

        Raises:
            TypeError: ``function`` cannot be called, or an option has the wrong type or an unknown name.
            ValueError: An option is out of range.

        Example:
            even = numbers.filter(lambda number: number % 2 == 0)
        """
        return self._one("filter", function, lambda _: self.item, options)

    @shows(WorkOptions)
    def sink(self, function: Effect[T_co], **options: Unpack[WorkOptions]) -> None:
        """Declare a stage that calls ``function(item)`` for its side effect. Items leave the graph here.

        The side effect may happen twice for an item whose worker dies.

        Args:
            function: Function of one item; its result is ignored. It may be an ``async def`` function or a
                class whose instances are called.
            **options: Keyword options of the stage, listed by :meth:`map`, without ``ordered`` and
                ``capacity``.

        Raises:
            TypeError: ``function`` cannot be called, or an option has the wrong type or an unknown name.
            ValueError: An option is out of range.

        Example:
            rows.sink(database.insert, workers=2)
        """
        callable_argument("sink", "function", function)
        known_options("sink", options, WorkOptions.__annotations__)
        self._next("sink", (), options, function=function)

    @shows(ItemOptions)
    def partition(
        self, key: Effect[T_co], n: int, **options: Unpack[ItemOptions]
    ) -> tuple[Tried[T_co, T_co], ...]:
        """Declare a stage that divides the items among ``n`` streams by a key.

        Items with equal keys go to the same stream.

        Args:
            key: Function that returns the key of an item.
            n: Number of streams, at least 1.
            **options: Keyword options of the stage, listed by :meth:`map`, without ``ordered``.

        Returns:
            A tuple of ``n`` streams.

        Raises:
            TypeError: ``key`` cannot be called, or an argument has the wrong type or an unknown name.
            ValueError: ``n`` or an option is out of range.

        Example:
            low, high = words.partition(len, 2)
        """
        outputs = [(str(port), self.item) for port in range(whole("partition", "n", n, 1))]
        known_options("partition", options, ItemOptions.__annotations__)
        callable_argument("partition", "key", key)
        return self._next("partition", outputs, options, function=key, own={"n": n}, errors=True)

    @overload
    def reduce(self: Stream[T], function: Fold[T, T], **options: Unpack[NameOption]) -> Tried[T, T]: ...
    @overload
    def reduce(
        self, function: Fold[B, T_co], initial: B, **options: Unpack[NameOption]
    ) -> Tried[B, T_co]: ...
    @shows(NameOption)
    def reduce(
        self, function: Callable[..., Any], initial: Any = _MISSING, **options: Unpack[NameOption]
    ) -> Stream[Any]:
        """Declare a stage that combines all items into one, which is a result of the run.

        Args:
            function: Function of the result so far and an item, which returns the next result.
            initial: First result (default: the first item).
            **options: ``name`` (str) of the stage.

        Returns:
            A stream of one item, the last result. ``graph.run()[stream]`` returns that item. No stage needs
            to read the stream.

        Raises:
            TypeError: ``function`` cannot be called, or an option is unknown.

        Example:
            total = numbers.reduce(lambda total, number: total + number, 0)
            print(graph.run()[total])
        """
        item = returned_type(callable_argument("reduce", "function", function))
        known_options("reduce", options, ("initial", *NameOption.__annotations__))
        own = {} if initial is _MISSING else {"initial": initial}
        return self._next("reduce", [("out", item)], options, function=function, own=own, errors=True)[0]

    @shows(NameOption)
    def collect(self, **options: Unpack[NameOption]) -> Stream[list[T_co]]:
        """Declare a stage that collects all items in a list, which is a result of the run.

        Args:
            **options: ``name`` (str) of the stage.

        Returns:
            A stream of one item, the list. ``graph.run()[stream]`` returns the list. No stage needs to read
            the stream; if none does, ``run.iter(stream)`` yields the items while the run continues.

        Example:
            result = numbers.map(str).collect()
            print(graph.run()[result])
        """
        known_options("collect", options, NameOption.__annotations__)
        return self._next("collect", [("out", _listed(self.item))], options)[0]

    @shows(PlainOptions)
    def batch(
        self, size: int, timeout: float | None = None, **options: Unpack[PlainOptions]
    ) -> Stream[list[T_co]]:
        """Declare a stage that groups items into lists.

        Args:
            size: Number of items in a list, at least 1. The last list may be shorter.
            timeout: Maximum seconds between the first item of a list and its output (default: no limit). When
                the time is over, the stage emits a shorter list.
            **options: ``name`` (str) and ``capacity`` (lists, default: 64) of the stage.

        Returns:
            The stream of lists.

        Raises:
            TypeError: An argument has the wrong type or an unknown name.
            ValueError: ``size``, ``timeout`` or an option is out of range.

        Example:
            predictions = images.batch(32, timeout=0.1).map(Model).unbatch()
        """
        known_options("batch", options, ("timeout", *PlainOptions.__annotations__))
        own = {"size": whole("batch", "size", size, 1), "timeout": seconds("batch", "timeout", timeout)}
        return self._next("batch", [("out", _listed(self.item))], options, own=own)[0]

    @shows(PlainOptions)
    def unbatch(self: Stream[Iterable[T]], **options: Unpack[PlainOptions]) -> Stream[T]:
        """Declare a stage that emits each element of each item.

        Args:
            **options: ``name`` (str) and ``capacity`` (items, default: 64) of the stage.

        Returns:
            The stream of the elements. The items of this stream must be iterables.
        """
        known_options("unbatch", options, PlainOptions.__annotations__)
        return self._next("unbatch", [("out", element_type(self.item))], options)[0]

    @shows(PlainOptions)
    def take(self, n: int, **options: Unpack[PlainOptions]) -> Stream[T_co]:
        """Declare a stage that emits the first ``n`` items, then stops the stages before it without an error.

        Args:
            n: Maximum number of items, at least 0.
            **options: ``name`` (str) and ``capacity`` (items, default: 64) of the stage.

        Returns:
            The stream of at most ``n`` items.

        Raises:
            TypeError: ``n`` is not an int, or an option is unknown.
            ValueError: ``n`` is negative.

        Example:
            first = graph.source(itertools.count()).take(10).collect()
        """
        known_options("take", options, PlainOptions.__annotations__)
        return self._next("take", [("out", self.item)], options, own={"n": whole("take", "n", n, 0)})[0]

    @shows(PlainOptions)
    def tee(self, n: int, **options: Unpack[PlainOptions]) -> tuple[Stream[T_co], ...]:
        """Declare a stage that emits every item on each of ``n`` streams.

        Args:
            n: Number of streams, at least 1.
            **options: ``name`` (str) and ``capacity`` (items, default: 64) of the stage.

        Returns:
            A tuple of ``n`` streams.

        Raises:
            TypeError: ``n`` is not an int, or an option is unknown.
            ValueError: ``n`` is less than 1.
        """
        known_options("tee", options, PlainOptions.__annotations__)
        outputs = [(str(port), self.item) for port in range(whole("tee", "n", n, 1))]
        return self._next("tee", outputs, options, own={"n": n})

    @overload
    def zip(self, a: Stream[A], /, **options: Unpack[PlainOptions]) -> Stream[tuple[T_co, A]]: ...
    @overload
    def zip(
        self, a: Stream[A], b: Stream[B], /, **options: Unpack[PlainOptions]
    ) -> Stream[tuple[T_co, A, B]]: ...
    @overload
    def zip(self, *others: Stream[Any], **options: Unpack[PlainOptions]) -> Stream[tuple[Any, ...]]: ...
    @shows(PlainOptions)
    def zip(self, *others: Stream[Any], **options: Unpack[PlainOptions]) -> Stream[Any]:
        """Declare a stage that emits tuples of one item from each stream, until one stream ends.

        Args:
            *others: Streams to combine with this one.
            **options: ``name`` (str) and ``capacity`` (tuples, default: 64) of the stage.

        Returns:
            The stream of tuples; the item of this stream is first.

        Raises:
            TypeError: An argument is not a stream, or an option is unknown.

        Example:
            pairs = names.zip(ages)
        """
        streams = streams_argument("zip", (self, *others))
        known_options("zip", options, PlainOptions.__annotations__)
        item = GenericAlias(tuple, tuple(Any if stream.item is None else stream.item for stream in streams))
        stage = self.graph._declare(
            "zip",
            inputs=origins(self.graph, *streams),
            input_ports=[str(port) for port in range(len(streams))],
            outputs=[("out", item)],
            **options,
        )
        return streams_of(self.graph, stage)[0]

    @overload
    def allreduce(
        self, op: Literal["mean"], **options: Unpack[PlainOptions]
    ) -> Stream[Reduced[Any]]: ...  # the mean of integers is a float
    @overload
    def allreduce(
        self, op: Named | Function = "sum", **options: Unpack[PlainOptions]
    ) -> Stream[Reduced[T_co]]: ...
    @shows(PlainOptions)
    def allreduce(self, op: str | Function = "sum", **options: Unpack[PlainOptions]) -> Stream[Any]:
        """Declare a stage that combines the items of all workers of this stream's stage, round by round.

        Round k combines the k-th item of every worker that has one, in the order of the workers.
        Dictionaries, lists and tuples are combined element by element. Each worker has its own channel, so
        ``ordered`` has no effect here. To combine several streams, use
        ``graph.merge(*streams).allreduce(op)``.

        Args:
            op: ``"sum"`` (default), ``"mean"``, ``"prod"``, ``"min"``, ``"max"``, ``"and"``, ``"or"``,
                ``"xor"``, or a function of two values.
            **options: ``name`` (str) and ``capacity`` (items, default: 64) of the stage.

        Returns:
            The stream of :class:`Reduced` values, one for each round.

        Raises:
            TypeError: ``op`` is neither a string nor a function, or an option is unknown.
            ValueError: ``op`` is not one of the names above.

        Example:
            gradients = graph.stage(train, batches, workers=4, on="process")
            totals = gradients.allreduce("mean")
        """
        known_options("allreduce", options, ("op", *PlainOptions.__annotations__))
        named = isinstance(op, str)
        if named and op not in OPERATIONS:
            names = ", ".join(map(repr, OPERATIONS))
            raise ValueError(f"allreduce: op must be one of {names} or a function of two values, got {op!r}")
        function = None if named else callable_argument("allreduce", "op", op)
        origin = self._own("allreduce")
        own = {"op": op} if named else {}
        (stream,) = self._next("allreduce", [("out", Reduced)], options, function=function, own=own)
        self.graph._tell_apart(origin)
        return stream

    @refuses_misspelt("buffer")
    def buffer(self, capacity: int) -> Self:
        """Set the capacity of this stream's channel, and return this stream. No stage is added.

        Args:
            capacity: Capacity in items, at least 1.

        Raises:
            TypeError: ``capacity`` is not an int.
            ValueError: ``capacity`` is less than 1, or this stream is a feedback.

        Example:
            images = paths.map(load).buffer(8)
        """
        self.graph._resize(self._own("buffer"), whole("buffer", "capacity", capacity, 1))
        return self

    @property
    def errors(self) -> Stream[Failed[Any]]:
        """Stream of the items that failed in this stream's stage, as ``Failed`` values.

        If no stage reads it, the first failure ends the run.

        Raises:
            AttributeError: The stage calls no function for each item, so no item can fail.

        Example:
            good = lines.map(parse)
            bad = good.errors.map(lambda failed: (failed.item, failed.error)).collect()
        """
        output = self.graph._stage_at(self._own("errors")).errors
        if output is None or self.port == output.port:
            raise AttributeError(
                f"{self!r} has no errors stream; map, flat_map, filter, partition and reduce have one"
            )
        return Stream(self.graph, self.stage, output.port, output.name, output.item)

    def _one(
        self, kind: str, function: Any, item_of: Callable[[Any], Any], options: OrderedOptions
    ) -> Tried[Any, Any]:
        """Declare a stage that calls the user's function for each item and has one output."""
        item = item_of(callable_argument(kind, "function", function))
        known_options(kind, options, OrderedOptions.__annotations__)
        own = {"members": True} if self.graph._gives_lists(self._origin) else None
        return self._next(kind, [("out", item)], options, function=function, own=own, errors=True)[0]

    def _next(
        self,
        kind: str,
        outputs: Sequence[tuple[str, Any]],
        options: NameOption,
        *,
        function: Callable[..., Any] | None = None,
        own: dict[str, Any] | None = None,
        errors: bool = False,
    ) -> tuple[Tried[Any, Any], ...]:
        """Declare a stage that reads this stream, and return its outputs.

        ``own`` holds the options that only its operator has.
        """
        stage = self.graph._declare(
            kind,
            function=function,
            options=own,
            inputs=origins(self.graph, self),
            outputs=outputs,
            errors=errors,
            **options,
        )
        outs: tuple[Any, ...] = streams_of(self.graph, stage)
        return outs

    @property
    def _origin(self) -> Origin:
        return Origin(self.stage, self.port)

    def _own(self, call: str) -> Origin:
        """Return the origin of a stream that a stage writes."""
        return self._origin


if TYPE_CHECKING:

    class Tried(Stream[T_co], Generic[T_co, F_co]):
        """Stream of a stage whose function may fail for an item of type ``F``.

        This class exists for type checkers only. At run time the stream is a plain ``Stream``.
        """

        @property
        def errors(self) -> Stream[Failed[F_co]]:
            """Stream of the items that failed, with their type."""


class Input(Stream[T]):
    """Stream of the items that the program puts into ``run[stream]`` while the graph runs."""

    __slots__ = ()


def streams_argument(call: str, values: tuple[Any, ...]) -> tuple[Stream[Any], ...]:
    """Return the values if all of them are streams, else raise ``TypeError``."""
    for index, value in enumerate(values, 1):
        if not isinstance(value, Stream):
            hint = f"; write {call}(*streams)" if isinstance(value, (list, tuple, set)) else ""
            raise TypeError(f"{call}: argument {index} must be a stream, got {shown(value)}{hint}")
    return values


def streams_of(graph: Builder, stage: Stage) -> tuple[Stream[Any], ...]:
    """Return the handles of a stage's outputs."""
    return tuple(Stream(graph, stage.name, output.port, output.name, output.item) for output in stage.outputs)


def origins(graph: Builder, *streams: Stream[Any]) -> tuple[Origin, ...]:
    """Return the origins that a stage of ``graph`` has as inputs if it reads these streams."""
    return tuple(s._origin if s.graph is graph else graph._is_foreign(s.name, s.graph) for s in streams)


def _listed(item: Any) -> Any:
    return list if item is None else GenericAlias(list, (item,))

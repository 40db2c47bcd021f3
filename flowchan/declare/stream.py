"""A stream: the handle of one output channel of a declared stage, with the operators that declare the next
stage.

Declaring runs nothing. Each operator adds one frozen ``Stage`` to the graph and returns the
handle of its output. Arguments that are wrong by themselves raise at once, ``TypeError`` or ``ValueError``,
by the caller's act; what only the whole graph can tell is left to ``check``.
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

_MISSING: Any = object()

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
F_co = TypeVar("F_co", covariant=True)


@dataclass(frozen=True, slots=True, repr=False)
class Stream(Generic[T_co]):
    """The output ``port`` of the stage named ``stage`` in ``graph``. ``name`` is the channel's name and
    ``item`` the type of its items, ``None`` if unknown. Two handles of the same port are equal. To type
    checkers it is a ``Stream[int]`` if its items are integers.

    One stage reads a stream; several readers ask for :meth:`tee`.

    The operators that call a function for each item share the options of :class:`ItemOptions`. A callable
    class
    is built once per worker.
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
        """``function(item)`` for each item: one output per item. Of a batch it may return a list of as many,
        with an exception in the index of each member that failed: only those count as failed."""
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
        """Each element of the iterable that ``function(item)`` gives: any number of outputs per item."""
        return self._one("flat_map", function, lambda called: element_type(returned_type(called)), options)

    @shows(OrderedOptions)
    def filter(self, function: Effect[T_co], **options: Unpack[OrderedOptions]) -> Tried[T_co, T_co]:
        """The items for which ``function(item)`` is true."""
        return self._one("filter", function, lambda _: self.item, options)

    @shows(WorkOptions)
    def sink(self, function: Effect[T_co], **options: Unpack[WorkOptions]) -> None:
        """``function(item)`` for each item, for its effect. The graph ends here. The item in hand of a worker
        that died is done again."""
        callable_argument("sink", "function", function)
        known_options("sink", options, WorkOptions.__annotations__)
        self._next("sink", (), options, function=function)

    @shows(ItemOptions)
    def partition(
        self, key: Effect[T_co], n: int, **options: Unpack[ItemOptions]
    ) -> tuple[Tried[T_co, T_co], ...]:
        """``n`` streams; items for which ``key(item)`` is equal go to the same one."""
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
        """One item: ``function(so_far, item)`` over all items, beginning with ``initial``, or with the first
        item if there is none. It is a result of the run; no other stage needs to read it."""
        item = returned_type(callable_argument("reduce", "function", function))
        known_options("reduce", options, ("initial", *NameOption.__annotations__))
        own = {} if initial is _MISSING else {"initial": initial}
        return self._next("reduce", [("out", item)], options, function=function, own=own, errors=True)[0]

    @shows(NameOption)
    def collect(self, **options: Unpack[NameOption]) -> Stream[list[T_co]]:
        """One item: the list of all items. It is a result of the run, ``graph.run()[stream]``; no other stage
        needs to read it. While none does, ``run.iter(stream)`` gives the items one by one as they come."""
        known_options("collect", options, NameOption.__annotations__)
        return self._next("collect", [("out", _listed(self.item))], options)[0]

    @shows(PlainOptions)
    def batch(
        self, size: int, timeout: float | None = None, **options: Unpack[PlainOptions]
    ) -> Stream[list[T_co]]:
        """Lists of ``size`` items; the last one may be shorter. A batch that is not full ``timeout`` seconds
        after its first item goes out as it is."""
        known_options("batch", options, ("timeout", *PlainOptions.__annotations__))
        own = {"size": whole("batch", "size", size, 1), "timeout": seconds("batch", "timeout", timeout)}
        return self._next("batch", [("out", _listed(self.item))], options, own=own)[0]

    @shows(PlainOptions)
    def unbatch(self: Stream[Iterable[T]], **options: Unpack[PlainOptions]) -> Stream[T]:
        """Each element of each item; the items are iterables."""
        known_options("unbatch", options, PlainOptions.__annotations__)
        return self._next("unbatch", [("out", element_type(self.item))], options)[0]

    @shows(PlainOptions)
    def take(self, n: int, **options: Unpack[PlainOptions]) -> Stream[T_co]:
        """The first ``n`` items; the stages before it are then stopped, without an error."""
        known_options("take", options, PlainOptions.__annotations__)
        return self._next("take", [("out", self.item)], options, own={"n": whole("take", "n", n, 0)})[0]

    @shows(PlainOptions)
    def tee(self, n: int, **options: Unpack[PlainOptions]) -> tuple[Stream[T_co], ...]:
        """``n`` streams, each with every item."""
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
        """Tuples of one item from each stream, until one of them ends."""
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
    ) -> Stream[Reduced[Any]]: ...  # of integers it is a float
    @overload
    def allreduce(
        self, op: Named | Function = "sum", **options: Unpack[PlainOptions]
    ) -> Stream[Reduced[T_co]]: ...
    @shows(PlainOptions)
    def allreduce(self, op: str | Function = "sum", **options: Unpack[PlainOptions]) -> Stream[Any]:
        """One :class:`Reduced` for each round: round k combines the k-th item of every worker of this
        stream's stage that still has one, in the order of the workers, leaf by leaf through dictionaries,
        lists and tuples. ``op``: "sum", "mean", "prod", "min", "max", "and", "or", "xor", or a function of
        two. Each worker has a channel of its own, so ``ordered`` does not matter here. Several streams:
        ``graph.merge(*streams).allreduce(op)``, whose workers have one of them each."""
        known_options("allreduce", options, ("op", *PlainOptions.__annotations__))
        named = isinstance(op, str)
        if named and op not in OPERATIONS:
            allowed = ", ".join(map(repr, OPERATIONS))
            raise ValueError(f"allreduce: op must be one of {allowed} or a function of two, not {op!r}")
        function = None if named else callable_argument("allreduce", "op", op)
        origin = self._own("allreduce")
        own = {"op": op} if named else {}
        (stream,) = self._next("allreduce", [("out", Reduced)], options, function=function, own=own)
        self.graph._tell_apart(origin)
        return stream

    @refuses_misspelt("buffer")
    def buffer(self, capacity: int) -> Self:
        """This stream, with a channel of ``capacity`` items. It adds no stage."""
        self.graph._resize(self._own("buffer"), whole("buffer", "capacity", capacity, 1))
        return self

    @property
    def errors(self) -> Stream[Failed[Any]]:
        """The items that failed in this stream's stage, as ``Failed`` values. While nobody reads them, a
        failure ends the run. ``AttributeError`` if the stage calls no function of the user's per item."""
        output = self.graph._stage_at(self._own("errors")).errors
        if output is None or self.port == output.port:
            raise AttributeError(
                f"{self!r} has no errors stream; map, flat_map, filter, partition and reduce have one"
            )
        return Stream(self.graph, self.stage, output.port, output.name, output.item)

    def _one(
        self, kind: str, function: Any, item_of: Callable[[Any], Any], options: OrderedOptions
    ) -> Tried[Any, Any]:
        """A stage that calls the user's function for each item and has one output."""
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
        """The outputs of a new stage that reads this stream. ``own``: what only its operator takes."""
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
        """The origin, of a stream that a stage puts."""
        return self._origin


if TYPE_CHECKING:

    class Tried(Stream[T_co], Generic[T_co, F_co]):
        """The stream of a stage that calls a function of the user's with each ``F``: these may fail. At run
        time it is a plain stream."""

        @property
        def errors(self) -> Stream[Failed[F_co]]: ...


class Input(Stream[T]):
    """A stream of the items that the program puts while the graph runs: ``run[stream]`` is where."""

    __slots__ = ()


class Feedback(Stream[T]):
    """A stream whose writer is declared later, which :meth:`feed` names. A ``graph.stage`` reads it."""

    __slots__ = ()

    def feed(self, stream: Stream[T]) -> None:
        """Closes the loop: the items of ``stream`` are what the reader of this feedback gets. ``stream`` then
        has its reader. Raises ``ValueError`` when this feedback is fed already."""
        streams_argument("feed", (stream,))
        if isinstance(stream, Feedback):
            raise TypeError(f"feed: takes the stream of a stage, not {stream!r}")
        fed_by = self.graph._loops[self._origin].fed_by
        if fed_by is not None:
            raise ValueError(f"{self!r} is fed by {str(fed_by)!r} already; ask for another graph.feedback()")
        self.graph._feed(self._origin, *origins(self.graph, stream))

    def _own(self, call: str) -> Origin:
        raise ValueError(f"{call}: {self!r} is what another stage puts; say it of the stream that feeds it")


def streams_argument(call: str, values: tuple[Any, ...]) -> tuple[Stream[Any], ...]:
    """The values, if all of them are streams; else ``TypeError`` naming the first that is not."""
    for index, value in enumerate(values, 1):
        if not isinstance(value, Stream):
            hint = f"; write {call}(*streams)" if isinstance(value, (list, tuple, set)) else ""
            raise TypeError(f"{call}: argument {index} must be a stream, not {shown(value)}{hint}")
    return values


def streams_of(graph: Builder, stage: Stage) -> tuple[Stream[Any], ...]:
    """The handles of a stage's outputs."""
    return tuple(Stream(graph, stage.name, output.port, output.name, output.item) for output in stage.outputs)


def origins(graph: Builder, *streams: Stream[Any]) -> tuple[Origin, ...]:
    """What a stage of ``graph`` that reads these streams has as its inputs."""
    return tuple(
        stream._origin if stream.graph is graph else graph._is_foreign(stream.name, stream.graph)
        for stream in streams
    )


def _listed(item: Any) -> Any:
    return list if item is None else GenericAlias(list, (item,))

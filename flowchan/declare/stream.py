"""A stream: the handle of one output channel of a declared stage, with the verbs that declare the next stage.

Declaring runs nothing. Each verb adds one frozen ``Stage`` to the graph and returns the
handle of its output. Arguments that are wrong by themselves raise at once, ``TypeError`` or ``ValueError``,
by the caller's act; what only the whole graph can tell is left to ``check``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import GenericAlias
from typing import Any, TypedDict, Unpack

from flowchan.declare.annotations import element_type, returned_type, type_name
from flowchan.declare.arguments import callable_argument, known_options, seconds
from flowchan.declare.builder import Builder
from flowchan.declare.places import Placement
from flowchan.declare.values import Origin, Stage
from flowchan.items.combining import OPERATIONS, Function, Reduced
from flowchan.items.text import shown
from flowchan.items.whole import whole

_MISSING: Any = object()


class NameOption(TypedDict, total=False):
    """What every verb takes."""

    name: str | None
    """The stage's name; the function's or the verb's if it is left out."""


class PlainOptions(NameOption, total=False):
    """What a verb takes that has an output and calls no function of the user's."""

    capacity: int
    """Of the output channel, in items; 64 if left out."""


class WorkOptions(NameOption, total=False):
    """What every verb takes that calls a function of the user's for each item."""

    on: Placement
    """Its workers run on a ``"thread"`` (default) or in a ``"process"`` each."""
    workers: int
    """How many of them; 1 if left out."""
    retries: int
    """How many times an item for which the function raised is tried again; 0 if left out."""
    restarts: int
    """How many worker processes that died are replaced, over the whole run; 10 if left out."""
    max_deaths: int
    """With how many workers an item may die before it counts as failed itself; 3 if left out."""
    gpus: int
    """That each worker, in a process of its own, has for itself; 0 if left out: it sees what the program, or
    its host, sees."""


class ItemOptions(WorkOptions, total=False):
    """The same for a verb with an output."""

    capacity: int
    """Of the output channel, in items; 64 if left out."""


class OrderedOptions(ItemOptions, total=False):
    """The same for a verb that can keep the order of its input."""

    ordered: bool
    """Whether several workers together keep it; true if left out."""


@dataclass(frozen=True, slots=True, repr=False)
class Stream:
    """The output ``port`` of the stage named ``stage`` in ``graph``. ``name`` is the channel's name and
    ``item`` the type of its items, ``None`` if unknown. Two handles of the same port are equal.

    One stage reads a stream; several readers ask for :meth:`tee`.

    The verbs that call a function for each item share the options of :class:`ItemOptions`. A callable class
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

    def map(self, function: Callable[..., Any], **options: Unpack[OrderedOptions]) -> Stream:
        """``function(item)`` for each item: one output per item."""
        return self._one("map", function, returned_type, options)

    def flat_map(self, function: Callable[..., Any], **options: Unpack[OrderedOptions]) -> Stream:
        """Each element of the iterable that ``function(item)`` gives: any number of outputs per item."""
        return self._one("flat_map", function, lambda called: element_type(returned_type(called)), options)

    def filter(self, function: Callable[..., Any], **options: Unpack[OrderedOptions]) -> Stream:
        """The items for which ``function(item)`` is true."""
        return self._one("filter", function, lambda _: self.item, options)

    def sink(self, function: Callable[..., Any], **options: Unpack[WorkOptions]) -> None:
        """``function(item)`` for each item, for its effect. The graph ends here. The item in hand of a worker
        that died is done again."""
        callable_argument("sink", "function", function)
        known_options("sink", options, WorkOptions.__annotations__)
        self._next("sink", (), options, function=function)

    def partition(
        self, key: Callable[..., Any], n: int, **options: Unpack[ItemOptions]
    ) -> tuple[Stream, ...]:
        """``n`` streams; items for which ``key(item)`` is equal go to the same one."""
        outputs = [(str(port), self.item) for port in range(whole("partition", "n", n, 1))]
        known_options("partition", options, ItemOptions.__annotations__)
        callable_argument("partition", "key", key)
        return self._next("partition", outputs, options, function=key, own={"n": n}, errors=True)

    def reduce(
        self, function: Callable[..., Any], initial: Any = _MISSING, **options: Unpack[NameOption]
    ) -> Stream:
        """One item: ``function(so_far, item)`` over all items, beginning with ``initial``, or with the first
        item if there is none. It is a result of the run; no other stage needs to read it."""
        item = returned_type(callable_argument("reduce", "function", function))
        known_options("reduce", options, ("initial", *NameOption.__annotations__))
        own = {} if initial is _MISSING else {"initial": initial}
        return self._next("reduce", [("out", item)], options, function=function, own=own, errors=True)[0]

    def collect(self, **options: Unpack[NameOption]) -> Stream:
        """One item: the list of all items. It is a result of the run, ``graph.run()[stream]``; no other stage
        needs to read it. While none does, ``run.iter(stream)`` gives the items one by one as they come."""
        known_options("collect", options, NameOption.__annotations__)
        return self._next("collect", [("out", _listed(self.item))], options)[0]

    def batch(self, size: int, timeout: float | None = None, **options: Unpack[PlainOptions]) -> Stream:
        """Lists of ``size`` items; the last one may be shorter. A batch that is not full ``timeout`` seconds
        after its first item goes out as it is."""
        known_options("batch", options, ("timeout", *PlainOptions.__annotations__))
        own = {"size": whole("batch", "size", size, 1), "timeout": seconds("batch", "timeout", timeout)}
        return self._next("batch", [("out", _listed(self.item))], options, own=own)[0]

    def unbatch(self, **options: Unpack[PlainOptions]) -> Stream:
        """Each element of each item; the items are iterables."""
        known_options("unbatch", options, PlainOptions.__annotations__)
        return self._next("unbatch", [("out", element_type(self.item))], options)[0]

    def take(self, n: int, **options: Unpack[PlainOptions]) -> Stream:
        """The first ``n`` items; the stages before it are then stopped, without an error."""
        known_options("take", options, PlainOptions.__annotations__)
        return self._next("take", [("out", self.item)], options, own={"n": whole("take", "n", n, 0)})[0]

    def tee(self, n: int, **options: Unpack[PlainOptions]) -> tuple[Stream, ...]:
        """``n`` streams, each with every item."""
        known_options("tee", options, PlainOptions.__annotations__)
        outputs = [(str(port), self.item) for port in range(whole("tee", "n", n, 1))]
        return self._next("tee", outputs, options, own={"n": n})

    def zip(self, *others: Stream, **options: Unpack[PlainOptions]) -> Stream:
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

    def allreduce(self, op: str | Function = "sum", **options: Unpack[PlainOptions]) -> Stream:
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

    def buffer(self, capacity: int) -> Stream:
        """This stream, with a channel of ``capacity`` items. It adds no stage."""
        self.graph._resize(self._own("buffer"), whole("buffer", "capacity", capacity, 1))
        return self

    @property
    def errors(self) -> Stream:
        """The items that failed in this stream's stage, as ``Failed`` values. While nobody reads them, a
        failure ends the run. ``AttributeError`` if the stage calls no function of the user's per item."""
        output = self.graph._stage_at(self._own("errors")).errors
        if output is None or self.port == output.port:
            raise AttributeError(
                f"{self!r} has no errors stream; map, flat_map, filter, partition and reduce have one"
            )
        return Stream(self.graph, self.stage, output.port, output.name, output.item)

    def _one(
        self, kind: str, function: Callable[..., Any], item_of: Callable[[Any], Any], options: OrderedOptions
    ) -> Stream:
        """A stage that calls the user's function for each item and has one output."""
        item = item_of(callable_argument(kind, "function", function))
        known_options(kind, options, OrderedOptions.__annotations__)
        return self._next(kind, [("out", item)], options, function=function, errors=True)[0]

    def _next(
        self,
        kind: str,
        outputs: Sequence[tuple[str, Any]],
        options: NameOption,
        *,
        function: Callable[..., Any] | None = None,
        own: dict[str, Any] | None = None,
        errors: bool = False,
    ) -> tuple[Stream, ...]:
        """The outputs of a new stage that reads this stream. ``own``: what only its verb takes."""
        stage = self.graph._declare(
            kind,
            function=function,
            options=own,
            inputs=origins(self.graph, self),
            outputs=outputs,
            errors=errors,
            **options,
        )
        return streams_of(self.graph, stage)

    @property
    def _origin(self) -> Origin:
        return Origin(self.stage, self.port)

    def _own(self, call: str) -> Origin:
        """The origin, of a stream that a stage puts."""
        return self._origin


class Feedback(Stream):
    """A stream whose writer is declared later, which :meth:`feed` names. A ``graph.stage`` reads it."""

    __slots__ = ()

    def feed(self, stream: Stream) -> None:
        """Closes the loop: the items of ``stream`` are what the reader of this feedback gets. ``stream`` then
        has its reader. Raises ``ValueError`` when this feedback is fed already."""
        streams_argument("feed", (stream,))
        if isinstance(stream, Feedback):
            raise TypeError(f"feed: takes the stream of a stage, not {stream!r}")
        fed_by = self.graph.loops[self._origin].fed_by
        if fed_by is not None:
            raise ValueError(f"{self!r} is fed by {str(fed_by)!r} already; ask for another graph.feedback()")
        self.graph._feed(self._origin, *origins(self.graph, stream))

    def _own(self, call: str) -> Origin:
        raise ValueError(f"{call}: {self!r} is what another stage puts; say it of the stream that feeds it")


def streams_argument(call: str, values: tuple[Any, ...]) -> tuple[Stream, ...]:
    """The values, if all of them are streams; else ``TypeError`` naming the first that is not."""
    for place, value in enumerate(values, 1):
        if not isinstance(value, Stream):
            hint = f"; write {call}(*streams)" if isinstance(value, (list, tuple, set)) else ""
            raise TypeError(f"{call}: argument {place} must be a stream, not {shown(value)}{hint}")
    return values


def streams_of(graph: Builder, stage: Stage) -> tuple[Stream, ...]:
    """The handles of a stage's outputs."""
    return tuple(Stream(graph, stage.name, output.port, output.name, output.item) for output in stage.outputs)


def origins(graph: Builder, *streams: Stream) -> tuple[Origin, ...]:
    """What a stage of ``graph`` that reads these streams has as its inputs."""
    return tuple(
        stream._origin if stream.graph is graph else graph._is_foreign(stream.name, stream.graph)
        for stream in streams
    )


def _listed(item: Any) -> Any:
    return list if item is None else GenericAlias(list, (item,))

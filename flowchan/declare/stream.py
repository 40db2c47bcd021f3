"""Define streams: handles of output channels, whose methods declare the next stage.

The declaration of a stage does not run anything. Each method adds a frozen ``Stage`` to the graph, and
returns the handle of the stage's output. An invalid argument raises ``TypeError`` or ``ValueError`` at the
user's line. ``check`` reports errors that can be found only in the whole graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Unpack, overload

from flowchan.declare.annotations import element_type, listed, returned_type
from flowchan.declare.builder import Builder
from flowchan.declare.options import (
    ItemOptions,
    KeyedOptions,
    KeyedSettings,
    NameOption,
    PlainOptions,
    allreduce_options,
    shows,
)
from flowchan.declare.shapes import AnyFunction, Awaited, Built, Effect, Fold, Many, WithState, WithStateLater
from flowchan.declare.stream_end import StreamEnd
from flowchan.declare.stream_handle import origins, streams_argument
from flowchan.declare.values import Stage
from flowchan.declare.window_options import group_options, join_options, window_options
from flowchan.items.arguments import callable_argument, known_options, seconds, whole
from flowchan.items.combining import Function, Named, Reduced
from flowchan.items.failed import Failed
from flowchan.items.tracebacks import methods_end_at_caller
from flowchan.items.window import Window, window_type
from flowchan.public import public

_MISSING: Any = object()

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
F_co = TypeVar("F_co", covariant=True)


@public
@methods_end_at_caller
class Stream(StreamEnd[T_co]):
    """Output of a stage in a graph; its methods declare the next stage.

    Exactly one stage reads a stream; use :meth:`tee` for several readers. Two handles of the same port are
    equal. For type checkers, a stream of integers is a ``Stream[int]``.

    Attributes:
        graph: Graph of the stream.
        stage: Name of the stage that writes the stream.
        port: Name of the output port of that stage.
        name: Name of the channel, shown in reports and pictures.
        item: Type of the items, or ``None`` if unknown.

    All operators that call a function for each item accept the options listed by :meth:`map`. If the function
    is a class with a ``__call__`` method, each worker creates one instance and calls it.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> words = graph.source(["a b", "c"]).flat_map(str.split)
        >>> words
        <Stream 'split' in graph 'graph'>
        >>> result = words.map(str.upper).collect()
        >>> graph.run()[result]
        ['A', 'B', 'C']
    """

    __slots__ = ()

    @overload
    def map(self, function: Awaited[T_co, B], **options: Unpack[KeyedOptions]) -> Tried[B, T_co]: ...
    @overload
    def map(self, function: Built[T_co, B], **options: Unpack[KeyedOptions]) -> Tried[B, T_co]: ...
    @overload
    def map(self, function: Callable[[T_co], B], **options: Unpack[KeyedOptions]) -> Tried[B, T_co]: ...
    @overload
    def map(self, function: WithStateLater[T_co, B], **options: Unpack[KeyedOptions]) -> Tried[B, T_co]: ...
    @overload
    def map(self, function: WithState[T_co, B], **options: Unpack[KeyedOptions]) -> Tried[B, T_co]: ...
    @shows(KeyedOptions, KeyedSettings)
    def map(self, function: AnyFunction, **options: Unpack[KeyedOptions]) -> Stream[Any]:
        """Declare a stage that emits ``function(item)`` for each item.

        Args:
            function: Function with one parameter, an ``async def`` function, or a class whose instances are
                called. A replaced worker process creates a new one. After :meth:`batch`, the function may
                return a list as long as the batch. An exception in it fails only the item with its index.
            **options: Keyword options of the stage:

                name (str): Name of the stage (default: the function's name).
                on (str or pool): Placement of the workers: ``"thread"`` (default), ``"process"``, ``"hosts"``
                    for the hosts of ``flowchan run --hosts``, or a pool of hosts from ``flowchan.hosts``.
                workers (int or "auto"): Number of workers (default: 1); see :func:`~flowchan.auto`.
                ordered (bool): Whether several workers keep the order of the input (default: True).
                capacity (int): Capacity of the output channel in items (default: 64).
                retries (int): Number of times that an item is retried if the function raises (default: 0).
                retry_delay (float): Seconds before each retry (default: 0).
                retry_on (type or tuple): Exception types after which an item is retried (default: all).
                timeout (float): Time limit for one item in seconds (default: none). An item that exceeds it
                    fails with ``TimeoutError``. Requires worker processes or an ``async def`` function.
                rate (float): Maximum number of items that start per second, over all workers (default: no
                    limit). The starts are evenly spaced, and each retry counts as a start.
                share_instance (bool): Whether all coroutines share one instance of a class (default: False).
                restarts (int): Maximum number of dead workers replaced within 60 s of work (default: 10).
                max_deaths (int): Number of worker deaths after which an item counts as failed (default: 3).
                gpus (float): Number of GPUs per worker process (default: 0); below 1, a share of one GPU.
                key (function): Function that returns the key of an item (default: none). Items with equal
                    keys are processed one after another, in stream order.
                concurrency_per_key (int): Maximum number of items of one key that run at once (default: 1).
                state (function): Function that returns the initial state of a key (default: no state). The
                    stage then calls ``function(item, state)`` with a :class:`KeyedState`.

        Returns:
            The stream of results. If a stage reads its :attr:`errors` stream, failed items go there.
            Otherwise the first failure ends the run.

        Raises:
            TypeError: ``function`` cannot be called, or an option has the wrong type or an unknown name.
            ValueError: An option is out of range.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> numbers = graph.source(range(4))
            >>> squares = numbers.map(lambda n: n * n, on="process", workers=2, retries=1).collect()
            >>> graph.run()[squares]
            [0, 1, 4, 9]
        """
        return self._one("map", function, returned_type, options)

    @overload
    def flat_map(self, function: Built[T_co, Many[B]], **options: Unpack[KeyedOptions]) -> Tried[B, T_co]: ...
    @overload
    def flat_map(
        self, function: Callable[[T_co], Many[B]], **options: Unpack[KeyedOptions]
    ) -> Tried[B, T_co]: ...
    @overload
    def flat_map(
        self, function: WithState[T_co, Iterable[B]], **options: Unpack[KeyedOptions]
    ) -> Tried[B, T_co]: ...
    @shows(KeyedOptions, KeyedSettings)
    def flat_map(self, function: AnyFunction, **options: Unpack[KeyedOptions]) -> Stream[Any]:
        """Declare a stage that emits each element of the iterable ``function(item)``.

        Args:
            function: Function that returns an iterable, an async generator function, or a class whose
                instances are called.
            **options: Keyword options of the stage, as for :meth:`map`.

        Returns:
            The stream of the elements. An item may produce any number of them.

        Raises:
            TypeError: ``function`` cannot be called, or an option has the wrong type or an unknown name.
            ValueError: An option is out of range.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> words = graph.source(["a b", "c"]).flat_map(str.split).collect()
            >>> graph.run()[words]
            ['a', 'b', 'c']
        """
        return self._one("flat_map", function, lambda called: element_type(returned_type(called)), options)

    @overload
    def filter(self, function: Effect[T_co], **options: Unpack[KeyedOptions]) -> Tried[T_co, T_co]: ...
    @overload
    def filter(
        self, function: WithState[T_co, object], **options: Unpack[KeyedOptions]
    ) -> Tried[T_co, T_co]: ...
    @shows(KeyedOptions, KeyedSettings)
    def filter(self, function: AnyFunction, **options: Unpack[KeyedOptions]) -> Stream[Any]:
        """Declare a stage that emits the items for which ``function(item)`` is true.

        Args:
            function: Function with one parameter, which may also be an ``async def`` function or a class
                whose instances are called. An item passes if the result is true.
            **options: Keyword options of the stage, as for :meth:`map`.

        Returns:
            The stream of the items that pass.

        Raises:
            TypeError: ``function`` cannot be called, or an option has the wrong type or an unknown name.
            ValueError: An option is out of range.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> even = graph.source(range(6)).filter(lambda number: number % 2 == 0).collect()
            >>> graph.run()[even]
            [0, 2, 4]
        """
        return self._one("filter", function, lambda _: self.item, options)

    @shows(ItemOptions)
    def partition(
        self, key: Effect[T_co], n: int, **options: Unpack[ItemOptions]
    ) -> tuple[Tried[T_co, T_co], ...]:
        """Declare a stage that distributes the items over ``n`` streams by key.

        Items with equal keys go to the same stream.

        Args:
            key: Function that returns the key of an item.
            n: Number of streams, at least 1.
            **options: Keyword options of :meth:`map`, except ``ordered``.

        Returns:
            A tuple of ``n`` streams.

        Raises:
            TypeError: ``key`` cannot be called, or an argument has the wrong type or an unknown name.
            ValueError: ``n`` or an option is out of range.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> even, odd = graph.source(range(6)).partition(lambda number: number, 2)
            >>> even, odd = even.collect(), odd.collect()
            >>> results = graph.run()
            >>> results[even], results[odd]
            ([0, 2, 4], [1, 3, 5])
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
        """Declare a stage that combines all items into one result of the run.

        Args:
            function: Function that takes the result so far and an item, and returns the new result.
            initial: Initial value of the result (default: the first item).
            **options: ``name`` (str) of the stage.

        Returns:
            A stream with one item, the final result. ``graph.run()[stream]`` returns that item. The stream
            does not need a reader.

        Raises:
            TypeError: ``function`` cannot be called, or an option is unknown.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> total = graph.source(range(5)).reduce(lambda total, number: total + number, 0)
            >>> graph.run()[total]
            10
        """
        item = returned_type(callable_argument("reduce", "function", function))
        known_options("reduce", options, ("initial", *NameOption.__annotations__))
        own = {} if initial is _MISSING else {"initial": initial}
        return self._next("reduce", [("out", item)], options, function=function, own=own, errors=True)[0]

    @shows(NameOption)
    def collect(self, **options: Unpack[NameOption]) -> Stream[list[T_co]]:
        """Declare a stage that collects all items in a list as a result of the run.

        Args:
            **options: ``name`` (str) of the stage.

        Returns:
            A stream with one item, the list. ``graph.run()[stream]`` returns the list. The stream does not
            need a reader. If no stage reads it, ``run.iter(stream)`` yields the items during the run.

        Raises:
            TypeError: An option is unknown.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> result = graph.source(range(3)).map(str).collect()
            >>> graph.run()[result]
            ['0', '1', '2']
        """
        known_options("collect", options, NameOption.__annotations__)
        return self._next("collect", [("out", listed(self.item))], options)[0]

    @shows(PlainOptions)
    def batch(
        self, size: int, timeout: float | None = None, **options: Unpack[PlainOptions]
    ) -> Stream[list[T_co]]:
        """Declare a stage that groups items into lists of ``size``.

        Args:
            size: Number of items in a list, at least 1. The last list may be shorter.
            timeout: Maximum seconds from the arrival of a list's first item until the list is emitted,
                possibly with fewer items (default: no limit).
            **options: ``name`` (str) and ``capacity`` (in lists; default: 64) of the stage.

        Returns:
            The stream of lists.

        Raises:
            TypeError: An argument has the wrong type, or its name is unknown.
            ValueError: ``size``, ``timeout`` or an option is out of range.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> sums = graph.source(range(5)).batch(2).map(sum).collect()
            >>> graph.run()[sums]
            [1, 5, 4]
        """
        known_options("batch", options, ("timeout", *PlainOptions.__annotations__))
        own = {"size": whole("batch", "size", size, 1), "timeout": seconds("batch", "timeout", timeout)}
        return self._next("batch", [("out", listed(self.item))], options, own=own)[0]

    @shows(PlainOptions)
    def group_by(
        self, key: Callable[[T_co], Hashable], **options: Unpack[PlainOptions]
    ) -> Tried[Window[T_co], T_co]:
        """Declare a stage that groups all items by key and emits the groups when the stream ends.

        The program keeps all items in memory until the stream ends. For one total per key, a ``map`` with
        ``state=`` needs less memory.

        Args:
            key: Function that returns the key of an item.
            **options: ``name`` (str) and ``capacity`` (in groups; default: 64) of the stage.

        Returns:
            The stream of groups, each a :class:`Window` with ``key`` and ``items``.

        Raises:
            TypeError: ``key`` cannot be called, or an option has the wrong type or an unknown name.
            ValueError: An option is out of range.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> words = graph.source(["apple", "bee", "ant"])
            >>> groups = words.group_by(lambda word: word[0])
            >>> result = groups.map(lambda group: (group.key, group.items), workers=2).collect()
            >>> graph.run()[result]
            [('a', ['apple', 'ant']), ('b', ['bee'])]
        """
        return self._windows(group_options(options, key), {"name": "group_by", **options})

    @shows(PlainOptions)
    def window(
        self, size: int | None = None, *, seconds: float | None = None, every: float | None = None,
        key: Callable[[T_co], Hashable] | None = None, time: Callable[[T_co], float] | None = None,
        allowed_lateness: float = 0.0, **options: Unpack[PlainOptions],
    ) -> Tried[Window[T_co], T_co]:  # fmt: skip
        """Declare a stage that groups items into windows, by count or by time.

        A time window begins at a multiple of ``every``, and is emitted when it is over. With ``time``, a
        window is over when an item's time is at least ``allowed_lateness`` after the window's end. When the
        stream ends, the remaining items are emitted in shorter windows. Every item is in at least one window,
        or is late.

        Args:
            size: Number of items in a window, at least 1. Pass either ``size`` or ``seconds``.
            seconds: Length of a window in seconds.
            every: Distance between the starts of two windows, in items or seconds. The distance is at most
                the length of a window. The default is this length, so that windows do not overlap.
            key: Function that returns the key of an item. Each key then has separate windows (default: one
                key for all items).
            time: Function that returns the time of an item in seconds (default: its arrival time).
            allowed_lateness: Seconds by which an item may lag behind the latest item (default: 0). An item
                whose windows have all been emitted is late and fails with :class:`LateItem`.
            **options: ``name`` (str) and ``capacity`` (in windows; default: 64) of the stage.

        Returns:
            The stream of :class:`Window` values. If a stage reads its :attr:`errors` stream, failed and late
            items go there. Otherwise, the first such item ends the run.

        Raises:
            TypeError: Both or neither of ``size`` and ``seconds`` were passed, or an argument is wrong.
            ValueError: An argument is out of range.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> visits = graph.source([("ada", 1.0), ("bob", 3.0), ("ada", 12.0)])
            >>> windows = visits.window(seconds=10, key=lambda visit: visit[0], time=lambda visit: visit[1])
            >>> counts = windows.map(lambda window: (window.key, window.start, len(window.items))).collect()
            >>> graph.run()[counts]
            [('ada', 0.0, 1), ('bob', 0.0, 1), ('ada', 10.0, 1)]
        """
        own = window_options(options, size, seconds, every, key, time, allowed_lateness)
        return self._windows(own, options)

    def _windows(self, own: dict[str, Any], options: PlainOptions) -> Tried[Window[T_co], T_co]:
        return self._next("window", [("out", window_type(self.item))], options, own=own, errors=True)[0]

    @shows(PlainOptions)
    def join(
        self, other: Stream[A], *, key: Callable[[T_co], Hashable], within: float,
        time: Callable[[T_co], float] | None = None, other_key: Callable[[A], Hashable] | None = None,
        other_time: Callable[[A], float] | None = None, allowed_lateness: float = 0.0,
        **options: Unpack[PlainOptions],
    ) -> Tried[tuple[T_co, A], T_co | A]:  # fmt: skip
        """Declare a stage that pairs items from two streams if their keys are equal and their times close.

        An item without a partner is dropped. The order of the pairs depends on how the two streams
        interleave. Flink calls this an interval join.

        Args:
            other: Stream to join with this one.
            key: Function that returns the key of an item of this stream.
            within: Maximum time difference between the two items of a pair, in seconds.
            time: Function that returns the time of an item in seconds (default: its arrival time).
            other_key: Key function for the other stream (default: ``key``).
            other_time: Time function for the other stream (default: ``time``).
            allowed_lateness: Seconds by which an item may lag behind the latest item of each stream (default:
                0). An item that lags further behind both streams fails with :class:`LateItem`.
            **options: ``name`` (str) and ``capacity`` (in pairs; default: 64) of the stage.

        Returns:
            The stream of pairs, with the item of this stream first. If a stage reads its :attr:`errors`
            stream, failed and late items go there. Otherwise, the first such item ends the run.

        Raises:
            TypeError: An argument has the wrong type, or its name is unknown.
            ValueError: An argument is out of range.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> orders, payments = graph.source([("a", 1), ("b", 2)]), graph.source([("b", 4), ("a", 99)])
            >>> paid = orders.join(payments, key=lambda pair: pair[0], within=10, time=lambda pair: pair[1])
            >>> result = paid.collect()
            >>> graph.run()[result]
            [(('b', 2), ('b', 4))]
        """
        streams = streams_argument("join", (self, other))
        own = join_options(options, within, key, other_key, time, other_time, allowed_lateness)
        item = GenericAlias(tuple, tuple(Any if one.item is None else one.item for one in streams))
        stage = self.graph._declare(
            "join", inputs=origins(self.graph, *streams), input_ports=("left", "right"),
            outputs=[("out", item)], options=own, errors=True, **options,
        )  # fmt: skip
        outs: tuple[Any, ...] = streams_of(self.graph, stage)
        return outs[0]  # type: ignore[no-any-return]

    @shows(PlainOptions)
    def unbatch(self: Stream[Iterable[T]], **options: Unpack[PlainOptions]) -> Stream[T]:
        """Declare a stage that emits the elements of each item.

        Args:
            **options: ``name`` (str) and ``capacity`` (in items; default: 64) of the stage.

        Returns:
            The stream of the elements. Each item of the input stream must be iterable.

        Raises:
            TypeError: An option is unknown.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> numbers = graph.source([[1, 2], [3]]).unbatch().collect()
            >>> graph.run()[numbers]
            [1, 2, 3]
        """
        known_options("unbatch", options, PlainOptions.__annotations__)
        return self._next("unbatch", [("out", element_type(self.item))], options)[0]

    @shows(PlainOptions)
    def take(self, n: int, **options: Unpack[PlainOptions]) -> Stream[T_co]:
        """Declare a stage that emits the first ``n`` items and then stops the upstream stages.

        Args:
            n: Maximum number of items, at least 0.
            **options: ``name`` (str) and ``capacity`` (in items; default: 64) of the stage.

        Returns:
            The stream of at most ``n`` items.

        Raises:
            TypeError: ``n`` is not an int, or an option is unknown.
            ValueError: ``n`` is negative.

        Example:
            >>> import itertools
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> first = graph.source(itertools.count()).take(3).collect()
            >>> graph.run()[first]
            [0, 1, 2]
        """
        known_options("take", options, PlainOptions.__annotations__)
        return self._next("take", [("out", self.item)], options, own={"n": whole("take", "n", n, 0)})[0]

    @shows(PlainOptions)
    def tee(self, n: int, **options: Unpack[PlainOptions]) -> tuple[Stream[T_co], ...]:
        """Declare a stage that emits every item on ``n`` streams.

        Args:
            n: Number of streams, at least 1.
            **options: ``name`` (str) and ``capacity`` (in items; default: 64) of the stage.

        Returns:
            A tuple of ``n`` streams.

        Raises:
            TypeError: ``n`` is not an int, or an option is unknown.
            ValueError: ``n`` is less than 1.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> one, other = graph.source(range(4)).tee(2)
            >>> numbers, total = one.collect(), other.reduce(lambda total, number: total + number)
            >>> results = graph.run()
            >>> results[numbers], results[total]
            ([0, 1, 2, 3], 6)
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
        """Declare a stage that emits tuples of one item per stream, until one stream ends.

        Args:
            *others: Streams to combine with this one.
            **options: ``name`` (str) and ``capacity`` (in tuples; default: 64) of the stage.

        Returns:
            The stream of tuples. The item of this stream comes first in each tuple.

        Raises:
            TypeError: An argument is not a stream, or an option is unknown.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> names, ages = graph.source(["Ada", "Alan"]), graph.source([36, 41])
            >>> pairs = names.zip(ages).collect()
            >>> graph.run()[pairs]
            [('Ada', 36), ('Alan', 41)]
        """
        streams = streams_argument("zip", (self, *others))
        known_options("zip", options, PlainOptions.__annotations__)
        item = GenericAlias(tuple, tuple(Any if stream.item is None else stream.item for stream in streams))
        stage = self.graph._declare(
            "zip", inputs=origins(self.graph, *streams), outputs=[("out", item)],
            input_ports=[str(port) for port in range(len(streams))], **options,
        )  # fmt: skip
        return streams_of(self.graph, stage)[0]

    @overload  # separate, because the mean of integers is a float
    def allreduce(
        self, op: Literal["mean"], to_workers: Literal[False] = False, **options: Unpack[PlainOptions]
    ) -> Stream[Reduced[Any]]: ...
    @overload
    def allreduce(
        self, op: Named | Function = "sum", to_workers: Literal[False] = False,
        **options: Unpack[PlainOptions],
    ) -> Stream[Reduced[T_co]]: ...  # fmt: skip
    @overload
    def allreduce(
        self, op: Named | Function = "sum", *, to_workers: Literal[True], **options: Unpack[PlainOptions]
    ) -> Stream[tuple[int, Reduced[Any]]]: ...
    @shows(PlainOptions)
    def allreduce(
        self, op: str | Function = "sum", to_workers: bool = False, **options: Unpack[PlainOptions]
    ) -> Stream[Any]:
        """Declare a stage that combines one item from each worker of this stream's stage in every round.

        Round k combines the k-th items of all workers that have one, in worker order. Nested values are
        combined leaf by leaf in the program's process. Each worker has a separate channel, so ``ordered`` has
        no effect. To combine several streams, use ``graph.merge(*streams).allreduce(op)``.

        Args:
            op: ``"sum"`` (default), ``"mean"``, ``"prod"``, ``"min"``, ``"max"``, ``"and"``, ``"or"``,
                ``"xor"``, or a function that takes two values.
            to_workers: Whether to send the result back to each worker that contributed (default: False). In
                this case, declare the stage that reads the results with ``per_worker=``. That stage may be a
                later one or, through a feedback stream, an earlier one.
            **options: ``name`` (str) and ``capacity`` (in items; default: 64) of the stage.

        Returns:
            The stream of :class:`Reduced` values, one for each round, or of pairs ``(worker, Reduced)``.

        Raises:
            TypeError: ``op`` is neither a string nor a function, or an option is unknown.
            ValueError: ``op`` is not one of the names above.

        Example:
            >>> from flowchan import Graph, In, Out
            >>> def halve(numbers: In[float], halves: Out[float]) -> None:
            ...     for number in numbers:
            ...         halves.put(number / 2)
            >>> graph = Graph()
            >>> sums = graph.stage(halve, graph.source([2.0, 2.0]), workers=2).allreduce("sum").collect()
            >>> sum(reduced.value for reduced in graph.run()[sums])
            2.0
        """
        known_options("allreduce", options, ("op", "to_workers", *PlainOptions.__annotations__))
        function, own = allreduce_options(op, to_workers)
        origin, item = self._own("allreduce"), tuple[int, Reduced[Any]] if to_workers else Reduced
        (stream,) = self._next("allreduce", [("out", item)], options, function=function, own=own)
        self.graph._split_per_worker(origin)
        return stream

    @property
    def errors(self) -> Stream[Failed[Any]]:
        """Return the stream of items that failed in this stage, as ``Failed`` values.

        If no stage reads this stream, the first failure ends the run.

        Raises:
            AttributeError: The stage does not call a function for each item. None of its items can therefore
                fail.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> numbers = graph.source(["1", "x"]).map(int)
            >>> good, bad = numbers.collect(), numbers.errors.map(lambda failed: failed.item).collect()
            >>> results = graph.run()
            >>> results[good], results[bad]
            ([1], ['x'])
        """
        output = self.graph._stage_at(self._own("errors")).errors
        if output is None or self.port == output.port:
            raise AttributeError(
                f"{self!r} has no errors stream; map, flat_map, filter, partition and reduce have one"
            )
        return Stream(self.graph, self.stage, output.port, output.name, output.item)

    def _one(
        self, kind: str, function: Any, item_of: Callable[..., Any], options: KeyedOptions
    ) -> Stream[Any]:
        """Declare a stage that calls the user's function for each item and has a single output."""
        item = item_of(callable_argument(kind, "function", function))
        stage = self._itemwise(kind, function, [("out", item)], options)
        return streams_of(self.graph, stage)[0]

    def _next(self, *args: Any, **options: Any) -> tuple[Tried[Any, Any], ...]:
        """Declare a stage that reads this stream, and return the streams of its outputs."""
        outs: tuple[Any, ...] = streams_of(self.graph, self._stage(*args, **options))
        return outs


if TYPE_CHECKING:

    class Tried(Stream[T_co], Generic[T_co, F_co]):
        """Stream of a stage whose function takes items of type ``F`` and may fail.

        The class exists only for type checkers. At run time, the stream is a plain ``Stream``.
        """

        @property
        def errors(self) -> Stream[Failed[F_co]]:
            """Return the failed items as a typed stream."""


def streams_of(graph: Builder, stage: Stage) -> tuple[Stream[Any], ...]:
    """Return the handles of a stage's outputs."""
    return tuple(Stream(graph, stage.name, output.port, output.name, output.item) for output in stage.outputs)

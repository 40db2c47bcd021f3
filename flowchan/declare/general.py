"""Declare a general stage: a function with ports.

Type checkers infer the types of the resulting streams from the output ports in the function's signature. This
works for up to three output ports that are the last parameters or follow at most two other parameters.
Otherwise, the result has the type ``Any``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, TypeVar, TypeVarTuple, overload

from flowchan.channel.ports import Out
from flowchan.declare.annotations import group_parameter, ports_of
from flowchan.declare.builder import Builder
from flowchan.declare.options import PortOptions, PortSettings, shows
from flowchan.declare.shapes import UntypedFunction
from flowchan.declare.stream import Stream, streams_of
from flowchan.declare.stream_handle import origins, streams_argument
from flowchan.declare.values import Gang
from flowchan.items.arguments import callable_argument, flag, no_misspelt_option
from flowchan.items.text import shown
from flowchan.items.tracebacks import methods_end_at_caller

STAGE_OPTIONS = tuple(PortOptions.__annotations__)

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
P = TypeVar("P")
Q = TypeVar("Q")
Others = TypeVarTuple("Others")


@methods_end_at_caller
class General(Builder):
    """Graph that supports general stages, with the method :meth:`stage`."""

    @overload
    def stage(self, function: UntypedFunction, *streams: Stream[Any], **options: Any) -> Any: ...
    @overload
    def stage(
        self,
        function: Callable[[*Others, Out[Any], Out[Any], Out[Any], Out[Any]], object],
        *streams: Stream[Any],
        **options: Any,
    ) -> Any: ...
    @overload
    def stage(
        self,
        function: Callable[[*Others, Out[A], Out[B], Out[C]], object],
        *streams: Stream[Any],
        **options: Any,
    ) -> tuple[Stream[A], Stream[B], Stream[C]]: ...
    @overload
    def stage(
        self, function: Callable[[*Others, Out[A], Out[B]], object], *streams: Stream[Any], **options: Any
    ) -> tuple[Stream[A], Stream[B]]: ...
    @overload
    def stage(
        self, function: Callable[[*Others, Out[A]], object], *streams: Stream[Any], **options: Any
    ) -> Stream[A]: ...
    @overload
    def stage(
        self,
        function: Callable[Concatenate[Out[Any], Out[Any], Out[Any], Out[Any], ...], object],
        *streams: Stream[Any],
        **options: Any,
    ) -> Any: ...
    @overload
    def stage(
        self,
        function: Callable[Concatenate[P, Out[Any], Out[Any], Out[Any], Out[Any], ...], object],
        *streams: Stream[Any],
        **options: Any,
    ) -> Any: ...
    @overload
    def stage(
        self,
        function: Callable[Concatenate[P, Q, Out[Any], Out[Any], Out[Any], Out[Any], ...], object],
        *streams: Stream[Any],
        **options: Any,
    ) -> Any: ...
    @overload
    def stage(
        self,
        function: Callable[Concatenate[Out[A], Out[B], Out[C], ...], object],
        *streams: Stream[Any],
        **options: Any,
    ) -> tuple[Stream[A], Stream[B], Stream[C]]: ...
    @overload
    def stage(
        self,
        function: Callable[Concatenate[P, Out[A], Out[B], Out[C], ...], object],
        *streams: Stream[Any],
        **options: Any,
    ) -> tuple[Stream[A], Stream[B], Stream[C]]: ...
    @overload
    def stage(
        self,
        function: Callable[Concatenate[P, Q, Out[A], Out[B], Out[C], ...], object],
        *streams: Stream[Any],
        **options: Any,
    ) -> tuple[Stream[A], Stream[B], Stream[C]]: ...
    @overload
    def stage(
        self,
        function: Callable[Concatenate[Out[A], Out[B], ...], object],
        *streams: Stream[Any],
        **options: Any,
    ) -> tuple[Stream[A], Stream[B]]: ...
    @overload
    def stage(
        self,
        function: Callable[Concatenate[P, Out[A], Out[B], ...], object],
        *streams: Stream[Any],
        **options: Any,
    ) -> tuple[Stream[A], Stream[B]]: ...
    @overload
    def stage(
        self,
        function: Callable[Concatenate[P, Q, Out[A], Out[B], ...], object],
        *streams: Stream[Any],
        **options: Any,
    ) -> tuple[Stream[A], Stream[B]]: ...
    @overload
    def stage(
        self, function: Callable[Concatenate[Out[A], ...], object], *streams: Stream[Any], **options: Any
    ) -> Stream[A]: ...
    @overload
    def stage(
        self, function: Callable[Concatenate[P, Out[A], ...], object], *streams: Stream[Any], **options: Any
    ) -> Stream[A]: ...
    @overload
    def stage(
        self,
        function: Callable[Concatenate[P, Q, Out[A], ...], object],
        *streams: Stream[Any],
        **options: Any,
    ) -> Stream[A]: ...
    @overload
    def stage(self, function: Callable[..., Any], *streams: Stream[Any], **options: Any) -> Any: ...
    @shows(PortOptions, PortSettings, rest="kwargs")
    def stage(self, function: Callable[..., Any], *streams: Stream[Any], **options: Any) -> Any:
        """Declare a stage with ports, in which each worker calls ``function`` once.

        Parameters annotated with ``In[T]`` or ``Out[T]`` are the ports.

        Args:
            function: Function, callable class or ``async def`` function with port parameters.
            *streams: Streams for the ``In`` parameters, in order.
            **options: Values for the parameters that are not ports, and these keyword options of the stage:

                name (str): Name of the stage (default: the function's name).
                on (str or pool): Placement of the workers: ``"thread"`` (default), ``"process"``, ``"hosts"``
                    or a pool.
                workers (int): Number of workers (default: 1).
                capacity (int): Capacity of each output channel in items (default: 64).
                restarts (int): Maximum number of dead workers replaced within 60 s of work (default: 10).
                restartable (bool): True if the function keeps no state between items, so that a dead worker
                    process can be replaced (default: False).
                elastic (bool): For a gang: restart only the dead worker (default: False; implies
                    ``restartable``). The other workers keep their processes. Their function is then called
                    twice: first with the group of survivors, and later with the complete group.
                gpus (float): Number of GPUs per worker process (default: 0); below 1, a share of one GPU.
                per_worker (str or tuple): Name of an ``In`` parameter, or a tuple of names (default: none).
                    The items of such an input are pairs ``(worker, item)``. Each goes to the worker with that
                    number, counted from 1.

        Returns:
            ``None`` without ``Out`` parameters, one stream, or a tuple of streams for several of them.

        Raises:
            TypeError: An argument is not a stream, or an option has the wrong type or an unknown name.
            ValueError: An option is out of range, or does not fit the function.

        If a parameter is annotated with ``flowchan.collective.Group``, the workers form a gang: they start
        together, and each receives its membership. If a worker dies and the stage is restartable, all workers
        restart, each with its unfinished items.

        Example:
            >>> from flowchan import Graph, In, Out
            >>> def split(numbers: In[int], even: Out[int], odd: Out[int]) -> None:
            ...     for number in numbers:
            ...         (odd if number % 2 else even).put(number)
            >>> graph = Graph()
            >>> even, odd = graph.stage(split, graph.source(range(6)))
            >>> even, odd = even.collect(), odd.collect()
            >>> results = graph.run()
            >>> results[even], results[odd]
            ([0, 2, 4], [1, 3, 5])
        """
        ports = ports_of(callable_argument("stage", "function", function))
        settings = PortSettings(**{name: options.pop(name) for name in STAGE_OPTIONS if name in options})
        no_misspelt_option("stage", function, options, STAGE_OPTIONS)
        group = group_parameter(function)
        if flag("stage", "elastic", settings.elastic) and group is None:
            raise ValueError(
                "stage: elastic=True requires a gang; annotate a parameter with "
                "flowchan.collective.Group, or remove elastic=True"
            )
        restartable = settings.restartable or settings.elastic
        if restartable and not streams and settings.workers != 1:
            raise ValueError(
                f"stage: workers must be 1 for a restartable stage without inputs, got {settings.workers!r}"
            )
        readers = [port.name for port in ports if port.reads][: len(streams)]
        addressed = _per_worker(settings.per_worker, readers)
        extra = [f"surplus{number}" for number in range(1, len(streams) - len(readers) + 1)]
        stage = self._declare(
            "stage",
            name=settings.name,
            function=function,
            kwargs=options,
            inputs=origins(self, *streams_argument("stage", streams)),
            input_ports=readers + extra,
            outputs=[(port.name, port.item) for port in ports if not port.reads],
            capacity=settings.capacity,
            on=settings.on,
            workers=settings.workers,
            restarts=settings.restarts,
            restartable=restartable,
            gpus=settings.gpus,
            gang=None if group is None else Gang(*group, settings.elastic),
        )
        self._address(addressed)
        outs = streams_of(self, stage)
        return None if not outs else outs[0] if len(outs) == 1 else outs


def _per_worker(given: Any, readers: list[str]) -> frozenset[str]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"stage: per_worker must be a name or a tuple of names, got {shown(given)}")
    for name in names:
        if name not in readers:
            have = ", ".join(map(repr, readers)) or "none"
            raise ValueError(
                f"stage: per_worker must name In parameters that read a stream ({have}), got {name!r}"
            )
    return frozenset(names)

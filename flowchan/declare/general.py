"""The general stage: a function with ports. Type checkers infer its streams from the ports that the function
writes: up to three of them, as its last parameters, or behind at most two other parameters. Of four or more
they know nothing, so they object to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, TypeVar, TypeVarTuple, overload

from flowchan.channel.ports import Out
from flowchan.declare.annotations import ports_of, seat_of
from flowchan.declare.builder import Builder
from flowchan.declare.options import SOURCE_OPTIONS
from flowchan.declare.placements import PlacementOption
from flowchan.declare.shapes import Untold
from flowchan.declare.stream import Stream, origins, streams_argument, streams_of
from flowchan.declare.values import DEFAULT_CAPACITY, DEFAULT_RESTARTS, Gang
from flowchan.items.arguments import callable_argument, flag, no_misspelt_option
from flowchan.items.text import shown

STAGE_OPTIONS = (*SOURCE_OPTIONS, "workers", "elastic", "per_worker")

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
P = TypeVar("P")
Q = TypeVar("Q")
Others = TypeVarTuple("Others")


class General(Builder):
    """A graph with :meth:`stage`."""

    @overload
    def stage(self, function: Untold, *streams: Stream[Any], **options: Any) -> Any: ...
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
    def stage(
        self,
        function: Callable[..., Any],
        *streams: Stream[Any],
        name: str | None = None,
        on: PlacementOption = "thread",
        workers: int = 1,
        capacity: int = DEFAULT_CAPACITY,
        restarts: int = DEFAULT_RESTARTS,
        restartable: bool = False,
        elastic: bool = False,
        gpus: int = 0,
        per_worker: str | tuple[str, ...] = (),
        **kwargs: Any,
    ) -> Any:
        """The general stage: ``function`` is called once per worker with its ports, the parameters annotated
        ``In[T]`` and ``Out[T]``. The streams go to the ``In`` parameters in order, ``kwargs`` to the
        parameters that are no ports. Returns ``None``, one stream or a tuple of streams, as there are ``Out``
        parameters. ``restartable``: the function keeps no state between items, so a worker process that died
        may be replaced, up to ``restarts`` times. ``gpus``: that each worker has for itself.

        ``per_worker``: the ``In`` parameter, or several of them, whose items go to the worker that the sender
        names. The items of such a stream are pairs ``(worker, item)``, with workers numbered from 1, and the
        worker gets the item. An item for a worker that died goes to its replacement.

        With a parameter annotated ``flowchan.collective.Group`` its workers are a gang: they start together,
        each with its member of a group. When one dies and the stage is restartable, all begin again, each
        with what it had in hand. ``elastic``: it is restartable, and only the one that died begins again. For
        the others the function is called once more, in their processes, first with the group of those that
        are left, and then with that of all."""
        ports = ports_of(callable_argument("stage", "function", function))
        no_misspelt_option("stage", function, kwargs, STAGE_OPTIONS)
        seat = seat_of(function)
        if flag("stage", "elastic", elastic) and seat is None:
            raise ValueError(
                "stage: elastic=True is for a gang, whose function has a parameter annotated "
                "flowchan.collective.Group"
            )
        restartable = restartable or elastic
        if restartable and not streams and workers != 1:
            raise ValueError(
                f"stage: a restartable stage without inputs has one worker, not workers={workers!r}"
            )
        readers = [port.name for port in ports if port.reads][: len(streams)]
        addressed = _per_worker(per_worker, readers)
        surplus = [f"surplus{number}" for number in range(1, len(streams) - len(readers) + 1)]
        stage = self._declare(
            "stage",
            name=name,
            function=function,
            kwargs=kwargs,
            inputs=origins(self, *streams_argument("stage", streams)),
            input_ports=readers + surplus,
            outputs=[(port.name, port.item) for port in ports if not port.reads],
            capacity=capacity,
            on=on,
            workers=workers,
            restarts=restarts,
            restartable=restartable,
            gpus=gpus,
            gang=None if seat is None else Gang(*seat, elastic),
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

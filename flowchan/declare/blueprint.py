"""The declaration of a graph: stages joined by streams. Nothing here runs.

:class:`Blueprint` grows while the user declares; every ``Stage`` in it is a frozen
value. The checks, the pictures and the run read ``stages`` and ``links`` and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flowchan.declare.annotations import element_type, ports_of, returned_type
from flowchan.declare.arguments import (
    callable_argument,
    flag,
    known_options,
    no_misspelt_option,
    placement,
    shown,
    text,
    whole,
)
from flowchan.declare.stream import Feedback, Stream, streams_argument
from flowchan.declare.values import (
    DEFAULT_CAPACITY,
    DEFAULT_MAX_DEATHS,
    DEFAULT_RESTARTS,
    Link,
    Medium,
    Output,
    Placement,
    Stage,
    Where,
)

_PACKAGE = __name__.partition(".")[0]
_SOURCE_OPTIONS = ("name", "on", "capacity", "restarts", "restartable")
_STAGE_OPTIONS = (*_SOURCE_OPTIONS, "workers")


class Blueprint:
    """A graph as declared: its ``name``, the stages in the order of declaration, and the channels between
    them.

    Stages are declared by :meth:`source`, :meth:`input`, :meth:`merge`, :meth:`stage` and by the verbs of the
    ``Stream`` values which these return. :meth:`feedback` lets a graph lead back.
    """

    def __init__(self, name: str = "graph") -> None:
        self.name = text("Graph", "name", name)
        self.where = _users_line()
        self._stages: list[Stage] = []
        self._by_name: dict[str, int] = {}
        self._by_port: dict[tuple[str, str], int] = {}
        self._last_number: dict[str, int] = {}
        self._links: tuple[Link, ...] | None = None
        self._feedbacks: dict[Feedback, Where] = {}
        self._fed: dict[Stream, Stream] = {}
        self._started: set[str] = set()  # stages that a run has started: an iterator of theirs is read

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} with {len(self._stages)} stages>"

    def __reduce__(self) -> Any:
        raise TypeError(f"graph {self.name!r} is a declaration and stays in the process that declares it")

    # What is declared

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, in the order of declaration."""
        return tuple(self._stages)

    def stage_named(self, name: str) -> Stage:
        """The stage of that name, the first one if the name was given twice. ``KeyError`` if there is
        none."""
        try:
            return self._stages[self._by_name[name]]
        except KeyError:
            raise KeyError(f"graph {self.name!r} has no stage named {name!r}") from None

    @property
    def links(self) -> tuple[Link, ...]:
        """Every channel: each output of each stage with its reader, and each error stream that somebody
        reads. A stream with several readers, which ``check`` reports, gives one link per
        reader."""
        if self._links is None:
            self._links = tuple(self._joined())
        return self._links

    @property
    def feedbacks(self) -> Mapping[Feedback, Where]:
        """Every stream that :meth:`feedback` has given, with the place of the call."""
        return MappingProxyType(self._feedbacks)

    # Declaring

    def source(
        self,
        items: Iterable[Any] | Callable[..., Iterable[Any] | AsyncIterable[Any] | Awaitable[Iterable[Any]]],
        *args: Any,
        name: str | None = None,
        on: Placement = "thread",
        capacity: int = DEFAULT_CAPACITY,
        restarts: int = DEFAULT_RESTARTS,
        restartable: bool = False,
        **kwargs: Any,
    ) -> Stream:
        """A stream of the elements of ``items``: an iterable, or a callable that gives one when it is called
        with ``args`` and ``kwargs`` inside the run. An async generator function is cancelled where it awaits
        as soon as nobody wants its elements any more. ``restartable``: iterating again gives the same
        elements, so a worker process that died may be replaced, up to ``restarts`` times, by one that goes on
        behind what is out already."""
        function: Callable[..., Any] | None = None
        options: dict[str, Any] = {}
        if callable(items) and (args or kwargs or not isinstance(items, Iterable)):
            no_misspelt_option("source", items, kwargs, _SOURCE_OPTIONS)
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
            known_options("source", kwargs, _SOURCE_OPTIONS)
            raise TypeError(f"source: items is not callable, so it takes no more arguments: {shown(items)}")
        else:
            options, item = {"iterable": items}, element_type(type(items))
        (out,) = self._declare(
            "source", name=name, function=function, args=args, kwargs=kwargs, options=options, input_ports=(),
            outputs=[("out", item)], capacity=capacity, on=on, restarts=restarts, restartable=restartable,
        )  # fmt: skip
        return out

    def input(self, name: str | None = None, capacity: int = DEFAULT_CAPACITY) -> Stream:
        """A stream of the items that are put from outside while the graph runs."""
        (out,) = self._declare("input", name=name, input_ports=(), outputs=[("out", None)], capacity=capacity)
        return out

    def merge(self, *streams: Stream, name: str | None = None, capacity: int = DEFAULT_CAPACITY) -> Stream:
        """The items of all streams, as they come; it ends when the last of them ends."""
        if not streams:
            raise TypeError("merge: give at least one stream")
        items = [stream.item for stream in streams_argument("merge", streams)]
        (out,) = self._declare(
            "merge",
            name=name,
            inputs=streams,
            input_ports=[str(port) for port in range(len(streams))],
            outputs=[("out", items[0] if all(item == items[0] for item in items) else None)],
            capacity=capacity,
        )
        return out

    def feedback(self, name: str = "feedback") -> Feedback:
        """A stream of the items that a stage declared later puts: how a graph leads back. A :meth:`stage`
        reads it, and ``feedback.feed(stream)`` says what it is once that stage is declared. ``name`` stands
        for it in messages.

        A loop has no source that ends it. Its stages end it, one of them by returning when its work is done:
        then its outputs close, and the others see the end of their inputs."""
        feedback = Feedback(self, "", str(len(self._feedbacks)), text("feedback", "name", name))
        self._feedbacks[feedback] = _users_line()
        return feedback

    def stage(
        self,
        function: Callable[..., Any],
        *streams: Stream,
        name: str | None = None,
        on: Placement = "thread",
        workers: int = 1,
        capacity: int = DEFAULT_CAPACITY,
        restarts: int = DEFAULT_RESTARTS,
        restartable: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The general stage: ``function`` is called once per worker with its ports, the parameters annotated
        ``In[T]`` and ``Out[T]``. The streams go to the ``In`` parameters in order, ``kwargs`` to the
        parameters that are no ports. Returns ``None``, one stream or a tuple of streams, as there are ``Out``
        parameters. ``restartable``: the function keeps no state between items, so a worker process that died
        may be replaced, up to ``restarts`` times."""
        ports = ports_of(callable_argument("stage", "function", function))
        no_misspelt_option("stage", function, kwargs, _STAGE_OPTIONS)
        if restartable and not streams and workers != 1:
            raise ValueError(
                f"stage: a restartable stage without inputs has one worker, not workers={workers!r}"
            )
        readers = [port.name for port in ports if port.reads][: len(streams)]
        surplus = [f"surplus{number}" for number in range(1, len(streams) - len(readers) + 1)]
        outs = self._declare(
            "stage",
            name=name,
            function=function,
            kwargs=kwargs,
            inputs=streams_argument("stage", streams),
            input_ports=readers + surplus,
            outputs=[(port.name, port.item) for port in ports if not port.reads],
            capacity=capacity,
            on=on,
            workers=workers,
            restarts=restarts,
            restartable=restartable,
        )
        return None if not outs else outs[0] if len(outs) == 1 else outs

    # Behind the verbs

    def _declare(
        self,
        kind: str,
        *,
        outputs: Sequence[tuple[str, Any]],
        name: str | None = None,
        inputs: tuple[Stream, ...] = (),
        input_ports: Sequence[str] = ("items",),
        function: Callable[..., Any] | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        capacity: int = DEFAULT_CAPACITY,
        errors: bool = False,
        on: Placement = "thread",
        workers: int = 1,
        ordered: bool = True,
        retries: int = 0,
        restarts: int = DEFAULT_RESTARTS,
        max_deaths: int = DEFAULT_MAX_DEATHS,
        restartable: bool = False,
    ) -> tuple[Stream, ...]:
        """Adds one stage, after the checks that all verbs share, and gives the handles of its outputs."""
        whole(kind, "capacity", capacity, 1)
        on = placement(kind, on)
        whole(kind, "workers", workers, 1)
        whole(kind, "retries", retries, 0)
        whole(kind, "restarts", restarts, 0)
        whole(kind, "max_deaths", max_deaths, 1)
        flag(kind, "ordered", ordered)
        flag(kind, "restartable", restartable)
        called = self._free_name(_name_from(function, kind)) if name is None else text(kind, "name", name)
        single = len(outputs) == 1
        stage = Stage(
            name=called,
            kind=kind,
            where=_users_line(),
            feedback=frozenset(
                port for port, read in zip(input_ports, inputs, strict=False) if isinstance(read, Feedback)
            ),
            function=function,
            args=args,
            kwargs=MappingProxyType(dict(kwargs or {})),
            options=MappingProxyType(dict(options or {})),
            inputs=tuple(self._fed.get(read, read) for read in inputs),
            input_ports=tuple(input_ports),
            outputs=tuple(
                Output(called if single else f"{called}.{p}", p, item, capacity) for p, item in outputs
            ),
            errors=Output(f"{called}.errors", "errors") if errors else None,
            on=on,
            workers=workers,
            ordered=ordered,
            retries=retries,
            restarts=restarts,
            max_deaths=max_deaths,
            restartable=restartable,
        )
        self._add(stage)
        return tuple(Stream(self, called, output.port, output.name, output.item) for output in stage.outputs)

    def _add(self, stage: Stage) -> None:
        """Takes a stage in. A name that exists already stays with its first owner, and is for the check to
        report."""
        place = len(self._stages)
        self._stages.append(stage)
        self._by_name.setdefault(stage.name, place)
        for output in _all_outputs(stage):
            self._by_port.setdefault((stage.name, output.port), place)
        self._links = None

    def _place_of(self, stream: Stream) -> int:
        if isinstance(stream, Feedback):
            raise ValueError(f"{stream!r} is what another stage puts; say it of the stream that feeds it")
        return self._by_port[stream.stage, stream.port]

    def _stage_of(self, stream: Stream) -> Stage:
        return self._stages[self._place_of(stream)]

    def _feed(self, feedback: Feedback, stream: Stream) -> None:
        """Closes a loop: whoever reads ``feedback`` reads ``stream``, by a new value in the place of its
        stage."""
        if feedback in self._fed:
            raise ValueError(
                f"{feedback!r} is fed by {self._fed[feedback]!r} already; ask for another graph.feedback()"
            )
        self._fed[feedback] = stream
        for place, stage in enumerate(self._stages):
            if feedback in stage.inputs:
                inputs = tuple(stream if read == feedback else read for read in stage.inputs)
                self._stages[place] = dataclasses.replace(stage, inputs=inputs)
        self._links = None

    def _resize(self, stream: Stream, capacity: int) -> None:
        """Gives the stream's channel another capacity, by a new value in the place of its stage."""

        def resized(output: Output) -> Output:
            return dataclasses.replace(output, capacity=capacity) if output.port == stream.port else output

        place = self._place_of(stream)
        stage = self._stages[place]
        self._stages[place] = dataclasses.replace(
            stage,
            outputs=tuple(resized(output) for output in stage.outputs),
            errors=None if stage.errors is None else resized(stage.errors),
        )
        self._links = None

    def _free_name(self, base: str) -> str:
        """``base``, or ``base-2``, ``base-3``, … if that is taken."""
        name = base
        while name in self._by_name:
            self._last_number[base] = self._last_number.get(base, 1) + 1
            name = f"{base}-{self._last_number[base]}"
        return name

    def _joined(self) -> Iterable[Link]:
        readers: dict[tuple[str, str], list[tuple[Stage | None, str | None]]] = {}
        nobody: list[tuple[Stage | None, str | None]] = [(None, None)]
        for stage in self._stages:
            for stream, input_port in zip(stage.inputs, stage.input_ports, strict=False):
                if stream.graph is self:
                    readers.setdefault((stream.stage, stream.port), []).append((stage, input_port))
        for stage in self._stages:
            for output in stage.outputs:
                for reader, port in readers.get((stage.name, output.port), nobody):
                    yield _link(stage, output, reader, port)
            if stage.errors is not None:
                for reader, port in readers.get((stage.name, stage.errors.port), ()):
                    yield _link(stage, stage.errors, reader, port)


def _link(stage: Stage, output: Output, reader: Stage | None, port: str | None) -> Link:
    across: Medium = "processes" if "process" in (stage.on, reader and reader.on) else "threads"
    return Link(
        name=output.name,
        writer=stage.name,
        writer_port=output.port,
        reader=None if reader is None else reader.name,
        reader_port=port,
        item=output.item,
        capacity=output.capacity,
        medium=across,
        errors=output is stage.errors,
        where=stage.where,
        feedback=reader is not None and port in reader.feedback,
    )


def _all_outputs(stage: Stage) -> tuple[Output, ...]:
    return stage.outputs if stage.errors is None else (*stage.outputs, stage.errors)


def _name_from(function: Any, kind: str) -> str:
    """A stage's name from its function's: that of the class for a callable object, the verb for a lambda."""
    while isinstance(function, functools.partial):
        function = function.func
    if function is None:
        return kind
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        name = type(function).__name__
    return kind if name == "<lambda>" else name.strip("_") or kind


def _users_line() -> Where:
    """The place of the call that came from outside this package."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module != _PACKAGE and not module.startswith(f"{_PACKAGE}."):
            break
        frame = frame.f_back
    return Where("<unknown>", 0) if frame is None else Where(frame.f_code.co_filename, frame.f_lineno)

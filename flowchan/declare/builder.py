"""Collect the stages and channels of a graph while the user declares it.

Every :class:`~flowchan.declare.values.Stage` is a frozen value, so only the list of stages changes. The
methods of streams and graphs add stages to the list. Checks, pictures and runs read ``stages`` and ``edges``.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from flowchan.channel.channel import Channel
from flowchan.declare.auto_workers import workers_argument
from flowchan.declare.callables import name_of
from flowchan.declare.fixed_workers import auto_refusal, fixed_workers
from flowchan.declare.operators import OPERATORS
from flowchan.declare.options import StageSettings
from flowchan.declare.placements import Placement
from flowchan.declare.values import Edge, ForeignStream, Loop, Origin, Output, Stage
from flowchan.errors import Where
from flowchan.items.arguments import errors_argument, pause, per_second, seconds, text

_PACKAGE = __name__.partition(".")[0]
NO_LIMIT = 10**9


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """Stage of a service; see ``Builder._serve`` for the attributes. The stages of one service share them."""

    inbox: Channel[Any]
    ended: Channel[None]
    end: Callable[[], None]


class Builder:
    """Base class of graphs, to which the user's declarations add stages."""

    def __init__(self, name: str) -> None:
        self.name = text("Graph", "name", name)
        """Name of the graph."""
        self.where = users_line()
        """File and line of the user's code that created the graph."""
        self._stages: list[Stage] = []
        self._by_name: dict[str, int] = {}
        self._by_port: dict[Origin, int] = {}
        self._last_number: dict[str, int] = {}
        self._edges: tuple[Edge, ...] | None = None
        self._loops: dict[Origin, Loop] = {}  # feedbacks, by the placeholder that feed() replaces
        # Streams of other graphs that stages of this graph read. The check reports each of them as an error.
        self._foreign_streams: dict[Origin, ForeignStream] = {}
        self._drawn: dict[str, str | None] = {}
        """Labels by stage name that pictures show instead of the operator and line. ``None`` hides the
        stage."""
        self._services: dict[str, Service] = {}
        """Services by stage name."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} with {len(self._stages)} stages>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"graph {self.name!r} can't be pickled, because it is a declaration; declare it in the process "
            "that runs it"
        )

    # --- properties of the declaration ---

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages in declaration order."""
        return tuple(self._stages)

    def stage_named(self, name: str) -> Stage:
        """Return the first stage with this name.

        Args:
            name: Name of a stage.

        Returns:
            The declaration of the stage.

        Raises:
            KeyError: The graph has no stage with this name.

        Example:
            >>> from flowchan import Graph
            >>> graph = Graph()
            >>> graph.source(range(3), name="numbers").sink(print)
            >>> graph.stage_named("numbers").kind
            'source'
        """
        try:
            return self._stages[self._by_name[name]]
        except KeyError:
            names = ", ".join(map(repr, self._by_name)) or "none"
            raise KeyError(
                f"graph {self.name!r} has no stage named {name!r}; its stages are {names}"
            ) from None

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Return the channels of the graph.

        Each output, and each error stream that a stage reads, has one edge to its reader. A stream with
        several readers has an edge for each reader; ``check`` reports this error. If the reader distinguishes
        the writing workers, each worker has its own edge.
        """
        if self._edges is None:
            self._edges = tuple(self._joined())
        return self._edges

    # --- methods for the operators ---

    def _declare(
        self,
        kind: str,
        *,
        outputs: Sequence[tuple[str, Any]],
        inputs: tuple[Origin, ...] = (),
        input_ports: Sequence[str] = ("items",),
        function: Callable[..., Any] | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Stage:
        """Check the settings common to all operators, and add a stage.

        ``settings`` are the fields of :class:`StageSettings`.
        """
        given = StageSettings(**settings)
        placement = given.checked(kind, function)
        workers, auto = workers_argument(kind, given.workers)
        name = self._free_name(name_from(function, kind)) if given.name is None else given.name
        single = len(outputs) == 1
        stage = Stage(
            name=name,
            operator=OPERATORS[kind],
            where=users_line(),
            feedback=frozenset(
                port for port, origin in zip(input_ports, inputs, strict=False) if origin in self._loops
            ),
            function=function,
            args=args,
            kwargs=MappingProxyType(dict(kwargs or {})),
            options=MappingProxyType(dict(options or {})),
            inputs=tuple(self._fed(origin) for origin in inputs),
            input_ports=tuple(input_ports),
            outputs=tuple(
                Output(name if single else f"{name}.{p}", p, item, given.capacity) for p, item in outputs
            ),
            errors=Output(f"{name}.errors", "errors") if given.errors else None,
            placement=placement,
            workers=workers,
            ordered=given.ordered,
            retries=given.retries,
            retry_delay=pause(kind, "retry_delay", given.retry_delay),
            retry_on=errors_argument(kind, "retry_on", given.retry_on),
            timeout=seconds(kind, "timeout", given.timeout),
            rate=per_second(kind, "rate", given.rate),
            share_instance=given.share_instance,
            restarts=given.restarts,
            max_deaths=given.max_deaths,
            restartable=given.restartable,
            gpus=given.gpus,
            gang=given.gang,
            may_get_requests=any(map(self._may_carry_requests, inputs)),
            auto=auto,
        )
        if auto is not None and (why := fixed_workers(stage)):
            raise ValueError(f"{kind}: {auto_refusal(stage, why)}")
        self._add(stage)
        return stage

    def _add(self, stage: Stage) -> None:
        """Append a stage to the list.

        If the name is already taken, the name still refers to the first stage, and ``check`` reports the
        duplicate.
        """
        index = len(self._stages)
        self._stages.append(stage)
        self._by_name.setdefault(stage.name, index)
        for output in stage.all_outputs:
            self._by_port.setdefault(Origin(stage.name, output.port), index)
        self._edges = None

    def _may_carry_requests(self, origin: Origin) -> bool:
        """Return whether requests from ``ask()`` may pass through this output."""
        if origin not in self._by_port:
            return False
        stage = self._stage_at(origin)
        failed = stage.errors is not None and origin.port == stage.errors.port
        return (stage.may_get_requests or stage.operator.outside) and not failed

    def _gives_lists(self, origin: Origin) -> bool:
        """Return whether each item of this output is a list of several items."""
        return origin in self._by_port and self._stage_at(origin).operator.groups

    def _stage_at(self, origin: Origin) -> Stage:
        """Return the stage that writes this output."""
        return self._stages[self._by_port[origin]]

    def _without_stage(self) -> Origin:
        """Return a new placeholder origin for a stream that no stage of this graph writes yet."""
        return Origin("", str(len(self._loops) + len(self._foreign_streams)))

    def _leads_back(self, name: str) -> Origin:
        """Register a loop whose writer is declared later, and return a placeholder origin for it."""
        origin = self._without_stage()
        self._loops[origin] = Loop(name, users_line())
        return origin

    def _is_foreign(self, name: str, graph: Builder) -> Origin:
        """Register a stream of another graph as an error for ``check``, and return an origin for it."""
        origin = self._without_stage()
        self._foreign_streams[origin] = ForeignStream(name, graph.name, graph.where)
        return origin

    def _fed(self, origin: Origin) -> Origin:
        loop = self._loops.get(origin)
        return origin if loop is None or loop.fed_by is None else loop.fed_by

    def _feed(self, feedback: Origin, by: Origin) -> None:
        """Close a loop: replace ``feedback`` with ``by`` in the stages that read it."""
        self._loops[feedback] = dataclasses.replace(self._loops[feedback], fed_by=by)
        self._redirect(feedback, by)

    def _redirect(self, read: Origin, by: Origin) -> None:
        """Replace the input ``read`` with ``by`` in every stage that reads it."""
        for index, stage in enumerate(self._stages):
            if read in stage.inputs:
                inputs = tuple(by if origin == read else origin for origin in stage.inputs)
                self._stages[index] = dataclasses.replace(stage, inputs=inputs)
        self._edges = None

    def _insert(self, kind: str, edge: Edge, options: Mapping[str, Any]) -> None:
        """Insert a stage with one input and one output between a channel's writer and reader."""
        origin = Origin(edge.writer, edge.writer_port)
        self._declare(
            kind, inputs=(origin,), outputs=[("out", edge.item)], capacity=edge.capacity, options=options
        )
        inserted = dataclasses.replace(self._stages.pop(), where=edge.where)
        by = Origin(inserted.name, "out")
        self._redirect(origin, by)
        for feedback, loop in self._loops.items():
            if loop.fed_by == origin:
                self._loops[feedback] = dataclasses.replace(loop, fed_by=by)
        after = self._by_name[edge.writer] + 1
        stages = [*self._stages[:after], inserted, *self._stages[after:]]
        self._stages, self._by_name, self._by_port = [], {}, {}
        for stage in stages:
            self._add(stage)

    def _give_hosts(self, pool: Placement) -> None:
        """Place the stages with ``on="hosts"`` on the hosts of ``pool``."""
        self._stages = [
            dataclasses.replace(stage, placement=pool) if stage.placement.nowhere else stage
            for stage in self._stages
        ]
        self._edges = None

    def _resize(self, origin: Origin, capacity: int) -> None:
        """Set the capacity of an output's channel."""
        self._change_output(origin, capacity=capacity)

    def _address(self, per_worker: frozenset[str]) -> Stage:
        """Let the writers of the inputs ``per_worker`` of the last stage choose the worker for each item."""
        self._stages[-1] = stage = dataclasses.replace(self._stages[-1], per_worker=per_worker)
        self._edges = None
        return stage

    def _route(self, origin: Origin, key: Callable[[Any], Any], workers: int) -> None:
        """Let the stage on hosts that writes this output choose the worker that processes each output."""
        if origin in self._by_port and self._stage_at(origin).placement.is_remote:
            index = self._by_port[origin]
            stage = self._stages[index]
            options = MappingProxyType({**stage.options, "reader_key": key, "readers": workers})
            self._stages[index] = dataclasses.replace(stage, options=options)
            self._edges = None

    def _serve(self, inbox: Channel[Any], ended: Channel[None], end: Callable[[], None]) -> None:
        """Make the last stage part of a service, which ends after all other stages.

        If the last stage is an input, the service reads ``inbox`` instead of a channel of the run.

        Args:
            inbox: Channel for requests from any process.
            ended: Channel that the run closes after its end.
            end: Function that closes the inbox after the requests that have arrived. It returns at once.
        """
        # The service, not the run, decides when a request has killed too many workers.
        stage = dataclasses.replace(self._stages[-1], service=True, max_deaths=NO_LIMIT)
        self._stages[-1] = stage
        self._services[stage.name] = Service(inbox, ended, end)
        self._edges = None

    def _split_per_worker(self, origin: Origin) -> None:
        """Give each worker of the stage a separate channel for this output."""
        self._change_output(origin, channel_per_worker=True)

    def _change_output(self, origin: Origin, **changes: Any) -> None:
        """Change settings of this output by replacing its stage, which is a frozen value."""

        def changed(output: Output) -> Output:
            return dataclasses.replace(output, **changes) if output.port == origin.port else output

        index = self._by_port[origin]
        stage = self._stages[index]
        self._stages[index] = dataclasses.replace(
            stage,
            outputs=tuple(changed(output) for output in stage.outputs),
            errors=None if stage.errors is None else changed(stage.errors),
        )
        self._edges = None

    def _free_name(self, base: str) -> str:
        """Return ``base`` or, if that name is taken, the first free name of ``base-2``, ``base-3``, …."""
        name = base
        while name in self._by_name:
            self._last_number[base] = self._last_number.get(base, 1) + 1
            name = f"{base}-{self._last_number[base]}"
        return name

    def _joined(self) -> Iterator[Edge]:
        readers: dict[Origin, list[tuple[Stage | None, str | None]]] = {}
        no_reader: list[tuple[Stage | None, str | None]] = [(None, None)]
        for stage in self._stages:
            for input_port, origin in stage.read:
                readers.setdefault(origin, []).append((stage, input_port))
        for stage in self._stages:
            for output in stage.outputs:
                for reader, port in readers.get(Origin(stage.name, output.port), no_reader):
                    yield from _edges(stage, output, reader, port)
            if stage.errors is not None:
                for reader, port in readers.get(Origin(stage.name, stage.errors.port), ()):
                    yield from _edges(stage, stage.errors, reader, port)


def _edges(stage: Stage, output: Output, reader: Stage | None, port: str | None) -> Iterator[Edge]:
    addressed = reader is not None and port in reader.per_worker
    readers = range(1, reader.worker_count + 1) if reader is not None and addressed else (0,)
    for (worker, name), to_worker in itertools.product(stage.channels(output), readers):
        yield Edge(
            name=f"{name} to {to_worker}" if to_worker else name,
            writer=stage.name,
            writer_port=output.port,
            reader=None if reader is None else reader.name,
            reader_port=port,
            item=output.item,
            capacity=output.capacity,
            transport=stage.placement.transport_to(stage.placement if reader is None else reader.placement),
            errors=output is stage.errors,
            where=stage.where,
            feedback=reader is not None and port in reader.feedback,
            worker=worker,
            to_worker=to_worker,
            routed=stage.operator.routes,
        )


def name_from(function: Any, kind: str) -> str:
    """Derive a stage name from the function, or from the operator if the function has no name."""
    name = "" if function is None else name_of(function)
    return kind if name in ("", "<lambda>") else name.strip("_") or kind


def users_line() -> Where:
    """Return the user's line that called flowchan: the innermost frame outside this package."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module != _PACKAGE and not module.startswith(f"{_PACKAGE}."):
            break
        frame = frame.f_back
    return Where("<unknown>", 0) if frame is None else Where(frame.f_code.co_filename, frame.f_lineno)

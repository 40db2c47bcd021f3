"""Open the channels of a plan, the ports of this machine's workers, and the program's inputs.

The run opens all of them before it starts a worker. Each channel therefore knows all its writers and readers
from the start, and cannot close too early.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flowchan.channel.addressed import Addressed
from flowchan.channel.channel import Channel, In, Out, most_bytes
from flowchan.declare.broadcast import Broadcast
from flowchan.declare.values import Edge
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.lineage import FinishedItems
from flowchan.run.policy.plan import Plan, PlannedWorker
from flowchan.run.worker.pace import Pace, pace_of
from flowchan.run.worker.state_log import StateLog, log_of

_NUMBER_BITS = 48

Channels = Mapping[str, Channel[Any]]


@dataclass(frozen=True, slots=True)
class SharedWithRun:
    """Objects that a worker shares with the program and with the other workers of its stage."""

    pace: Pace | None = None
    """Schedule of the stage's items, if its rate is limited."""
    finished: FinishedItems | None = None
    """Source items that earlier runs have finished, if the run can be resumed."""
    broadcasts: tuple[Broadcast[Any], ...] = ()
    """Broadcast values of the graph."""
    sampled: int | None = None
    """Position of the stage in the graph if the run samples items; otherwise None."""


SHARES_NOTHING = SharedWithRun()


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of one worker, by the port names of its stage."""

    inputs: dict[str, In[Any]]
    outputs: dict[str, Out[Any]]
    errors: Out[Any] | None
    shared: SharedWithRun = SHARES_NOTHING
    states: StateLog | None = None
    """Log of the states of the worker's keys, if it is a process of a stage with state."""

    def everything(self) -> Iterator[In[Any] | Out[Any]]:
        """Yield all ports, readers first, because taken items must be finished before outputs close."""
        yield from self.inputs.values()
        yield from self.writers()

    def by_parameter(self, unwanted: Callable[[], None] | None = None) -> dict[str, Any]:
        """Return the ports as arguments for the operator's loop.

        If an output has one port for each worker of its reader, these ports become one argument. This
        argument calls ``unwanted`` for each item to a worker that has ended.
        """
        ends: dict[str, Any] = dict(self.inputs)
        addressed: dict[str, list[Out[Any]]] = {}
        for name, port in self.outputs.items():
            parameter, dot, _ = name.partition(".")
            if dot:
                addressed.setdefault(parameter, []).append(port)
            else:
                ends[name] = port
        return ends | {name: Addressed(ports, unwanted) for name, ports in addressed.items()}

    def writers(self) -> Iterator[Out[Any]]:
        yield from self.outputs.values()
        if self.errors is not None:
            yield self.errors


class PortNames(Protocol):
    """Names of the channels of a worker's ports, as in a ``PlannedWorker``."""

    @property
    def inputs(self) -> Mapping[str, str]: ...

    @property
    def outputs(self) -> Mapping[str, str]: ...

    @property
    def errors(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class OpenedPlan:
    """Everything that ``open_plan`` opens. Channels are keyed by name, inputs and shared objects by stage."""

    channels: dict[str, Channel[Any]]
    ports: dict[WorkerId, Ports]
    inputs: dict[str, Out[Any] | Addressed]
    shared: dict[str, SharedWithRun]


def open_plan(plan: Plan, workers: Collection[PlannedWorker]) -> OpenedPlan:
    """Open the plan's channels, the ports of this machine's ``workers``, and the program's inputs.

    All channels get an equal share of the run's memory. If the graph has worker processes, its broadcast
    values are published. Raise ``OSError`` if there is not enough memory.
    """
    channels = {edge.name: _open_channel(edge, plan) for edge in plan.edges}
    for name in {name for worker in plan.workers if worker.host for name in worker.inputs.values()}:
        channels[name]._leaves_host()
    inputs = {stage: _open_input(plan, names, channels) for stage, names in plan.inputs.items()}
    broadcasts = tuple(plan.graph._broadcasts)
    if any(stage.placement.own_process for stage in plan.graph.stages):
        for value in broadcasts:
            value._share()
    shared = {
        stage.name: SharedWithRun(
            pace_of(stage), plan.finished_at(stage.name), broadcasts, place if plan.samples_items else None
        )
        for place, stage in enumerate(plan.graph.stages)
    }
    ports = {
        worker.id: open_ports(worker, channels, shared[worker.id.stage], log_of(worker.stage))
        for worker in workers
    }
    return OpenedPlan(channels, ports, inputs, shared)


def _open_input(plan: Plan, names: tuple[str, ...], channels: Channels) -> Out[Any] | Addressed:
    """Open the ports through which the program puts items into an input."""
    ports = [channels[name].writer() for name in names]
    addressed = any(edge.to_worker for edge in plan.edges if edge.name in names)
    return Addressed(ports) if addressed else ports[0]


def open_ports(
    worker: PortNames,
    channels: Channels,
    shared: SharedWithRun = SHARES_NOTHING,
    states: StateLog | None = None,
) -> Ports:
    """Open the ports of one worker. ``states`` is the log of its keys' states.

    For a replacement, call this before closing the ports of the dead worker. Otherwise, a channel could close
    because its last writer or reader seems to be gone.
    """

    def supervised(port: Any) -> Any:
        port._supervise()
        return port

    return Ports(
        {port: supervised(channels[name].reader()) for port, name in worker.inputs.items()},
        {port: supervised(channels[name].writer()) for port, name in worker.outputs.items()},
        None if worker.errors is None else supervised(channels[worker.errors].writer()),
        shared,
        states,
    )


def _open_channel(edge: Edge, plan: Plan) -> Channel[Any]:
    most = min(plan.memory, most_bytes()) if edge.transport.copies else None
    channel: Channel[Any]
    if edge.writer in plan.graph._services and plan.graph.stage_named(edge.writer).operator.outside:
        channel = plan.graph._services[edge.writer].inbox
    else:
        channel = Channel(edge.capacity, across=edge.transport.name, max_bytes=most)
    channel._name = edge.name
    if edge.to_worker:
        if edge.routed:
            channel._keep_numbers()
        elif edge.transport.copies:
            # Each output carries the number of its input item, so the items of two workers must not have the
            # same number.
            channel._number_from(edge.to_worker << _NUMBER_BITS)
    channel._share = plan.share
    return channel

"""Opens what is planned, for one machine: the channels, the ports of the workers that it runs, and the
writing ends of the inputs. All of it comes before anything starts, so that a channel knows all its writers
and readers from the beginning and can't close too early."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flowchan.channel.addressed import Addressed
from flowchan.channel.channel import Channel, In, Out, most_bytes
from flowchan.declare.values import Edge
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.plan import Plan, PlannedWorker

Channels = Mapping[str, Channel[Any]]


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one worker, by the names in the stage's declaration."""

    inputs: dict[str, In[Any]]
    outputs: dict[str, Out[Any]]
    errors: Out[Any] | None

    def everything(self) -> Iterator[In[Any] | Out[Any]]:
        """Readers first: what they had in hand is finished before the outputs end."""
        yield from self.inputs.values()
        yield from self.writers()

    def by_parameter(self, unwanted: Callable[[], None] | None = None) -> dict[str, Any]:
        """What an operator's body is called with. Ports to the workers of one reader are one end;
        ``unwanted``
        hears of items for those of them that have ended."""
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
    """Which channel each port of a worker belongs to, as a ``PlannedWorker`` says it."""

    @property
    def inputs(self) -> Mapping[str, str]: ...

    @property
    def outputs(self) -> Mapping[str, str]: ...

    @property
    def errors(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class OpenedPlan:
    """What was opened: ``ports`` by worker, ``inputs`` by stage name."""

    channels: dict[str, Channel[Any]]
    ports: dict[WorkerId, Ports]
    inputs: dict[str, Out[Any] | Addressed]


def open_plan(plan: Plan, workers: Collection[PlannedWorker]) -> OpenedPlan:
    """Opens the channels of ``plan``, the ports of ``workers`` (those that run on this machine), and the
    inputs. Each channel gets the same share of the run's memory. Raises ``OSError`` when there is no
    memory."""
    channels = {edge.name: _open_channel(edge, plan) for edge in plan.edges}
    for name in {name for worker in plan.workers if worker.host for name in worker.inputs.values()}:
        channels[name]._leaves_host()
    inputs = {stage: _open_input(plan, names, channels) for stage, names in plan.inputs.items()}
    return OpenedPlan(channels, {worker.id: open_ports(worker, channels) for worker in workers}, inputs)


def _open_input(plan: Plan, names: tuple[str, ...], channels: Channels) -> Out[Any] | Addressed:
    """The end into which the user puts."""
    ports = [channels[name].writer() for name in names]
    addressed = any(edge.to_worker for edge in plan.edges if edge.name in names)
    return Addressed(ports) if addressed else ports[0]


def open_ports(worker: PortNames, channels: Channels) -> Ports:
    """The ports of one worker. Those of a successor are opened before its predecessor's are closed: then no
    channel believes that its last writer or reader has gone."""

    def supervised(port: Any) -> Any:
        port._supervise()
        return port

    return Ports(
        {port: supervised(channels[name].reader()) for port, name in worker.inputs.items()},
        {port: supervised(channels[name].writer()) for port, name in worker.outputs.items()},
        None if worker.errors is None else supervised(channels[worker.errors].writer()),
    )


def _open_channel(edge: Edge, plan: Plan) -> Channel[Any]:
    most = min(plan.memory, most_bytes()) if edge.transport.copies else None
    channel: Channel[Any] = Channel(edge.capacity, across=edge.transport.name, max_bytes=most)
    channel._name = edge.name
    channel._share = plan.share
    return channel

"""Opens what is planned, for one machine: the channels, the ports of the workers that it runs, and the
writing ends of the inputs. All of it comes before anything starts, so that a channel knows all its writers
and readers from the beginning and can't close too early."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flowchan.channel.channel import Channel, In, Out, most_bytes
from flowchan.declare.values import Link
from flowchan.run.events import WorkerId
from flowchan.run.plan import Plan, PlannedWorker

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
class Opened:
    """What was opened: ``ports`` by worker, ``inputs`` by stage name."""

    channels: dict[str, Channel[Any]]
    ports: dict[WorkerId, Ports]
    inputs: dict[str, Out[Any]]


def open_plan(plan: Plan, workers: Collection[PlannedWorker]) -> Opened:
    """Opens the channels of ``plan``, the ports of ``workers`` (those that run on this machine), and the
    inputs. Each channel gets the same share of the run's memory. Raises ``OSError`` when there is no
    memory."""
    channels = {link.name: _open_channel(link, plan) for link in plan.links}
    for name in {name for worker in plan.workers if worker.host for name in worker.inputs.values()}:
        channels[name]._leaves_host()
    inputs: dict[str, Out[Any]] = {stage: channels[name].writer() for stage, name in plan.inputs.items()}
    return Opened(channels, {worker.id: open_ports(worker, channels) for worker in workers}, inputs)


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


def _open_channel(link: Link, plan: Plan) -> Channel[Any]:
    most = min(plan.memory, most_bytes()) if link.medium.copies else None
    channel: Channel[Any] = Channel(link.capacity, across=link.medium.name, max_bytes=most)
    channel._name = link.name
    channel._share = plan.share
    return channel

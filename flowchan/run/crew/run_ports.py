"""Open, replace and close a run's channels and ports, on behalf of the supervisor and the crew.

This process opens all channels before any worker starts. This process also opens the ports of workers on
other hosts; the links to their agents use these ports.

Invariants. Only the supervisor's thread opens, replaces and releases ports. The table of ports may change at
any time. Other threads must therefore copy it in one step (``list(…)`` of a dict).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from flowchan import _core
from flowchan.channel.addressed import Addressed, ports_of_end
from flowchan.channel.channel import Channel, In, Out
from flowchan.errors import ChannelError
from flowchan.run.crew.recovery import take_up
from flowchan.run.observe.measure import Snapshot, measure
from flowchan.run.policy import seeds
from flowchan.run.policy.deadlock import Activity
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.plan import Plan, PlannedWorker
from flowchan.run.worker.opening import Ports, open_plan, open_ports
from flowchan.run.worker.port_release import broken_by


class RunChannels(Protocol):
    """Channels of a run, in the form that the supervisor uses.

    Attributes:
        channels: Channels by name.
    """

    channels: Mapping[str, Channel[Any]]

    def stop_sources(self) -> None:
        """Close the channels of all sources and inputs."""

    def end_services(self) -> None:
        """Ask the services to end after the requests that have arrived."""

    def drop_queued(self) -> None:
        """Discard the items that currently wait in the channels of :meth:`Plan.queues`."""

    def close_unwanted(self) -> None:
        """Close the inputs of stages whose outputs have no readers.

        A stage that waits for an item does not notice that its readers are gone.
        """

    def break_all(self, cause: BaseException | None) -> None:
        """Abort every channel."""

    def broken(self, id: WorkerId | None) -> list[str]:
        """Return the names of one worker's broken channels, or of all broken channels if ``id`` is None."""

    def cause_of(self, channel: str) -> BaseException:
        """Return the error that broke a channel, or ``Broken`` if none was given."""

    def activity(self) -> Activity:
        """Return counts of all channels that are cheap to read."""

    def snapshots(self) -> tuple[Snapshot, ...]:
        """Return the counters of every channel."""


class RunPorts:
    """Channels, ports and workers of one run.

    Args:
        plan: Plan of the run.

    Attributes:
        plan: Plan of the run.
        channels: Channels by name.
        inputs: Writing ends of the run's inputs, by stage.
        ports: Ports by worker.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        opened = open_plan(plan, plan.workers)
        self.channels: Mapping[str, Channel[Any]] = opened.channels
        self.inputs: Mapping[str, Out[Any] | Addressed] = opened.inputs
        self.ports: dict[WorkerId, Ports] = opened.ports
        self._shared = opened.shared
        self._workers = {worker.id: worker for worker in plan.workers}
        self._workers_of = Counter(id.stage for id in self._workers)
        self._starts: Counter[WorkerId] = Counter()
        remote = Counter(worker.id.stage for worker in plan.workers if worker.host)
        self._remote = remote.total()
        read_remotely = {edge.name for edge in plan.edges if edge.reader in remote}
        self._read_here = [one for name, one in self.channels.items() if name not in read_remotely]
        self._scaled: set[str] = set()  # stages that have ever had more workers than declared
        self._leaving: set[WorkerId] = set()
        self._leased_at_break: dict[str, int] = {}
        self._dropped: Counter[str] = Counter()  # number of items that drop_queued() has discarded
        self._unread = {worker.id: True for worker in plan.workers if worker.gathers}
        self._between = [
            ([self.channels[name] for name in into], [self.channels[name] for name in out])
            for into, out in plan.between()
        ]

    # --- channels ---

    def stop_sources(self) -> None:
        """See :class:`RunChannels`."""
        for edge in self.plan.edges:
            if edge.writer in self.plan.sources:
                self.channels[edge.name].close()

    def end_services(self) -> None:
        """See :class:`RunChannels`."""
        for end in {service.end for service in self.plan.graph._services.values()}:
            end()

    def drop_queued(self) -> None:
        """See :class:`RunChannels`.

        Items that arrive during the call are not discarded, because they are at the end of the queue.
        """
        for name in self.plan.queues():
            channel = self.channels[name]
            for _ in range(channel.stats().inside):
                try:
                    channel.get_nowait()
                except ChannelError:  # workers have taken the other items
                    break
                except Exception:  # the item cannot be unpickled, but has been taken
                    pass
                self._dropped[name] += 1

    def close_unwanted(self) -> None:
        """See :class:`RunChannels`."""
        for inputs, outputs in self._between:
            if all(out.closed and not out.broken for out in outputs):
                for channel in inputs:
                    channel.close()

    def break_all(self, cause: BaseException | None) -> None:
        """See :class:`RunChannels`."""
        for name, channel in self.channels.items():
            self._leased_at_break.setdefault(name, channel.stats().leased)
            channel.abort(cause)

    def close(self, abandoned: frozenset[WorkerId]) -> None:
        """Release the ports of all workers that were not abandoned, and close the input channels.

        The user's next ``put`` into an input then raises ``Closed``.
        """
        for id in list(self.ports):
            if id not in abandoned:
                self.release(id)
        for end in self.inputs.values():
            for port in ports_of_end(end):
                port.channel.close()
        for service in self.plan.graph._services.values():
            service.ended.close()

    def broken(self, id: WorkerId | None) -> list[str]:
        """See :class:`RunChannels`."""
        names = self.channels if id is None else self._workers[id].channels()
        return [name for name in names if self.channels[name].broken]

    def cause_of(self, channel: str) -> BaseException:
        """See :class:`RunChannels`."""
        error = broken_by(self.channels[channel])
        return error.__cause__ or error

    def activity(self) -> Activity:
        """See :class:`RunChannels`.

        The channels in this process do not show whether workers on hosts wait. This method therefore counts
        all of these workers as waiting, but does not count the links that read for them. An observation then
        asks the hosts of these workers.
        """
        moved, _, writing = _core._observe(list(self.channels.values()))
        _, reading, _ = _core._observe(self._read_here)
        opened = any(not port.channel.closed for end in self.inputs.values() for port in ports_of_end(end))
        opened = opened or any(not service.inbox.closed for service in self.plan.graph._services.values())
        return Activity(moved, reading + self._remote, writing, opened, frozenset(list(self._unread)))

    def snapshots(self) -> tuple[Snapshot, ...]:
        """See :class:`RunChannels`."""
        return measure(self.plan, self.channels, self.ports, self._leased_at_break, self._dropped)

    # --- ports of workers ---

    def worker(self, id: WorkerId) -> PlannedWorker:
        """Return the plan of a worker."""
        return self._workers[id]

    def gathering_port(self, id: WorkerId) -> In[Any]:
        """Return the input port of a worker that collects results."""
        return self.ports[id].inputs["items"]

    def result_read(self, id: WorkerId) -> None:
        """Record that the program has begun to read a result. Any thread may call this method."""
        self._unread.pop(id, None)

    def started(self, id: WorkerId) -> seeds.Worker:
        """Count a start of this worker, and return its identity and seed."""
        incarnation = self._starts[id]
        self._starts[id] += 1
        seed = seeds.seed_of(self.plan.seed, id.stage, id.number, incarnation)
        return seeds.Worker(id.stage, id.number, self._workers_of[id.stage], seed, incarnation)

    def release(self, id: WorkerId) -> None:
        """Close the ports of a worker that has ended or was abandoned."""
        ports = self.ports.get(id)
        for port in () if ports is None else ports.everything():
            port._may_close = None
            port.close()
        if id in self._leaving:
            self.ports.pop(id, None)

    def recover(self, id: WorkerId, blame: bool, alone: bool = False) -> None:
        """Open new ports for the replacement of a dead worker, and return its items to the channels.

        If ``alone`` is true, only the replacement may take these items.
        """
        old, new = self.ports[id], self._open(id)
        take_up(old, new, alone or self._workers[id].stage.keeps_its_own, blame)
        self.ports[id] = new

    def add(self, id: WorkerId) -> PlannedWorker:
        """Open the ports of an additional worker.

        From now on, the workers of the stage put their outputs in turn, so that the outputs stay in item
        order.
        """
        worker = self.plan.worker(id)
        if worker.stage.workers == 1 and id.stage not in self._scaled:
            self._scaled.add(id.stage)
            for peer in [peer for peer in self.ports if peer.stage == id.stage]:
                for reader in self.ports[peer].inputs.values():
                    reader._keep_turns()
        self._workers[id] = worker
        self._workers_of[id.stage] = id.number
        self.ports[id] = self._open(id)
        return worker

    def remove(self, id: WorkerId) -> None:
        """Let the input ports of a worker end after its current item."""
        self._leaving.add(id)
        for reader in self.ports[id].inputs.values():
            reader._retire()

    def ended_workers(self) -> list[WorkerId]:
        """Return the removed workers whose ports have been released."""
        return [id for id in self._leaving if id not in self.ports]

    def forget(self, id: WorkerId) -> None:
        """Forget a removed worker."""
        self._leaving.discard(id)
        self._workers.pop(id, None)

    def _open(self, id: WorkerId) -> Ports:
        old = self.ports.get(id)
        states = None if old is None else old.states
        ports = open_ports(self._workers[id], self.channels, self._shared[id.stage], states)
        for reader in ports.inputs.values():
            if id.stage in self._scaled:
                reader._keep_turns()
            if id in self._leaving:
                reader._retire()
        return ports

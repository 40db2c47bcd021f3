"""The channels of one run and the ports of its workers, which the supervisor and all parts of the crew share.

All channels are opened in this process before any worker starts. A worker on a host also has its ports here:
the link to its agent uses them.

Invariants. Only the supervisor's thread opens, replaces and releases ports. Other threads read the table of
ports in one step (``list(…)`` of a dict), because it may change at any time.
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
    """The channels of a run, in the supervisor's view."""

    def stop_sources(self) -> None:
        """Close the channels of all sources and inputs."""

    def drop_queued(self) -> None:
        """Discard the items that wait now for a stage, in all channels of :meth:`Plan.queues`."""

    def close_unwanted(self) -> None:
        """Close the inputs of stages whose outputs have no readers.

        Such a stage does not notice that while it waits for an item.
        """

    def break_all(self, cause: BaseException | None) -> None:
        """Abort every channel."""

    def broken(self, id: WorkerId | None) -> list[str]:
        """List the broken channels: those of a worker's ports, or all."""

    def cause_of(self, channel: str) -> BaseException:
        """Return the error with which a broken channel was aborted, or ``Broken`` itself without one."""

    def activity(self) -> Activity:
        """Return the cheapest observation of all channels."""

    def snapshots(self) -> tuple[Snapshot, ...]:
        """Return the counts of all channels."""


class RunPorts:
    """The channels, ports and workers of one run.

    Args:
        plan: Plan of the run.

    Attributes:
        plan: The plan of the run.
        channels: Its channels by name.
        inputs: The writing ends of its inputs by stage.
        ports: The ports of its workers.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        opened = open_plan(plan, plan.workers)
        self.channels: Mapping[str, Channel[Any]] = opened.channels
        self.inputs: Mapping[str, Out[Any] | Addressed] = opened.inputs
        self.ports: dict[WorkerId, Ports] = opened.ports
        self._paces = opened.paces
        self._workers = {worker.id: worker for worker in plan.workers}
        self._workers_of = Counter(id.stage for id in self._workers)
        self._starts: Counter[WorkerId] = Counter()
        self._remote = sum(bool(worker.host) for worker in plan.workers)
        self._scaled: set[str] = set()  # stages that have had more workers than declared
        self._leaving: set[WorkerId] = set()
        self._leased_at_break: dict[str, int] = {}
        self._dropped: Counter[str] = Counter()  # items that drop_queued() has taken
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

    def drop_queued(self) -> None:
        """See :class:`RunChannels`. Outputs that are put in the meantime stay, because they come last."""
        for name in self.plan.queues():
            channel = self.channels[name]
            for _ in range(channel.stats().inside):
                try:
                    channel.get_nowait()
                except ChannelError:  # workers have taken the rest
                    break
                except Exception:  # an item that can't be unpickled is discarded too
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
        """Release the ports of all workers except the abandoned ones, and close the channels of the inputs.

        The user still has the writing ends of the inputs, whose next put raises ``Closed``.
        """
        for id in list(self.ports):
            if id not in abandoned:
                self.release(id)
        for end in self.inputs.values():
            for port in ports_of_end(end):
                port.channel.close()

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

        No channel shows whether workers on hosts wait, so all of them count as waiting until an observation
        asks them.
        """
        moved, reading, writing = _core._observe(list(self.channels.values()))
        opened = any(not port.channel.closed for end in self.inputs.values() for port in ports_of_end(end))
        return Activity(moved, reading + self._remote, writing, opened, frozenset(list(self._unread)))

    def snapshots(self) -> tuple[Snapshot, ...]:
        """See :class:`RunChannels`."""
        return measure(self.plan, self.channels, self.ports, self._leased_at_break, self._dropped)

    # --- workers ---

    def worker(self, id: WorkerId) -> PlannedWorker:
        """Return the plan of a worker."""
        return self._workers[id]

    def gathering_port(self, id: WorkerId) -> In[Any]:
        """Return the port from which a worker that gathers results takes its items."""
        return self.ports[id].inputs["items"]

    def result_read(self, id: WorkerId) -> None:
        """Note that a thread takes the items of a result. Any thread may call this."""
        self._unread.pop(id, None)

    def started(self, id: WorkerId) -> seeds.Worker:
        """Count a start of a worker. Return the worker's own description."""
        incarnation = self._starts[id]
        self._starts[id] += 1
        seed = seeds.seed_of(self.plan.seed, id.stage, id.number, incarnation)
        return seeds.Worker(id.stage, id.number, self._workers_of[id.stage], seed, incarnation)

    def release(self, id: WorkerId) -> None:
        """Close the ports of a worker that has ended or is given up."""
        ports = self.ports.get(id)
        for port in () if ports is None else ports.everything():
            port._may_close = None
            port.close()
        if id in self._leaving:
            self.ports.pop(id, None)

    def recover(self, id: WorkerId, blame: bool, alone: bool = False) -> None:
        """Replace the ports of a dead worker by new ones, which take up its items.

        ``alone``: no other worker may get them.
        """
        old, new = self.ports[id], self._open(id)
        take_up(old, new, alone or self._workers[id].stage.keeps_its_own, blame)
        self.ports[id] = new

    def add(self, id: WorkerId) -> PlannedWorker:
        """Open the ports of an additional worker. The readers of its stage share turns from now on."""
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
        """Let the readers of a worker end after its present item."""
        self._leaving.add(id)
        for reader in self.ports[id].inputs.values():
            reader._retire()

    def ended_workers(self) -> list[WorkerId]:
        """List the workers that were removed and whose ports are released."""
        return [id for id in self._leaving if id not in self.ports]

    def forget(self, id: WorkerId) -> None:
        """Forget a worker that has left."""
        self._leaving.discard(id)
        self._workers.pop(id, None)

    def _open(self, id: WorkerId) -> Ports:
        ports = open_ports(self._workers[id], self.channels, self._paces[id.stage])
        for reader in ports.inputs.values():
            if id.stage in self._scaled:
                reader._keep_turns()
            if id in self._leaving:
                reader._retire()
        return ports

"""Handle what agents report about themselves and about a run's workers on their hosts."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Mapping

from flowchan.hosts.agent_handle import AgentHandle
from flowchan.hosts.agent_messages import (
    REPORT_TYPES,
    AgentReport,
    ClockReading,
    Close,
    Echo,
    Lacking,
    PeerEnded,
    Release,
    Waiting,
    WrittenStack,
    not_remade,
    refusal,
)
from flowchan.hosts.stack_requests import StackRequests
from flowchan.hosts.worker_ports import WorkerPorts, WorkerStreams
from flowchan.items.text import shown
from flowchan.run.crew.death_log import DeathLog
from flowchan.run.crew.mail import run_is_over
from flowchan.run.crew.part import Report
from flowchan.run.crew.process_exit import ProcessExit
from flowchan.run.crew.run_ports import RunPorts
from flowchan.run.policy.events import (
    Aborted,
    Began,
    Death,
    Ended,
    Failure,
    GroupLost,
    ItemSpans,
    MembersTried,
    ProcessEnded,
    TriesMember,
    WorkerId,
)
from flowchan.run.policy.plan import PlannedWorker
from flowchan.run.worker import logs


class AgentReports:
    """Receives the reports of all agents in a pool.

    The pool's thread for reports calls the methods, except :meth:`is_late`.

    Args:
        ports: Ports of the run.
        workers: Workers on the pool's hosts.
        streams: Streams of these workers.
        deaths: Log of the workers' deaths.
        send_by_value: Method that starts a worker again, with the modules that its host lacks. The caller
            holds the lock of the streams.

    Attributes:
        tell: Receives the events for the supervisor.
        stack_requests: Requests for stacks, whose answers arrive here.
    """

    def __init__(
        self,
        ports: RunPorts,
        workers: Mapping[WorkerId, PlannedWorker],
        streams: WorkerStreams,
        deaths: DeathLog,
        send_by_value: Callable[[Lacking, WorkerPorts], None],
    ) -> None:
        self._ports, self._workers, self._streams, self._deaths = ports, workers, streams, deaths
        # Use a weak reference: a cycle would keep the run's memory until the garbage collector runs.
        self._send_by_value = weakref.WeakMethod(send_by_value)
        self.tell: Report = run_is_over
        self.stack_requests = StackRequests()

    def receive(self, agent: AgentHandle, message: AgentReport) -> None:
        """Handle a report from an agent or one of its workers."""
        if not self._is_valid(message):
            agent.end(f"it sent an invalid report: {shown(message)}")
            return
        match message:
            case Echo(number):
                agent.echoed = number
            case ClockReading():
                agent.clock.answered(message)
                if agent.clock.is_rough:
                    agent.hint(ClockReading(time.monotonic_ns()))
            case ItemSpans():
                agent.hint(ClockReading(time.monotonic_ns()))
                self.tell(message.shifted(-agent.clock.ahead))
            case Waiting():
                agent.waiting = message
            case WrittenStack():
                self.stack_requests.receive(message)
            case logs.Logged():
                logs.log_locally(message)
            case Ended() | PeerEnded() | Lacking():
                self._receive_from_worker(agent, message)
            case TriesMember() | MembersTried():
                self._deaths.tries_members(message)
            case Began(worker):
                self._deaths.began(worker)
                self.tell(message)
            case Failure(worker):
                with self._streams.lock:
                    if (stream := self._streams.get(worker)) is not None:
                        stream.failed = True
                self.tell(dataclasses.replace(message, host=agent.host))
            case GroupLost(worker, Failure() as failure):
                self.tell(GroupLost(worker, dataclasses.replace(failure, host=agent.host)))
            case Aborted():  # replace the agent's timestamp with the driver's
                self.tell(dataclasses.replace(message, host=agent.host, at=time.monotonic_ns()))
            case _:
                self.tell(message)

    def _is_valid(self, message: object) -> bool:
        """Return whether a message concerns a worker of this part, or no worker at all."""
        worker = getattr(message, "worker", None)
        is_known = worker is None or (
            isinstance(worker, WorkerId) and (worker in self._workers or worker.number == 0)
        )
        return isinstance(message, REPORT_TYPES) and is_known

    def _receive_from_worker(self, agent: AgentHandle, message: Ended | PeerEnded | Lacking) -> None:
        """Handle the report that a worker or its process has ended, or that modules are missing."""
        with self._streams.lock:
            stream = self._streams.get(message.worker)
            if stream is None or stream.agent is not agent:
                return
            if stream.ended is not None:
                if not stream.finished:  # the process may have died before it closed its ports
                    agent.send(Close(message.worker))
                return
            if isinstance(message, Ended):
                stream.ended = message
                return
            if isinstance(message, Lacking):
                if (send := self._send_by_value()) is not None:
                    send(message, stream)
                return
            event = self.process_ended(
                stream, message.worker, dataclasses.replace(message.exit, host=agent.host)
            )
        self.tell(event)

    def process_ended(self, stream: WorkerPorts, id: WorkerId, ended: ProcessExit) -> ProcessEnded | Death:
        """Record that a worker's process has ended, and return the event. The caller holds the lock."""
        stream.process_ended = True
        return ProcessEnded(id) if stream.failed else self._deaths.died(self._workers[id], ended)

    def finished(self, agent: AgentHandle, number: int) -> None:
        """Record that the link has put all outputs of a stream and closed its ports here."""
        with self._streams.lock:
            for stream in self._streams.of(agent).values():
                stream.finished |= stream.number == number
        self.ends(agent)

    def refused(self, agent: AgentHandle, number: int, port: int) -> None:
        """Break the channel of an item that cannot leave this machine."""
        if (id := self._streams.worker_on(agent, number)) is not None:
            channel = [*self._ports.ports[id].inputs.values()][port].channel
            channel.abort(refusal(channel._name, f"to host {agent.host!r}"))

    def not_remade(self, agent: AgentHandle, number: int, port: int) -> None:
        """Break the channel of a lost item that could not be produced again."""
        if (id := self._streams.worker_on(agent, number)) is not None:
            channel = [*self._ports.ports[id].writers()][port].channel
            channel.abort(not_remade(channel._name))

    def ends(self, agent: AgentHandle) -> bool:
        """Report the workers that have ended and whose outputs have all arrived.

        Return whether more workers are ending.
        """
        with self._streams.lock:
            ending = [(id, stream) for id, stream in self._streams.of(agent).items() if stream.ended]
            done = [(id, stream) for id, stream in ending if self._is_done(id)]
            for id, _ in done:
                self._streams.pop(id)
        for _, stream in done:
            assert stream.ended is not None
            stream.agent.link.drop(stream.number)
            stream.agent.send(Release(stream.ended.worker))
            self.tell(stream.ended)
        return len(ending) > len(done)

    def is_late(self, agent: AgentHandle) -> bool:
        """Return whether an agent is late: it has not killed a worker by the time that was set.

        The thread that watches the links calls this method. The method takes no lock, because a thread that
        waits for an agent may hold the lock.
        """
        now = time.monotonic()
        return any(stream.kill_by < now for stream in list(self._streams.of(agent).values()))

    def _is_done(self, id: WorkerId) -> bool:
        """Return whether all outputs of a worker have arrived, or a broken channel makes them useless."""
        broken = any(port.channel.broken for port in self._ports.ports[id].everything())
        return self._streams[id].finished or broken

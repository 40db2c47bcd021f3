"""Manage the hosts of one pool: the driver's side of one part of a run's crew.

The ports of a remote worker are in the driver's process, as if it were a local worker. All ports of one
worker share one stream on the link to its host. The link sends the items that the ports receive, and puts the
outputs that come back. Leases, ordering and recovery therefore stay in the driver's channels.

A worker that dies while its agent is alive is recovered and replaced on its host. If an agent dies or is
silent for too long, the driver fences it. The driver then ignores its messages, and returns the items of its
workers to the channels. Another agent on the same host then restarts the workers. If no agent can be started
there, an agent on another host of the pool restarts them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from flowchan.channel.channel import most_bytes
from flowchan.errors import Closed, HostError
from flowchan.hosts.agent_handle import AgentCallbacks, AgentHandle
from flowchan.hosts.agent_messages import (
    ClockReading,
    Lacking,
    NewMembership,
    Recover,
    Release,
    Start,
)
from flowchan.hosts.agent_questions import AgentQuestions
from flowchan.hosts.agent_reports import AgentReports
from flowchan.hosts.agent_starts import AgentStarts, must_have_descriptors
from flowchan.hosts.code import PackedStages
from flowchan.hosts.host_gangs import HostGangs
from flowchan.hosts.kept_outputs import keeps_outputs
from flowchan.hosts.providers.provider import Provider
from flowchan.hosts.worker_ports import HostWorkers, WorkerPorts, WorkerStreams, host_for, together
from flowchan.run.crew.death_log import DeathLog
from flowchan.run.crew.mail import run_helper, run_is_over
from flowchan.run.crew.part import Report
from flowchan.run.crew.process_exit import ProcessExit
from flowchan.run.crew.recovery import deaths_over_item
from flowchan.run.crew.run_ports import RunPorts
from flowchan.run.policy import decisions
from flowchan.run.policy.actions import Terminate
from flowchan.run.policy.deadlock import Waits
from flowchan.run.policy.events import (
    Ended,
    Failure,
    RequestCancelled,
    WorkerId,
)
from flowchan.run.policy.plan import PlannedWorker
from flowchan.run.policy.seeds import Worker
from flowchan.run.policy.stats import HostStats
from flowchan.run.worker.worker import join_ports
from flowchan.transport.interrupts import interrupts_allowed


class HostsPart:
    """See :class:`CrewPart`.

    The supervisor's thread calls the methods of :class:`CrewPart`. The thread that receives reports calls
    ``AgentReports``, and ``_send_by_value`` through it. A separate thread handles each agent's death.
    ``_lock`` guards the hosts and the workers' streams.
    """

    def __init__(
        self,
        ports: RunPorts,
        provider: Provider,
        peer_timeout: float,
        tls: bool,
        workers: Sequence[PlannedWorker],
    ) -> None:
        self._ports = ports
        self._provider, self._peer_timeout = provider, peer_timeout
        self._starts = AgentStarts(provider, peer_timeout, tls, f"flowchan {ports.plan.graph.name}")
        self._workers = {worker.id: worker for worker in workers}
        self._hosts = {name: HostWorkers(name, number) for number, name in enumerate(provider.hosts)}
        self._streams = WorkerStreams()
        self._stream_numbers = 0
        self._deaths = DeathLog(ports.plan)
        self._packed = PackedStages()
        self._keeping: dict[tuple[str, ...], bool] = {}  # results of _keeps_outputs
        self._lock = self._streams.lock
        self._reports = AgentReports(ports, self._workers, self._streams, self._deaths, self._send_by_value)
        self._gangs = HostGangs()
        self._closing = False
        self._questions = AgentQuestions()

    # --- starting ---

    def start(self, report: Report) -> None:
        """See :class:`CrewPart`.

        Start an agent on every host that gets workers, and start the workers once all agents have dialled.
        Raise ``HostError`` if that fails.
        """
        self._reports.tell = report
        self._gangs.listener = self._starts.listen(self._help, tuple(self._hosts.values()))
        for stage in {worker.stage.name: worker.stage for worker in self._workers.values()}.values():
            if stage.gang is not None:
                self._gangs.form([id for id in self._workers if id.stage == stage.name])
        used = [self._hosts[name] for name in dict.fromkeys(worker.host for worker in self._workers.values())]
        must_have_descriptors(len(used))
        # No lock is needed, because no other thread starts agents before the first worker has a stream.
        agents = [self._start_agent(host) for host in used]
        for worker in self._workers.values():
            self._packed.get(worker.stage)  # pickle the stages while the agents are starting
        for agent in agents:
            with interrupts_allowed():
                agent.is_decided.wait()
            if agent.why:
                raise HostError(f"host {agent.host!r} can't be used: {agent.why}", agent.host)
        with self._lock:
            for worker in self._workers.values():
                self._send(worker.id, self._hosts[worker.host])

    def _help(self, work: Callable[[], None]) -> None:
        """Run the function of one of this part's helper threads."""
        run_helper(work, lambda: self._reports.tell)

    def _start_agent(self, host: HostWorkers) -> AgentHandle:
        """Start an agent on a host."""
        return self._starts.start(
            host,
            AgentCallbacks(
                self._reports.receive,
                self._reports.finished,
                self._reports.refused,
                self._reports.not_remade,
                self._reports.ends,
                self._reports.is_late,
                self._over,
                self._help,
            ),
        )

    def _send(self, id: WorkerId, host: HostWorkers) -> None:
        """Start a worker on a host, on a new stream."""
        agent = host.agent or self._start_agent(host)
        ports, stage = self._ports.ports[id], self._workers[id].stage
        join_ports(ports, stage)
        for reader in ports.inputs.values() if stage.keeps_its_own else ():
            reader._read_alone()
        self._stream_numbers += 1
        agent.link.open_stream(self._stream_numbers, list(ports.inputs.values()), list(ports.writers()))
        self._streams[id] = stream = WorkerPorts(self._stream_numbers, agent, self._started(id, agent))
        self._order_start(id, stream)

    def _started(self, id: WorkerId, agent: AgentHandle) -> Worker:
        return dataclasses.replace(self._ports.started(id), host=agent.host)

    def _order_start(self, id: WorkerId, stream: WorkerPorts) -> None:
        worker = self._workers[id]
        stage, modules = self._packed.get(worker.stage, self._hosts[stream.agent.host].lacking)
        stream.agent.send(
            Start(
                stream=stream.number, info=stream.info, stage=stage, modules=modules,
                suspicion=self._deaths.started(id),
                inputs=dict(worker.inputs), outputs=dict(worker.outputs), errors=worker.errors,
                most=min(self._ports.plan.memory, most_bytes()), share=self._ports.plan.share,
                gpus=worker.stage.gpus, membership=self._membership(id, stream), elastic=self._is_elastic(id),
                sampled=self._ports.ports[id].shared.sampled,
                keeps_outputs=self._keeps_outputs(worker),
            )
        )  # fmt: skip
        if self._ports.plan.samples_items:
            stream.agent.send(ClockReading(time.monotonic_ns()))

    def _keeps_outputs(self, worker: PlannedWorker) -> bool:
        """Return :func:`keeps_outputs`, computed once for all workers of a stage with the same channels.

        The function looks at every worker of the run.
        """
        key = worker.id.stage, *worker.inputs.values(), *worker.outputs.values()
        if key not in self._keeping:
            self._keeping[key] = keeps_outputs(self._ports.plan, worker, self._workers)
        return self._keeping[key]

    def _membership(self, id: WorkerId, stream: WorkerPorts) -> Any:
        return self._gangs.membership(self._workers[id], stream.agent.host)

    def _is_elastic(self, id: WorkerId) -> bool:
        gang = self._workers[id].stage.gang
        return gang is not None and gang.elastic

    # --- reports of agents ---

    def _send_by_value(self, message: Lacking, stream: WorkerPorts) -> None:
        """Start a worker again. Send the modules that its host lacks by value, together with the stage."""
        self._hosts[stream.agent.host].lacking.update(message.modules)
        self._order_start(message.worker, stream)

    def _over(self, agent: AgentHandle) -> None:
        """Report the workers of a dead agent as dead, and start another agent for their replacements."""
        with self._lock:
            host = self._hosts[agent.host]
            host.agent_died(agent)
            lost = [id for id, stream in self._streams.of(agent).items() if not stream.process_ended]
            how = f"was lost with host {agent.host!r}: {agent.why}"
            events = []
            for id in lost:
                over_item = deaths_over_item(self._ports.ports[id])
                ended = ProcessExit(how, None, 0, 0.0, over_item, agent.host, counts=False)
                events.append(self._reports.process_ended(self._streams[id], id, ended))
            host.agent = None
            if self._streams and not host.given_up and not self._closing:
                self._start_agent(host)
        with contextlib.suppress(Closed):  # the run may be over
            for event in events:
                self._reports.tell(event)
        with self._lock:
            host.count(agent.link.state())
        agent.close(time.monotonic() + decisions.GRACE)

    # --- the supervisor's requests ---

    def release_ports(self, id: WorkerId) -> None:
        """See :class:`CrewPart`."""
        self._gangs.dismiss([id], if_meeting=True)
        with self._lock:
            stream = self._streams.pop(id, None)
        if stream is not None:
            stream.agent.link.drop(stream.number)
            stream.agent.send(Release(id))
        self._ports.release(id)

    def terminate(self, id: WorkerId, force: bool) -> None:
        """See :class:`CrewPart`."""
        self._deaths.terminated(id)
        # If the worker's process has not joined its group yet, it must not wait for its peers.
        self._gangs.dismiss([id], if_meeting=True)
        with self._lock:
            stream = self._streams.get(id)
            if stream is not None and force:
                stream.kill_by = time.monotonic() + 1.5 * self._peer_timeout
        if stream is not None:
            stream.agent.hint(Terminate(id, force))

    def kill(self) -> None:
        """See :class:`CrewPart`."""
        for agent in self._agents():
            agent.kill()

    def replace(
        self, ids: Sequence[WorkerId], blamed: WorkerId | None, later: bool = False
    ) -> tuple[Failure | Ended, ...]:
        """See :class:`CrewPart`."""
        for id in ids:
            self._recover(id, blame=id == blamed)
        gang = self._workers[ids[0]].stage.gang
        if gang is not None and not gang.elastic:
            self._gangs.form(ids)
        return () if later else self.start_workers(ids)

    def _recover(self, id: WorkerId, blame: bool) -> None:
        if self._is_elastic(id):
            self._gangs.leave(id)  # the replacement will get another group
        with self._lock:
            if id in self._streams:
                self._streams[id].blame = blame
            if not self._take_back(id) and id in self._streams:
                self._streams[id].agent.send(Recover(id, blame))

    def form_group(self, ids: Sequence[WorkerId]) -> None:
        """See :class:`CrewPart`."""
        self._gangs.form(ids)
        with self._lock:
            for id in ids:
                if (stream := self._streams.get(id)) is not None:
                    stream.agent.send(NewMembership(id, self._membership(id, stream)))

    def end_group(self, stage: str) -> None:
        """See :class:`CrewPart`."""
        self._gangs.dismiss([id for id in self._workers if id.stage == stage])

    def _take_back(self, id: WorkerId) -> bool:
        """Recover a worker whose agent is dead: drop its stream and return its items to the channels.

        Return False if there is nothing to recover, because the agent is alive or the worker has no stream.
        """
        stream = self._streams.get(id)
        if stream is None or not stream.agent.why:
            return False
        del self._streams[id]
        stream.agent.link.drop(stream.number)
        self._ports.recover(id, stream.blame)
        return True

    def start_workers(self, ids: Sequence[WorkerId]) -> tuple[Failure, ...]:
        """See :class:`CrewPart`."""
        failures = []
        for id in ids:
            try:
                with self._lock:
                    self._start_again(id)
            except Exception as error:
                failures.append(Failure(id, error, None, os.getpid()))
        return tuple(failures)

    def _start_again(self, id: WorkerId) -> None:
        self._take_back(id)
        stream = self._streams.get(id)
        if stream is None:
            self._send(id, host_for(self._workers[id], self._hosts, self._streams.values()))
        else:
            stream.process_ended, stream.failed, stream.blame = False, False, True
            stream.kill_by = math.inf
            stream.info = self._started(id, stream.agent)
            self._order_start(id, stream)

    def add(self, id: WorkerId) -> None:
        """See :class:`CrewPart`. Stages on hosts have a fixed number of workers."""
        raise ValueError(
            f"run.scale: stage {id.stage!r} runs on hosts, so its number of workers is fixed; set workers= "
            "when you declare the stage"
        )

    def remove(self, id: WorkerId) -> None:
        """See :meth:`add`."""
        self.add(id)

    def forget(self, id: WorkerId) -> None:
        """See :class:`CrewPart`. Workers on hosts are never removed."""

    def cancel_tasks(self, all_of_them: bool) -> None:
        """See :class:`CrewPart`. Coroutines on hosts run in processes."""

    def cancel_request(self, question: int) -> None:
        """See :class:`CrewPart`."""
        for agent in self._agents():
            agent.hint(RequestCancelled(question))

    def all_reported(self) -> bool:
        """See :class:`CrewPart`."""
        return self._questions.all_reported(self._agents())

    def waits(self, alive: frozenset[WorkerId]) -> Waits | None:
        """See :class:`CrewPart`."""
        agents = self._agents()
        if not self._questions.waits_are_known(agents):
            return None
        with self._lock:
            streams = {id: self._streams.get(id) for id in sorted(alive & self._workers.keys(), key=str)}
        return together(agents, streams)

    def stacks(self, ids: Collection[WorkerId]) -> dict[WorkerId, str]:
        """See :class:`CrewPart`."""
        with self._lock:
            agents = {id: self._streams[id].agent for id in ids if id in self._streams}
        return self._reports.stack_requests.ask(agents)

    def _agents(self) -> list[AgentHandle]:
        with self._lock:
            return [host.agent for host in self._hosts.values() if host.agent is not None]

    # --- closing ---

    def close(self, abandoned: frozenset[WorkerId], timeout: float | None) -> frozenset[WorkerId]:
        """See :class:`CrewPart`. End all agents; the caller closes the ports in this process."""
        with self._lock:
            self._closing = True
            agents = self._agents()
        for agent in agents:
            with self._lock:
                self._hosts[agent.host].count(agent.link.state())
            agent.leave()
        give_up = time.monotonic() + decisions.GRACE
        for agent in agents:
            agent.close(give_up)
        self._starts.close()
        with self._lock:
            for host in self._hosts.values():
                host.agent = None
        self._reports.tell = run_is_over
        return frozenset()

    def warn_of(self, abandoned: frozenset[WorkerId]) -> None:
        """See :class:`CrewPart`. This part's threads do not run user code."""

    # --- statistics ---

    def hosts(self) -> tuple[HostStats, ...]:
        """See :class:`CrewPart`."""
        with self._lock:
            workers = Counter(stream.agent.host for stream in self._streams.values())
            return tuple(host.stats(workers[host.name]) for host in self._hosts.values() if host.agents)

"""Track a run's hosts, its workers' streams on the links, and the workers that wait."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, UserDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowchan.errors import HostError
from flowchan.hosts.agent_handle import AgentHandle
from flowchan.run.policy.deadlock import Waits
from flowchan.run.policy.events import Ended, WorkerId
from flowchan.run.policy.plan import PlannedWorker
from flowchan.run.policy.seeds import Worker
from flowchan.run.policy.stats import HostStats


@dataclass
class WorkerPorts:
    """State of a remote worker, in the driver.

    Attributes:
        number: Number of the worker's stream.
        agent: Agent on the worker's host.
        info: Description of the worker, which its code can query.
        process_ended: True if its process has ended and not been replaced.
        failed: True if it has reported a failure.
        blame: True if the item that the worker held may have killed the worker.
        ended: The worker's report that it has ended. Until ``finished`` is true, its last outputs may be in
            transit.
        finished: True if all its outputs have arrived.
        kill_by: Time by which its agent must have killed it.
    """

    number: int
    agent: AgentHandle
    info: Worker
    process_ended: bool = False
    failed: bool = False
    blame: bool = True
    ended: Ended | None = None
    finished: bool = False
    kill_by: float = math.inf


class WorkerStreams(UserDict[WorkerId, WorkerPorts]):
    """Streams of a run's workers on hosts, by worker and by agent.

    Attributes:
        lock: Guards the streams, and the hosts of the pool.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._by_agent: dict[AgentHandle, dict[WorkerId, WorkerPorts]] = {}
        super().__init__()

    def __setitem__(self, id: WorkerId, stream: WorkerPorts) -> None:
        self.pop(id, None)
        super().__setitem__(id, stream)
        self._by_agent.setdefault(stream.agent, {})[id] = stream

    def __delitem__(self, id: WorkerId) -> None:
        agent = self[id].agent
        super().__delitem__(id)
        del self._by_agent[agent][id]
        if not self._by_agent[agent]:
            del self._by_agent[agent]

    def of(self, agent: AgentHandle) -> Mapping[WorkerId, WorkerPorts]:
        """Return the streams of an agent's workers, without searching those of other agents."""
        return self._by_agent.get(agent, {})

    def worker_on(self, agent: AgentHandle, number: int) -> WorkerId | None:
        """Return the worker with the stream ``number`` on an agent; None if it has ended."""
        streams = list(self.of(agent).items())  # a copy, because other threads may change the dict
        return next((id for id, stream in streams if stream.number == number), None)


MOST_AGENTS, WITHIN_S, MAX_UNCONNECTED = 10, 60.0, 3
"""The driver gives up on a host after it has started MOST_AGENTS agents there within WITHIN_S seconds.

It also gives up after MAX_UNCONNECTED agents in a row that never dialled or whose connections carried
nothing.
"""

COUNTS = ("breaks", "bytes_out", "bytes_in")  # counters in a link's state


@dataclass
class HostWorkers:
    """One host of a pool in a run, with its agent and the history of earlier ones."""

    name: str
    number: int
    agent: AgentHandle | None = None
    agents: int = 0  # number of agents started so far
    starts: list[float] = field(default_factory=list)  # times of the latest starts
    # Number of agents in a row that never dialled or whose connections carried nothing.
    unconnected: int = 0
    deaths: list[str] = field(default_factory=list)
    lacking: set[str] = field(default_factory=set)  # modules that the host lacks
    given_up: str = ""  # why the driver gave up on the host; empty if it did not
    # Totals of the link counters of dead agents.
    before: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    round_trip: float = 0.0  # round-trip time of the last dead agent's link, in seconds

    def agent_died(self, agent: AgentHandle) -> None:
        """Record the agent's death, and give up on the host if too many have died."""
        self.deaths.append(agent.why)
        is_useful = agent.has_connected and not agent.is_stuck()
        self.unconnected = 0 if is_useful else self.unconnected + 1
        self.starts = [start for start in self.starts if start > time.monotonic() - WITHIN_S]
        if self.unconnected >= MAX_UNCONNECTED or len(self.starts) >= MOST_AGENTS:
            self.given_up = agent.why

    def count(self, link: Mapping[str, Any]) -> None:
        """Add the counts of a link whose agent has ended to the host's totals."""
        for word in COUNTS:
            self.before[word] += link[word]
        self.round_trip = link["round_trip"] or self.round_trip

    def stats(self, workers: int) -> HostStats:
        """Return the host's statistics. ``workers`` is its number of workers."""
        link = self.agent.link.state() if self.agent is not None else {}
        counts = {word: self.before[word] + link.get(word, 0) for word in COUNTS}
        state = "connected" if link.get("connected") else "waiting" if link else self.given_up or "ended"
        return HostStats(
            name=self.name, state=state, workers=workers, agents=self.agents, deaths=tuple(self.deaths),
            breaks=counts["breaks"], sent=counts["bytes_out"], received=counts["bytes_in"],
            round_trip=link.get("round_trip") or self.round_trip,
        )  # fmt: skip


def host_for(
    worker: PlannedWorker, hosts: Mapping[str, HostWorkers], streams: Iterable[WorkerPorts]
) -> HostWorkers:
    """Choose a worker's planned host or, if that is impossible, the pool's host with the fewest workers.

    Args:
        worker: The worker.
        hosts: All hosts of the pool, by name.
        streams: Ports of the workers that are already on hosts.

    Returns:
        The host.

    Raises:
        HostError: The driver has given up on all hosts of the pool.
    """
    candidates = [hosts[name] for name in (worker.host, *worker.stage.placement.hosts)]
    usable = [host for host in candidates if not host.given_up]
    if not usable:
        why = "; ".join(dict.fromkeys(f"{host.name}: {host.given_up}" for host in candidates))
        raise HostError(f"no host is left for worker {worker.id}: {why}")
    if usable[0].name == worker.host:
        return usable[0]
    taken = Counter(stream.agent.host for stream in streams)
    return min(usable, key=lambda host: taken[host.name])


def together(agents: Sequence[AgentHandle], streams: Mapping[WorkerId, WorkerPorts | None]) -> Waits:
    """Combine the agents' reports about waiting threads in the workers of these streams."""
    reading: Counter[str] = Counter()
    writing: Counter[str] = Counter()
    states = {agent.number: agent.link.state() for agent in agents}
    counts = [n for agent in agents for n in (agent.number, agent.epoch, states[agent.number]["breaks"])]
    moves = not all(state["connected"] for state in states.values())
    for id, stream in streams.items():
        waits = stream and stream.agent in agents and stream.agent.waiting.workers.get(id)
        if stream is None or not waits or stream.process_ended or stream.ended is not None:
            moves = True  # the worker is being started, replaced or ended
            continue
        about = states[stream.agent.number]["streams"].get(stream.number, {})
        # A worker with staged items waits for room in the driver's channel, not for an item.
        if not about.get("staged"):
            reading.update(waits.reading)
        writing.update(waits.writing)
        counts += [stream.number, *waits.counts]
        moves = moves or waits.moves or not (waits.reading or waits.writing)
    return Waits(reading, writing, tuple(counts), moves)

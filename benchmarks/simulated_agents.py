"""Simulate a pool of many hosts on one machine.

The driver's side is real: the listener, the handshakes, the links, the supervisor and the channels. Up to
``AGENTS_PER_PROCESS`` agents share one process, and each worker is a thread of that process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from flowchan import _core
from flowchan.channel.channel import Channel
from flowchan.errors import Broken, Closed, Empty
from flowchan.hosts.agent import Agent, Orders
from flowchan.hosts.agent_messages import Leave
from flowchan.hosts.host_pool import Pool, pool_of
from flowchan.hosts.providers.provider import Launch
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.seeds import Worker
from flowchan.run.worker.opening import Ports
from flowchan.run.worker.worker import work
from flowchan.transport.link_events import PEER_TIMEOUT_S

AGENTS_PER_PROCESS = 250
CHECK_INTERVAL_S = PEER_TIMEOUT_S / 4
"""Seconds between checks whether the driver is silent."""


@dataclass(frozen=True)
class Simulated:
    """Provider that starts agents on simulated hosts."""

    count: int

    @functools.cached_property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"simulated-{number + 1}" for number in range(self.count))

    @property
    def cores(self) -> tuple[int, ...]:
        return (1,) * self.count

    def listen_at(self, hosts: Sequence[str] | None = None) -> str:
        return "127.0.0.1"

    def start(self, number: int, launch: Launch) -> _Started:
        return _Started(_processes[self.count], number, launch)


class _Processes:
    """Processes that simulate the agents of one pool."""

    def __init__(self, count: int) -> None:
        self._ended: dict[int, str] = {}
        self._lock = threading.Lock()
        command = (sys.executable, "-m", "benchmarks.simulated_agents")
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(0, count, AGENTS_PER_PROCESS)
        ]
        self._threads = [threading.Thread(target=self._listen, args=(one,)) for one in self._processes]
        for thread in self._threads:
            thread.start()

    def write(self, number: int, line: bytes) -> None:
        """Send a line to the process of an agent."""
        stdin = self._processes[number // AGENTS_PER_PROCESS].stdin
        assert stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):
            stdin.write(line)
            stdin.flush()

    def ended(self, number: int) -> str | None:
        """Return the reason why an agent has ended."""
        return self._ended.get(number)

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._ended[int(line)] = "the simulated agent has ended"

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process, thread in zip(self._processes, self._threads, strict=True):
            thread.join()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


class _Started:
    """Simulated agent, as seen by the driver."""

    def __init__(self, processes: _Processes, number: int, launch: Launch) -> None:
        self._processes, self._number = processes, number
        processes.write(number, launch.stdin)

    def ended(self) -> str | None:
        return self._processes.ended(self._number)

    def waits(self) -> bool:
        return False

    def kill(self) -> None:
        self._processes.write(self._number, f"{self._number}\n".encode())

    close = kill


_processes: dict[int, _Processes] = {}
"""Processes of each pool, by the number of its hosts. They are stored here because a provider is a plain
value."""


@contextlib.contextmanager
def simulated(count: int) -> Iterator[Pool]:
    """Yield a pool of ``count`` simulated hosts, and end their processes afterwards."""
    _processes[count] = _Processes(count)
    try:
        yield pool_of("simulated", Simulated(count), PEER_TIMEOUT_S)
    finally:
        _processes.pop(count).close()


class _WorkerThreads:
    """Workers of one simulated agent, as threads. This class replaces ``WorkerProcesses``."""

    def __init__(self, mail: Channel[Any]) -> None:
        self._mail = mail
        self.known: dict[WorkerId, Any] = {}
        self._threads: list[threading.Thread] = []

    def start(self, info: Worker, stage: bytes, ports: Ports, *_: object) -> int:
        thread = threading.Thread(target=self._work, args=(info, stage, ports), daemon=True)
        thread.start()
        self._threads.append(thread)
        return os.getpid()

    def _work(self, info: Worker, stage: bytes, ports: Ports) -> None:
        work(info, pickle.loads(stage), ports, self._mail.put, sends=True)

    def watch(self) -> None:
        """Return at once, because threads of this process do not die on their own."""

    def ended(self, id: WorkerId) -> bool:
        return False

    def give_back_gpus(self, id: WorkerId) -> None:
        """Do nothing, because the workers have no GPUs."""

    def kill(self) -> None:
        """Do nothing, because the workers end when their channels break."""

    def end(self) -> None:
        for thread in self._threads:
            thread.join()


class _SimulatedAgent(Agent):
    """Agent that shares its process with other agents.

    ``_AgentLoops`` carries out its commands and checks that the driver is not silent.
    """

    def __init__(self, orders: Orders) -> None:
        super().__init__(orders)
        self._processes.close()
        self._processes = _WorkerThreads(self._events)  # type: ignore[assignment]
        self._keeper: threading.Thread | None = None  # serves the link from its first event on

    def dial(self, loops: _AgentLoops) -> None:
        """Connect to the driver."""
        number = self._orders.number
        self._link.announce(number, loops.events, loops.commands)
        self._link.attach(self._dial("can't reach the driver").detach())

    def keep_link(self) -> None:
        """Handle the events of the link, on a new thread because the agent may have to connect again."""
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep_link, daemon=True)
            self._keeper.start()

    def check(self, late: float) -> None:
        """End the agent if it has heard nothing from the driver for the peer timeout."""
        self._link.excuse(late)
        state = self._link.state()
        silent = state["heard_ago"]
        if state["connected"] and self._keeper is None and silent > self._orders.peer_timeout:
            self._give_up(f"received nothing from the driver for {silent:.1f} s")

    def obey(self) -> None:
        """Carry out the commands that have arrived."""
        with contextlib.suppress(Empty, Closed, Broken):
            while True:
                command = self._commands.get_nowait()
                if isinstance(command, Leave):
                    threading.Thread(target=self._leave, daemon=True).start()
                    return
                self._do(command)

    def _leave(self) -> None:
        self._processes.end()
        self._end(0)

    def _end(self, code: int) -> NoReturn:
        self.cut()
        os.write(1, f"{self._orders.number}\n".encode())
        sys.exit(code)

    def cut(self) -> None:
        """Close the link, as if the agent were killed."""
        self._link.close()
        for channel in (self._commands_writer.channel, self._events):
            channel.abort()


class _AgentLoops:
    """Two threads that serve all agents of a process, so that the agents do not compete for its GIL."""

    def __init__(self) -> None:
        self.events, self.commands = _core.ReadyLinks(), _core.ReadyLinks()
        self.agents: dict[int, _SimulatedAgent] = {}
        for loop in (self._watch, self._obey):
            threading.Thread(target=loop, daemon=True).start()

    def _watch(self) -> None:
        due = time.monotonic() + CHECK_INTERVAL_S
        while True:
            for number in self.events.wait(max(0.0, due - time.monotonic())):
                if (agent := self.agents.get(number)) is not None:
                    agent.keep_link()
            if (late := time.monotonic() - due) >= 0:
                for agent in list(self.agents.values()):
                    with contextlib.suppress(SystemExit):
                        agent.check(late)
                due = time.monotonic() + CHECK_INTERVAL_S

    def _obey(self) -> None:
        while True:
            for number in self.commands.wait():
                if (agent := self.agents.get(number)) is not None:
                    agent.obey()


def main() -> None:
    """Run an agent for each line of JSON on standard input. A line with a number kills the agent with that
    number."""
    loops = _AgentLoops()
    for line in sys.stdin:
        orders = json.loads(line)
        if isinstance(orders, int):
            if orders in loops.agents:
                loops.agents.pop(orders).cut()
            continue
        agent = loops.agents[orders["number"]] = _SimulatedAgent(Orders.read(line))
        threading.Thread(target=agent.dial, args=(loops,), daemon=True).start()
    os._exit(0)


if __name__ == "__main__":
    main()

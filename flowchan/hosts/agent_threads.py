"""Serve all agents of a pool with two threads of the driver.

One thread watches the links. This thread takes no lock that another thread holds for long, and never waits
for the supervisor. The thread can therefore always fence a silent agent. The other thread receives the
agents' reports, and may wait for the supervisor.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Protocol

from flowchan import _core

POLL_INTERVAL_S = 0.05
"""Seconds between polls of an agent that is not connected, or of a channel that may break before a worker's
last outputs have arrived."""


class ServedAgent(Protocol):
    """Agent that the two threads serve."""

    def handle_events(self) -> float | None:
        """Handle the link's events. Return the time of the next check, or None if the link is closed."""

    def check(self, late: float) -> float | None:
        """Check whether the agent is alive. Return the time of the next check, or None if the link is closed.

        ``late`` is the number of seconds by which the call is late.
        """

    def receive_reports(self) -> bool | None:
        """Handle the reports that have arrived.

        Return whether workers are ending, or None if no more reports will arrive.
        """

    def is_lost(self) -> bool:
        """Return whether the agent has ended before the end of the run."""

    def over(self) -> None:
        """Handle the loss of the agent. This may take seconds."""


class AgentThreads:
    """The two threads for the agents of one pool.

    Args:
        name: Name of the run, for the threads.
        run_helper: Runs the function of a helper thread, and reports its exceptions to the run.
    """

    def __init__(self, name: str, run_helper: Callable[[Callable[[], None]], None]) -> None:
        self._name, self._run_helper = name, run_helper
        self.events, self.reports = _core.ReadyLinks(), _core.ReadyLinks()
        self._numbers = itertools.count()
        self._agents: dict[int, ServedAgent] = {}
        self._is_closed = False
        self._deaths: list[threading.Thread] = []  # threads that handle the deaths of agents
        self._threads = [
            self._thread(work, what)
            for work, what in ((self._watch, "agent links"), (self._receive, "agent reports"))
        ]

    def _thread(self, work: Callable[[], None], what: str) -> threading.Thread:
        thread = threading.Thread(
            target=self._run_helper, args=(work,), name=f"{self._name} {what}", daemon=True
        )
        thread.start()
        return thread

    def add(self, agent: ServedAgent) -> int:
        """Serve an agent from now on, and return its number for ``events`` and ``reports``."""
        number = next(self._numbers)
        self._agents[number] = agent
        return number

    def close(self) -> None:
        """End the threads, after all agents have been closed."""
        self._is_closed = True
        self.events.close()
        self.reports.close()
        for thread in self._threads:
            thread.join()
        for thread in self._deaths:
            thread.join()
        self._agents.clear()

    def _watch(self) -> None:
        due: list[tuple[float, int]] = []
        times: dict[int, float] = {}  # when to check each agent; other entries of `due` are outdated

        def plan(number: int, at: float | None) -> None:
            if at is None:
                times.pop(number, None)
            elif times.get(number) != at:
                times[number] = at
                heapq.heappush(due, (at, number))

        while not self._is_closed:
            pause = max(0.0, due[0][0] - time.monotonic()) if due else None
            for number in self.events.wait(pause):
                if (agent := self._agents.get(number)) is not None:
                    plan(number, agent.handle_events())
            while due and due[0][0] <= (now := time.monotonic()):
                at, number = heapq.heappop(due)
                if times.get(number) == at:
                    agent = self._agents.get(number)
                    plan(number, None if agent is None else agent.check(now - at))

    def _receive(self) -> None:
        ending: set[int] = set()  # agents with workers that are ending
        while not self._is_closed:
            for number in {*self.reports.wait(POLL_INTERVAL_S if ending else None), *ending}:
                agent = self._agents.get(number)
                more = None if agent is None else agent.receive_reports()
                (ending.add if more else ending.discard)(number)
                if agent is None or more is not None:
                    continue
                del self._agents[number]
                if agent.is_lost():
                    self._deaths = [thread for thread in self._deaths if thread.is_alive()]
                    self._deaths.append(self._thread(agent.over, f"agent {number} death"))

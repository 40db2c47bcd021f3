"""Ask agents for their workers' Python stacks, and wait for the answers."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping
from queue import Empty, SimpleQueue

from flowchan.hosts.agent_handle import AgentHandle
from flowchan.hosts.agent_messages import AskStacks, WrittenStack
from flowchan.run.crew import process_stacks
from flowchan.run.policy.events import WorkerId

ANSWER_WITHIN_S = process_stacks.ANSWER_WITHIN_S + process_stacks.PY_SPY_WITHIN_S + 5.0
"""Seconds allowed for the agents' answers."""
POLL_INTERVAL_S = 0.05
"""Seconds between checks for agents that have exited."""


class StackRequests:
    """Requests of one run to the agents of one pool. The methods are thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._answers: dict[int, SimpleQueue[WrittenStack]] = {}  # by request number

    def receive(self, answer: WrittenStack) -> None:
        """Record an answer. Ignore one that comes too late."""
        answers = self._answers.get(answer.number)
        if answers is not None:
            answers.put(answer)

    def ask(self, agents: Mapping[WorkerId, AgentHandle]) -> dict[WorkerId, str]:
        """Return the stack of each worker, or a one-line message if the worker's agent does not answer."""
        number, found = next(self._numbers), dict[WorkerId, str]()
        answers = self._answers[number] = SimpleQueue()
        try:
            for agent in set(agents.values()):
                agent.hint(AskStacks(number, tuple(id for id, of in agents.items() if of is agent)))
            deadline = time.monotonic() + ANSWER_WITHIN_S
            while time.monotonic() < deadline and _missing(agents, found):
                with contextlib.suppress(Empty):
                    answer = answers.get(timeout=POLL_INTERVAL_S)
                    found[answer.worker] = answer.text
        finally:
            del self._answers[number]
        missing = {
            id: f"no stack: host {agents[id].host!r} did not answer within {ANSWER_WITHIN_S:g} s\n"
            for id in _missing(agents, found)
        }
        return missing | {id: text for id, text in found.items() if text}


def _missing(agents: Mapping[WorkerId, AgentHandle], found: Mapping[WorkerId, str]) -> list[WorkerId]:
    """Return the workers whose agents are alive but have not answered."""
    return [id for id, agent in agents.items() if id not in found and not agent.why]

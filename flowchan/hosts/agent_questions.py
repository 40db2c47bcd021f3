"""Ask all agents of a pool questions at once, without waiting for the answers."""

from __future__ import annotations

from flowchan.hosts.agent_handle import AgentHandle
from flowchan.hosts.agent_messages import AskWaits, Echo


class AgentQuestions:
    """Questions that one run asks its agents.

    The caller repeats a call until it returns true. The next call after that asks the agents again.
    """

    def __init__(self) -> None:
        self._echo = 0  # number of the last echo request
        # Agents that were asked for an echo; None if no echo has been requested.
        self._echoing: list[AgentHandle] | None = None
        self._question = 0  # number of the last question about waiting workers
        self._questioned: list[AgentHandle] = []

    def all_reported(self, agents: list[AgentHandle]) -> bool:
        """Return whether all reports that workers sent before the first call have arrived.

        The first call sends an ``Echo`` to all agents.
        """
        if self._echoing is None:
            self._echo, self._echoing = self._echo + 1, agents
            for agent in agents:
                agent.send(Echo(self._echo))
            return False
        echoed_all = all(agent.echoed == self._echo or agent.why for agent in self._echoing)
        if echoed_all:
            self._echoing = None
        return echoed_all

    def waits_are_known(self, agents: list[AgentHandle]) -> bool:
        """Return whether each agent has reported what its workers wait for.

        If the agents have changed since the last call, ask them again.
        """
        if not agents or agents != self._questioned:
            self._question, self._questioned = self._question + 1, agents
            for agent in agents:
                agent.send(AskWaits(self._question))
        if any(agent.waiting.number != self._question for agent in agents):
            return False
        self._questioned = []
        return True

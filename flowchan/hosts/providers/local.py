"""Provide agents on this machine, to test graphs before they run on several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowchan.hosts.providers.forked_agents import Forked
from flowchan.hosts.providers.provider import Launch
from flowchan.items.arguments import whole
from flowchan.run.observe.cgroups import local_cores


@dataclass(frozen=True, slots=True, repr=False)
class Local:
    """``count`` agents as processes on this machine, named ``local-1`` and so on.

    A fork server, which is a child of this process and has imported all modules, forks the agents.
    """

    count: int

    def __repr__(self) -> str:
        return f"local({self.count})"

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"local-{number + 1}" for number in range(self.count))

    @property
    def cores(self) -> tuple[int, ...]:
        """Number of cores of each agent, at least one. The agents share this process's cores equally."""
        share, more = divmod(local_cores(), self.count)
        return tuple(max(1, share + (number < more)) for number in range(self.count))

    def listen_at(self, hosts: Sequence[str] | None = None) -> str:
        return "127.0.0.1"

    def start(self, number: int, launch: Launch) -> Forked:
        """Start an agent.

        This process always notices when the agent ends. Killing it kills all processes that it started.
        """
        return Forked(self.hosts[number], launch)


def local(count: int) -> Local:
    """Make a provider of ``count`` agents on this machine.

    The agents share its memory, cores and files. The agents communicate over TCP on loopback, just as agents
    on separate machines do over the network.
    """
    return Local(whole("local", "count", count, 1))

"""Define the interface of a provider, which starts agents, and the values that it takes and returns.

A provider is a value. Declaring, comparing, pickling or printing a provider opens no connection; only
``listen_at`` and ``start`` open connections. An agent dials the driver and authenticates itself. A provider
therefore only runs a command on a host; it opens no ports and copies no files there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

AGENT = ("-m", "flowchan.hosts.agent")
"""Python's arguments for running an agent."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Command that a provider runs on a host.

    Attributes:
        arguments: Arguments of the host's Python executable.
        stdin: The whole standard input: one line of a few hundred bytes. The line contains a secret, so it is
            not printed. A provider must never put it into a command line, an environment variable or a file.
    """

    arguments: tuple[str, ...]
    stdin: bytes = field(repr=False)


class StartedAgent(Protocol):
    """Agent that a provider has started or is starting. The start may take a while, or fail."""

    def ended(self) -> str | None:
        """Return why the agent has ended, or ``None`` if it may still be running.

        The method does not wait. The reason is one line that contains the host's name. If the provider can
        only guess that the agent has ended, the reason says so; the agent then ends when its own peer timeout
        expires.
        """

    def waits(self) -> bool:
        """Return whether the agent is still waiting for a host. The call does not block."""

    def kill(self) -> None:
        """End the agent and release its resources, as far as this machine can. The call does not block."""

    def close(self) -> None:
        """Kill the agent, and release everything in this process. A second call does nothing."""


class Provider(Protocol):
    """Hosts on which agents can be started."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Distinct names of the hosts, in order: ``local-1``, ``gpu1``, ``ray-1``."""

    @property
    def cores(self) -> tuple[int, ...] | None:
        """Number of cores for workers on each host; ``None`` if only the hosts know it."""

    def listen_at(self, hosts: Sequence[str] | None = None) -> str:
        """Find the address of this machine at which hosts can reach the driver.

        Args:
            hosts: Names of the hosts (default: all).

        Returns:
            The address, without a port.

        Raises:
            HostError: No address was found. If the error concerns only one host, its attribute ``host``
                is set.
        """

    def start(self, number: int, launch: Launch) -> StartedAgent:
        """Start the agent of ``hosts[number]``.

        Args:
            number: Number of the host.
            launch: Description of the agent.

        Returns:
            The agent, whose ``ended()`` reports an unreachable host.

        Raises:
            HostError: The cause of the failure is on this machine.
        """

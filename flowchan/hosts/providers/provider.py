"""The protocol of a provider, which starts agents, and the values that a provider takes and returns.

A provider is a value. Declaring, comparing, pickling and printing it opens no connection; only ``listen_at``
and ``start`` do. An agent dials the driver and authenticates itself, so a provider only needs to run a
command on a host. It does not open ports or copy files on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

AGENT = ("-m", "flowchan.hosts.agent")
"""The arguments with which Python runs an agent."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The command that a provider runs on a host.

    Attributes:
        arguments: The arguments for the Python executable on the host.
        stdin: The whole standard input: one line of a few hundred bytes. The line contains a secret, so it is
            not printed. A provider must never put it into a command line, an environment variable or a file.
    """

    arguments: tuple[str, ...]
    stdin: bytes = field(repr=False)


class StartedAgent(Protocol):
    """An agent that a provider has started or is starting. Starting it may take a while, or fail."""

    def ended(self) -> str | None:
        """Return why the agent has ended, or ``None`` if it may still be running.

        The reason is one line that contains the host's name. This does not wait. If the provider can only
        guess, the reason contains this fact, and the agent ends when its own peer timeout expires.
        """

    def waits(self) -> bool:
        """Return whether the agent has not been placed on a host yet but will be. Does not wait."""

    def kill(self) -> None:
        """End the agent and release its resources, as far as this machine can. Does not wait."""

    def close(self) -> None:
        """Kill the agent and release everything in this process. May be called twice."""


class Provider(Protocol):
    """The hosts on which agents can be started."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The distinct names of the hosts, in order: ``local-1``, ``gpu1``, ``ray-1``."""

    @property
    def cores(self) -> tuple[int, ...] | None:
        """The number of cores that workers may use on each host; ``None`` if only the hosts know it."""

    def listen_at(self, hosts: Sequence[str] | None = None) -> str:
        """Find the address of this machine at which hosts can reach the driver.

        Args:
            hosts: Names of the hosts (default: all).

        Returns:
            The address, without a port.

        Raises:
            HostError: No address was found. Its ``host`` is set if the error concerns a single host.
        """

    def start(self, number: int, launch: Launch) -> StartedAgent:
        """Start the agent of ``hosts[number]``.

        Args:
            number: Number of the host.
            launch: Description of the agent.

        Returns:
            The agent. Its ``ended()`` reports a host that can't be reached.

        Raises:
            HostError: The cause of the failure is on this machine.
        """

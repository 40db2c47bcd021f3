"""The protocol of a provider, which starts agents, and the values that it takes and returns.

A provider is a value. Declaring, comparing, pickling and printing it opens no connection; only ``listen_at``
and ``start`` do. An agent dials the driver and authenticates itself, so a provider only needs to run a
command on a host. It opens no port there and copies no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

AGENT = ("-m", "flowchan.hosts.agent")
"""The arguments of Python that run an agent."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The command that a provider runs on a host.

    Attributes:
        arguments: The arguments of the Python executable there.
        stdin: The whole standard input: one line of a few hundred bytes. It holds a secret, so it is not
            printed. A provider must never put it into a command line, an environment or a file.
    """

    arguments: tuple[str, ...]
    stdin: bytes = field(repr=False)


class StartedAgent(Protocol):
    """An agent that a provider has started or is starting. The start may take a while, or fail."""

    def ended(self) -> str | None:
        """Return why the agent has ended, or ``None`` while it may still run.

        The reason is one line that names the host. This does not wait. If the provider can only guess, it
        says so, and the agent's own peer timeout ends it.
        """

    def waits(self) -> bool:
        """Tell whether the agent has no place yet but will get one. Does not wait."""

    def kill(self) -> None:
        """End the agent and the resources held for it, as far as this machine can. Does not wait."""

    def close(self) -> None:
        """Kill the agent and release everything in this process. May be called twice."""


class Provider(Protocol):
    """The places where agents can be started."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The distinct names of the hosts, in order: ``local-1``, ``gpu1``, ``ray-1``."""

    def listen_at(self, hosts: Sequence[str] | None = None) -> str:
        """Find the address of this machine at which hosts reach the driver.

        Args:
            hosts: Names of the hosts (default: all).

        Returns:
            The address, without a port.

        Raises:
            HostError: No address was found. Its ``host`` is set if the error concerns one host alone.
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

"""What starts agents: the protocol of a provider, and what it gives and is given.

A provider is a value: declaring, comparing, pickling and printing it contacts nobody; only ``listen_at`` and
``start`` do. An agent dials the driver and proves who it is, so a provider only needs to bring a command to a
host: no port is opened there, and no file is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

AGENT = ("-m", "flowchan.hosts.agent")
"""What an agent is, behind the Python executable."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run on a host. ``arguments`` follow the Python executable there. ``stdin`` is one line of a few
    hundred bytes, after which the standard input ends; it holds a secret, so it is not printed, and a
    provider never puts it into a command line, an environment or a file."""

    arguments: tuple[str, ...]
    stdin: bytes = field(repr=False)


class StartedAgent(Protocol):
    """An agent that a provider has started, or is starting: it may need a while, or fail to come."""

    def ended(self) -> str | None:
        """Why the agent is no more, as one line that names the host; ``None`` while it may still run. Does
        not wait. Where a provider can only guess, it says so, and the agent's own peer timeout ends it."""

    def waits(self) -> bool:
        """Whether it has no place yet, and will get one sooner or later. Does not wait."""

    def kill(self) -> None:
        """Ends the agent and what is held for it, as far as that can be done from here. Does not wait."""

    def close(self) -> None:
        """Kills it, and leaves nothing of it in this process. May be called twice."""


class Provider(Protocol):
    """Where agents can be started."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts' names, in order, each once: ``local-1``, ``gpu1``, ``ray-1``."""

    def listen_at(self, hosts: Sequence[str] | None = None) -> str:
        """The address of this machine, without a port, at which all hosts, or those given, reach the driver.
        Raises :class:`flowchan.HostError` where there is none; it has the ``host`` if it is about one
        alone."""

    def start(self, number: int, launch: Launch) -> StartedAgent:
        """Starts the agent of ``hosts[number]``. A host that can't be reached is told by ``ended()``; what is
        wrong on this machine already is raised as :class:`flowchan.HostError`."""

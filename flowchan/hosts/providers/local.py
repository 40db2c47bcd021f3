"""Agents on this machine: to try a graph that will span hosts, and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowchan.hosts.providers.forked_agents import Forked
from flowchan.hosts.providers.provider import Launch
from flowchan.items.arguments import whole


@dataclass(frozen=True, slots=True, repr=False)
class Local:
    """``count`` agents as processes of this machine, named ``local-1`` and so on. A child process of this one
    forks them: all that they import they have from it."""

    count: int

    def __repr__(self) -> str:
        return f"local({self.count})"

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"local-{number + 1}" for number in range(self.count))

    def listen_at(self, hosts: Sequence[str] | None = None) -> str:
        return "127.0.0.1"

    def start(self, number: int, launch: Launch) -> Forked:
        """Its end is certain, and killing it kills all that it has started."""
        return Forked(self.hosts[number], launch)


def local(count: int) -> Local:
    """``count`` agents on this machine. They share its memory, cores and files with this program, and talk to
    it over loopback as agents elsewhere do over a network."""
    return Local(whole("local", "count", count, 1))

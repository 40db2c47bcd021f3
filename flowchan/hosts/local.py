"""Agents on this machine: to try a graph that will span hosts, and for tests."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

from flowchan.hosts.child import Child
from flowchan.hosts.provider import Launch
from flowchan.hosts.relay import Said
from flowchan.items.whole import whole
from flowchan.run.processes import exit_text


@dataclass(frozen=True, slots=True, repr=False)
class Local:
    """``count`` agents as child processes of this one, named ``local-1`` and so on."""

    count: int

    def __repr__(self) -> str:
        return f"local({self.count})"

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"local-{number + 1}" for number in range(self.count))

    def listen_at(self) -> str:
        return "127.0.0.1"

    def start(self, number: int, launch: Launch) -> Child:
        """Its end is certain, and killing it kills all that it has started."""
        host = self.hosts[number]
        return Child(host, (sys.executable, *launch.arguments), launch, partial(_ended, host), relay=False)


def _ended(host: str, code: int, _: Said) -> str:
    return f"the agent {host} {exit_text(code)}"


def local(count: int) -> Local:
    """``count`` agents on this machine. They share its memory, cores and files with this program, and talk to
    it over loopback as agents elsewhere do over a network."""
    return Local(whole("local", "count", count, 1))

"""Where workers run, and what follows from it: which transport joins two placements, and who can replace a
worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from flowchan.channel.transports import PROCESSES, THREADS, Transport
from flowchan.items.text import shown


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement for the workers of a stage. ``name`` says where in reports and pictures. ``apart``: each
    worker
    has a process of its own; the stage is sent there, and when that process dies another one can take over.
    Else the workers run on threads of the program's own process, and end with it.

    ``hosts``: the names of the hosts on which the workers run in turn; without any they run on this machine.
    ``shares``: of as many workers as these are together, how many each host takes; without any all take as
    many.
    ``nowhere``: the hosts are still to be given. ``missing``: why they can't be known here, which matters
    once the graph is to run.
    """

    name: str
    apart: bool
    hosts: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    nowhere: bool = False
    missing: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def is_remote(self) -> bool:
        """Whether the workers run on hosts, known or not."""
        return bool(self.hosts or self.nowhere or self.missing)

    def transport_to(self, other: Placement) -> Transport:
        """What a channel from here to ``other`` is made of."""
        return PROCESSES if self.apart or other.apart else THREADS

    def is_beside(self, other: Placement) -> bool:
        """Whether both have the same hosts behind them, so that one crew serves both."""
        return not self.hosts and not other.hosts


THREAD = Placement("thread", apart=False)
PROCESS = Placement("process", apart=True)
HOSTS = Placement("hosts", apart=True, nowhere=True)

PLACEMENTS: Mapping[str, Placement] = MappingProxyType(
    {placement.name: placement for placement in (THREAD, PROCESS, HOSTS)}
)
"""Every placement that has a word for ``on=``."""

PlacementOption = Literal["thread", "process", "hosts"] | Placement


def placement_argument(call: str, value: Any) -> Placement:
    """A placement, or the one that a word of ``on=`` names."""
    if isinstance(value, Placement):
        return value
    placement = PLACEMENTS.get(value) if isinstance(value, str) else None
    if placement is None:
        error = ValueError if isinstance(value, str) else TypeError
        allowed = ", ".join(f'"{word}"' for word in PLACEMENTS)
        raise error(f"{call}: on must be {allowed} or a pool of flowchan.hosts, not {shown(value)}")
    return placement

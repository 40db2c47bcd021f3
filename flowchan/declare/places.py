"""Where workers run, and what follows from it: which medium joins two places, and who can replace a
worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from flowchan.channel.media import PROCESSES, THREADS, Medium
from flowchan.items.text import shown


@dataclass(frozen=True, slots=True)
class Place:
    """A place for the workers of a stage. ``name`` says where in reports and pictures. ``apart``: each worker
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
    def is_far(self) -> bool:
        """Whether the workers run on hosts, known or not."""
        return bool(self.hosts or self.nowhere or self.missing)

    def medium_to(self, other: Place) -> Medium:
        """What a channel from here to ``other`` is made of."""
        return PROCESSES if self.apart or other.apart else THREADS

    def is_beside(self, other: Place) -> bool:
        """Whether both have the same hosts behind them, so that one crew serves both."""
        return not self.hosts and not other.hosts


THREAD = Place("thread", apart=False)
PROCESS = Place("process", apart=True)
HOSTS = Place("hosts", apart=True, nowhere=True)

PLACES: Mapping[str, Place] = MappingProxyType({place.name: place for place in (THREAD, PROCESS, HOSTS)})
"""Every place that has a word for ``on=``."""

Placement = Literal["thread", "process", "hosts"] | Place


def placed(call: str, value: Any) -> Place:
    """A place, or the one that a word of ``on=`` names."""
    if isinstance(value, Place):
        return value
    place = PLACES.get(value) if isinstance(value, str) else None
    if place is None:
        error = ValueError if isinstance(value, str) else TypeError
        allowed = ", ".join(f'"{word}"' for word in PLACES)
        raise error(f"{call}: on must be {allowed} or a pool of flowchan.hosts, not {shown(value)}")
    return place

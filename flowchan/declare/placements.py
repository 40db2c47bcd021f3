"""Define where workers run.

The placements of two stages determine which transport their channel uses, and whether a dead worker can be
replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from flowchan.channel.transports import PROCESSES, THREADS, Transport
from flowchan.items.text import shown


@dataclass(frozen=True, slots=True)
class Placement:
    """Describes where the workers of a stage run.

    Attributes:
        name: Name shown in reports and pictures.
        own_process: True if each worker runs in its own process, which receives the stage and can be
            replaced. Otherwise, workers are threads of the program's process and end with it.
        hosts: Names of the hosts that run the workers; empty for this machine.
        shares: Relative number of workers on each host; empty for equal numbers.
        by_worker: Host of each worker, in order; empty if the run chooses the hosts.
        nowhere: True for ``on="hosts"`` as long as the hosts have not been chosen.
        missing: Reason why this machine cannot determine the hosts. This is an error only when the graph
            runs.
    """

    name: str
    own_process: bool
    hosts: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    by_worker: tuple[str, ...] = ()
    nowhere: bool = False
    missing: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def is_remote(self) -> bool:
        """Return whether the workers run on other hosts, even if these hosts are not known yet."""
        return bool(self.hosts or self.nowhere or self.missing)

    def weights(self) -> Mapping[str, int]:
        """Return the relative number of workers on each host; empty for equal numbers."""
        return dict(zip(self.hosts, self.shares, strict=True)) if self.shares else {}

    def transport_to(self, other: Placement) -> Transport:
        """Return the transport of a channel from this placement to another.

        Args:
            other: Placement of the channel's reader.

        Returns:
            Threads if both stages run in the program's process; otherwise processes.
        """
        return PROCESSES if self.own_process or other.own_process else THREADS

    def has_same_host(self, other: Placement) -> bool:
        """Return whether one part of a crew can run the workers of both placements.

        For two placements of this class, this is true if neither has hosts.
        """
        return not self.hosts and not other.hosts


THREAD = Placement("thread", own_process=False)
PROCESS = Placement("process", own_process=True)
HOSTS = Placement("hosts", own_process=True, nowhere=True)

PLACEMENTS: Mapping[str, Placement] = MappingProxyType(
    {placement.name: placement for placement in (THREAD, PROCESS, HOSTS)}
)
"""Placements by the word that selects them in ``on=``."""

PlacementOption = Literal["thread", "process", "hosts"] | Placement


def placement_argument(call: str, value: Any) -> Placement:
    """Return the placement that the option ``on`` gives as an object or as a word."""
    if isinstance(value, Placement):
        return value
    placement = PLACEMENTS.get(value) if isinstance(value, str) else None
    if placement is None:
        error = ValueError if isinstance(value, str) else TypeError
        allowed = ", ".join(f'"{word}"' for word in PLACEMENTS)
        raise error(f"{call}: on must be {allowed} or a pool from flowchan.hosts, got {shown(value)}")
    return placement

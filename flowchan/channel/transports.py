"""The transports of a channel, and their properties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Across = Literal["threads", "processes", "hosts"]


@dataclass(frozen=True, slots=True)
class Transport:
    """Transport of a channel.

    Attributes:
        name: The value of ``across=``.
        copies: True if a reader gets a copy of each item rather than a reference. Items then occupy shared
            memory while they are in the channel.
        capacity: Default number of items at which ``put`` waits. Threads need more room, because they switch
            about twice for each full channel, and a switch costs as much as dozens of items.
        reached_by: Module that serves the channel to processes that cannot receive its descriptors. Empty
            if the transport has none.
    """

    name: Across
    copies: bool
    capacity: int
    reached_by: str = ""

    def __str__(self) -> str:
        return self.name


THREADS = Transport("threads", copies=False, capacity=4096)
PROCESSES = Transport("processes", copies=True, capacity=64)
HOSTS = Transport("hosts", copies=True, capacity=64, reached_by="flowchan.remote.serving")

TRANSPORTS: Mapping[str, Transport] = MappingProxyType(
    {transport.name: transport for transport in (THREADS, PROCESSES, HOSTS)}
)
"""All transports by name."""

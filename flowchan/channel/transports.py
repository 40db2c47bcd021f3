"""Define the transports of channels and their properties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Across = Literal["threads", "processes", "hosts"]


@dataclass(frozen=True, slots=True)
class Transport:
    """Describes how a kind of channel carries items between its users.

    Attributes:
        name: Value for ``across=``.
        copies: True if a reader gets a copy of each item instead of a reference. Items then occupy shared
            memory until they are read.
        capacity: Default number of items at which ``put`` waits. Threads need a larger default: they switch
            about twice per full channel, and a switch costs as much as dozens of items.
        reached_by: Module that serves the channel to processes that cannot receive its file descriptors.
            Empty if the transport needs no such module.
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

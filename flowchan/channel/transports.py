"""The transports that a channel can be made of, and what follows from each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Across = Literal["threads", "processes", "hosts"]


@dataclass(frozen=True, slots=True)
class Transport:
    """What a channel is made of. ``name`` is the word that ``across=`` takes. ``copies``: an item arrives as
    a copy of its own, which takes bytes of shared memory while it is inside; else as a reference.
    ``reached_by``: the module that lets others reach it whom no descriptor reaches; empty: nobody does."""

    name: Across
    copies: bool
    reached_by: str = ""

    def __str__(self) -> str:
        return self.name


THREADS = Transport("threads", copies=False)
PROCESSES = Transport("processes", copies=True)
HOSTS = Transport("hosts", copies=True, reached_by="flowchan.remote.serving")

TRANSPORTS: Mapping[str, Transport] = MappingProxyType(
    {transport.name: transport for transport in (THREADS, PROCESSES, HOSTS)}
)
"""Every transport by its name."""

"""The transports on which the contract suite runs. A new transport needs only an entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from flowchan import Channel, native


@dataclass(frozen=True)
class Transport:
    """A transport under test.

    ``make(capacity=64, **options)`` makes a channel, as ``across`` does in a user's program. ``peers`` lists
    where a test may start its peer ("thread", "process", "host"). ``copies`` tells whether items arrive as
    copies, and ``devices`` whether the transport supports device memory.
    """

    name: str
    across: str
    peers: tuple[str, ...]
    copies: bool
    devices: bool = False

    @property
    def make(self) -> Callable[..., Channel]:
        return partial(Channel, across=self.across)


ALL_TRANSPORTS = [
    Transport("threads", "threads", peers=("thread",), copies=False),
    Transport("processes", "processes", peers=("thread", "process"), copies=True, devices=True),
    Transport("hosts", "hosts", peers=("thread", "process", "host"), copies=True),
]
TRANSPORTS = [transport for transport in ALL_TRANSPORTS if native.is_compiled() or not transport.copies]
"""The transports that this Python has; without the native module, only threads."""

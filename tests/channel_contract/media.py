"""The media that the contract suite runs over. A new medium is one more entry here, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from flowchan import Channel


@dataclass(frozen=True)
class Medium:
    """One medium under test. ``make(capacity=64, **options)`` makes a channel of it; ``peers`` says where the
    other party of a test may run ("thread", "process"); ``copies`` tells whether items arrive as copies."""

    name: str
    make: Callable[..., Channel]
    peers: tuple[str, ...]
    copies: bool


MEDIA = (
    Medium("threads", partial(Channel, across="threads"), peers=("thread",), copies=False),
    Medium("processes", partial(Channel, across="processes"), peers=("thread", "process"), copies=True),
)

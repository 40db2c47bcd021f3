"""flowchan: graphs of stages joined by closable channels that span threads and processes."""

from flowchan.channel import Channel, ChannelStats, In, Out
from flowchan.errors import (
    Broken,
    ChannelError,
    Closed,
    Drained,
    Empty,
    FlowchanError,
    Full,
    GraphError,
    RunError,
    StageError,
)

__all__ = [
    "Broken",
    "Channel",
    "ChannelError",
    "ChannelStats",
    "Closed",
    "Drained",
    "Empty",
    "FlowchanError",
    "Full",
    "GraphError",
    "In",
    "Out",
    "RunError",
    "StageError",
]

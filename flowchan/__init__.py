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
from flowchan.run import Failed, Graph, LinkStats, Results, Run, RunStats, StageStats

__all__ = [
    "Broken",
    "Channel",
    "ChannelError",
    "ChannelStats",
    "Closed",
    "Drained",
    "Empty",
    "Failed",
    "FlowchanError",
    "Full",
    "Graph",
    "GraphError",
    "In",
    "LinkStats",
    "Out",
    "Results",
    "Run",
    "RunError",
    "RunStats",
    "StageError",
    "StageStats",
]

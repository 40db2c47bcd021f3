"""Run graphs of stages joined by closable channels that span threads, processes and hosts."""

# Must be imported first, because it selects the core that all other modules import.
from flowchan import native as _native  # noqa: F401

# isort: split
from flowchan.channel.channel import Channel, ChannelStats, Holder, In, Out
from flowchan.channel.select import NothingReady, Selected, select
from flowchan.declare.auto_workers import AutoWorkers, auto
from flowchan.declare.broadcast import Broadcast
from flowchan.declare.feedback import Feedback
from flowchan.declare.input_stream import Input
from flowchan.declare.stream import Stream
from flowchan.errors import (
    Broken,
    ChannelError,
    ChildDied,
    Closed,
    Deadlock,
    Drained,
    Empty,
    FlowchanError,
    Full,
    GraphError,
    GroupError,
    HostError,
    Interrupted,
    LateItem,
    MemberDied,
    MemberLeft,
    Mismatch,
    Problem,
    Refused,
    RunError,
    StageError,
    WorkerDied,
)
from flowchan.items.codec import Unreadable, pack, unpack
from flowchan.items.combining import Reduced
from flowchan.items.keyed_state import KeyedState
from flowchan.items.recording import Recording
from flowchan.items.window import Window
from flowchan.run import (
    Cause,
    EdgeStats,
    Failed,
    Graph,
    Health,
    HostStats,
    Prediction,
    Results,
    Run,
    RunStats,
    ScalingDecision,
    StageStats,
    WorkerPool,
    WorkerStats,
    WorkSeconds,
)
from flowchan.run.policy.seeds import Worker, worker

__all__ = [
    "AutoWorkers",
    "Broadcast",
    "Broken",
    "Cause",
    "Channel",
    "ChannelError",
    "ChannelStats",
    "ChildDied",
    "Closed",
    "Deadlock",
    "Drained",
    "EdgeStats",
    "Empty",
    "Failed",
    "Feedback",
    "FlowchanError",
    "Full",
    "Graph",
    "GraphError",
    "GroupError",
    "Health",
    "Holder",
    "HostError",
    "HostStats",
    "In",
    "Input",
    "Interrupted",
    "KeyedState",
    "LateItem",
    "MemberDied",
    "MemberLeft",
    "Mismatch",
    "NothingReady",
    "Out",
    "Prediction",
    "Problem",
    "Recording",
    "Reduced",
    "Refused",
    "Results",
    "Run",
    "RunError",
    "RunStats",
    "ScalingDecision",
    "Selected",
    "StageError",
    "StageStats",
    "Stream",
    "Unreadable",
    "Window",
    "WorkSeconds",
    "Worker",
    "WorkerDied",
    "WorkerPool",
    "WorkerStats",
    "auto",
    "pack",
    "select",
    "unpack",
    "worker",
]

# Messages, tracebacks and pickles then name the module that users import, not the defining module.
for _name in __all__:
    globals()[_name].__module__ = "flowchan"
del _name

"""Run graphs of stages joined by closable channels that span threads, processes and hosts.

Each public name is imported on first use. A program that uses only channels therefore does not wait for the
modules that run graphs.
"""

from typing import TYPE_CHECKING

# Must be imported first, because it selects the core that all other modules import.
from flowchan import native as _native  # noqa: F401

# isort: split
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
from flowchan.public import names_on_first_use

if TYPE_CHECKING:
    from flowchan.channel.channel import Channel, ChannelStats, Holder
    from flowchan.channel.ports import In, Out
    from flowchan.channel.select import NothingReady, Selected, select
    from flowchan.declare.auto_workers import AutoWorkers, auto
    from flowchan.declare.broadcast import Broadcast
    from flowchan.declare.feedback import Feedback
    from flowchan.declare.input_stream import Input
    from flowchan.declare.stream import Stream
    from flowchan.items.codec import Unreadable, pack, unpack
    from flowchan.items.combining import Reduced
    from flowchan.items.failed import Failed
    from flowchan.items.keyed_state import KeyedState
    from flowchan.items.recording import Recording
    from flowchan.items.window import Window
    from flowchan.run.graph import Graph
    from flowchan.run.observe.what_if import Prediction
    from flowchan.run.policy.health import Health
    from flowchan.run.policy.scaling import ScalingDecision
    from flowchan.run.policy.seeds import Worker, worker
    from flowchan.run.policy.stats import (
        Cause,
        EdgeStats,
        HostStats,
        RunStats,
        StageStats,
        WorkerStats,
        WorkSeconds,
    )
    from flowchan.run.results import Results
    from flowchan.run.run import Run
    from flowchan.run.worker_pool import WorkerPool

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

_NAMES = {
    "channel.channel": ("Channel", "ChannelStats", "Holder"),
    "channel.ports": ("In", "Out"),
    "channel.select": ("NothingReady", "Selected", "select"),
    "declare.auto_workers": ("AutoWorkers", "auto"),
    "declare.broadcast": ("Broadcast",),
    "declare.feedback": ("Feedback",),
    "declare.input_stream": ("Input",),
    "declare.stream": ("Stream",),
    "items.codec": ("Unreadable", "pack", "unpack"),
    "items.combining": ("Reduced",),
    "items.failed": ("Failed",),
    "items.keyed_state": ("KeyedState",),
    "items.recording": ("Recording",),
    "items.window": ("Window",),
    "run.graph": ("Graph",),
    "run.observe.what_if": ("Prediction",),
    "run.policy.health": ("Health",),
    "run.policy.scaling": ("ScalingDecision",),
    "run.policy.seeds": ("Worker", "worker"),
    "run.policy.stats": (
        "Cause",
        "EdgeStats",
        "HostStats",
        "RunStats",
        "StageStats",
        "WorkSeconds",
        "WorkerStats",
    ),
    "run.results": ("Results",),
    "run.run": ("Run",),
    "run.worker_pool": ("WorkerPool",),
}
"""The public names that each module defines. ``flowchan.errors`` is always loaded."""

if not TYPE_CHECKING:  # type checkers would accept every name
    __getattr__, __dir__ = names_on_first_use(__name__, _NAMES)

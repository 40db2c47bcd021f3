"""Run a declared graph: its workers, supervisor, statistics and results."""

from flowchan.items.failed import Failed
from flowchan.run.graph import Graph
from flowchan.run.observe.what_if import Prediction
from flowchan.run.policy.health import Health
from flowchan.run.policy.scaling import ScalingDecision
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
    "Cause",
    "EdgeStats",
    "Failed",
    "Graph",
    "Health",
    "HostStats",
    "Prediction",
    "Results",
    "Run",
    "RunStats",
    "ScalingDecision",
    "StageStats",
    "WorkSeconds",
    "WorkerPool",
    "WorkerStats",
]

"""Running a declared graph: workers, the supervisor, the statistics and the outcome."""

from flowchan.items.failed import Failed
from flowchan.run.graph import Graph
from flowchan.run.pool import WorkerPool
from flowchan.run.results import Results
from flowchan.run.run import Run
from flowchan.run.stats import Cause, HostStats, LinkStats, RunStats, StageStats, WorkerStats, WorkSeconds

__all__ = [
    "Cause",
    "Failed",
    "Graph",
    "HostStats",
    "LinkStats",
    "Results",
    "Run",
    "RunStats",
    "StageStats",
    "WorkSeconds",
    "WorkerPool",
    "WorkerStats",
]

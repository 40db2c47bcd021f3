"""Build the statistics of one window for tests of the throughput model."""

from __future__ import annotations

import itertools
from typing import Any

from flowchan import Cause, EdgeStats, RunStats, StageStats, WorkSeconds
from flowchan.run.policy.stats import CauseKind

WINDOW = 2.0


def stage(
    name: str, each: float, rate: float = 100.0, workers: int = 1, cpu: float | None = 0.0,
    ready: float = 0.0, out: float = 1.0, wait: str = "input", **values: Any,
) -> StageStats:  # fmt: skip
    """Return the statistics of a stage in a window of 2 s.

    Args:
        name: Name of the stage.
        each: Seconds of work per item.
        rate: Items per second.
        workers: Number of workers.
        cpu: CPU seconds per item.
        ready: Seconds that each item waits for a core.
        out: Number of outputs for each item.
        wait: Reason for waiting: "input", "place" or "turn".
        **values: Other attributes.
    """
    items = rate * WINDOW
    working = workers * WINDOW
    waits = {wait: max(0.0, working - items * each)}
    known = None if cpu is None else cpu * items
    worked = WorkSeconds(working, cpu=known, ready=None if cpu is None else ready * items, **waits)
    shares = {"input": "waiting_input", "place": "waiting_output", "turn": "waiting_turn"}
    all_values: dict[str, Any] = {
        "kind": "map", "on": "thread", "workers": workers, "alive": workers, "working": workers,
        "items_in": round(items), "items_out": round(items * out), "failed": 0, "retried": 0, "restarts": 0,
        "unwanted": 0, "in_hand": 0, "rate": rate, "busy": min(1.0, items * each / working),
        "waiting_input": 0.0, "waiting_output": 0.0, shares[wait]: waits[wait] / working,
        "cores": None if known is None else known / WINDOW, "seconds": worked, "worked": worked,
    }  # fmt: skip
    return StageStats(name=name, **(all_values | values))


def source(rate: float = 100.0, name: str = "source", **values: Any) -> StageStats:
    """Return a source that spends most of its time waiting for a place in its output channel."""
    return stage(name, 0.0, rate, wait="place", **({"kind": "source", "items_in": 0} | values))


def chain(*stages: StageStats, cause: tuple[CauseKind, str | None] | None = None) -> RunStats:
    """Return the statistics of a chain of stages."""
    edges = tuple(
        EdgeStats(one.name, one.name, two.name, "threads", 0, 64, one.items_out, one.rate)
        for one, two in itertools.pairwise(stages)
    )
    named = None if cause is None else Cause(*cause, "a reason")
    return RunStats("graph", "running", 10.0, stages, edges, None, window=WINDOW, cause=named)

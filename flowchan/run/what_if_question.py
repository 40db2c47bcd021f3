"""Answer ``run.what_if()``: check the arguments and make the predictions."""

from __future__ import annotations

import math
from typing import Any

from flowchan.declare.blueprint import Blueprint
from flowchan.declare.stream import Stream
from flowchan.items.arguments import is_whole
from flowchan.items.text import shown
from flowchan.run.observe.throughput import Model
from flowchan.run.observe.what_if import Prediction, can_grow, missing, predict, predictions
from flowchan.run.policy.stats import RunStats, StageStats

CALL = "run.what_if"


def answer(
    graph: Blueprint,
    stats: RunStats,
    stage: Stream[Any] | str | None,
    workers: int | None,
    faster: float | None,
) -> Prediction | list[Prediction]:
    """Return the prediction for one change, or all predictions if ``stage`` is None."""
    if stage is None:
        if workers is not None or faster is not None:
            argument = "workers" if workers is not None else "faster"
            raise ValueError(f"{CALL}: {argument} needs a stage; give its name as the first argument")
        _require_items(stats)
        return predictions(stats)
    found = _stage(graph, stats, stage)
    more, factor = _workers(found, workers), _factor(faster)
    if workers is None and faster is None:
        raise ValueError(f"{CALL}: workers or faster must be given with a stage, got neither")
    _require_items(stats, found.name)
    return predict(stats, found.name, more, factor)


def _stage(graph: Blueprint, stats: RunStats, stage: Stream[Any] | str) -> StageStats:
    name = stage.stage if isinstance(stage, Stream) and stage.graph is graph else stage
    if not isinstance(name, str):
        raise KeyError(f"{stage!r} is not a stage of graph {graph.name!r}")
    found = graph.stage_named(name).name
    return next(one for one in stats.stages if one.name == found)


def _workers(stage: StageStats, workers: int | None) -> int:
    if workers is None:
        return 0
    if not is_whole(workers):
        raise TypeError(
            f"{CALL}: workers must be an int (the number of workers to add), got {shown(workers)}"
        )
    if not can_grow(stage):
        raise ValueError(
            f"{CALL}: stage {stage.name!r} is a {stage.kind}, so its number of workers cannot change; pass "
            "faster= instead"
        )
    if stage.workers + workers < 1:
        raise ValueError(
            f"{CALL}: workers (the number to add) must be at least {1 - stage.workers}, got {workers}; "
            f"stage {stage.name!r} has {stage.workers} now"
        )
    return workers


def _factor(faster: float | None) -> float:
    if faster is None:
        return 1.0
    if isinstance(faster, bool) or not isinstance(faster, int | float):
        raise TypeError(f"{CALL}: faster must be a number (the speed-up factor), got {shown(faster)}")
    if not 0 < faster < math.inf:
        raise ValueError(f"{CALL}: faster must be greater than 0 and finite, got {faster}")
    return float(faster)


def _require_items(stats: RunStats, stage: str = "") -> None:
    if why := missing(stats, Model.of(stats), stage):
        raise RuntimeError(
            f"{CALL}: {why} in the last {stats.window:.3g} s; call what_if later or with a larger window="
        )

"""Predict the best schedule for a model.

This module measures the times of the layers, and simulates every schedule with these times.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import nn

from flowchan.declare.placements import PLACEMENTS
from flowchan.items.arguments import is_whole
from flowchan.pipelines.sequential.balance import best_split, costs, step_seconds
from flowchan.pipelines.sequential.checks import checked_module
from flowchan.pipelines.sequential.cut import CHUNKS, PASSING
from flowchan.pipelines.sequential.engine.schedule import IN_A_V, SCHEDULES, Schedule, plan
from flowchan.pipelines.sequential.parts import compute_threads
from flowchan.pipelines.sequential.simulate import simulate
from flowchan.pipelines.sequential.tensor_trees import split


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted performance of a schedule.

    The forecast applies to ``Sequential(module, parts, chunks=chunks)`` with ``trainer(schedule=schedule,
    workers=workers)``.

    Attributes:
        schedule: Name of the schedule.
        parts: Number of layers in each part.
        workers: Number of workers.
        chunks: Number of micro-batches.
        seconds: Duration of a step, in seconds.
        alone: Duration of a step with a single worker, in seconds.
        bubble: Fraction of the time during which workers are idle, from 0 to 1.
        held: Peak size of a worker's activations, in bytes.
    """

    schedule: Schedule
    parts: list[int]
    workers: int
    chunks: int
    seconds: float
    alone: float
    bubble: float
    held: float

    def __str__(self) -> str:
        """Return the forecast as a table row."""
        return (
            f"{self.schedule:11} parts={self.parts}: {self.seconds * 1e3:.3g} ms a step, "
            f"{self.alone / self.seconds:.2f} times as fast as one worker, which waits {self.bubble:.0%} and "
            f"holds {self.held / 1e6:.3g} MB"
        )


def forecasts(
    module: nn.Sequential | Iterable[nn.Module],
    sample: Any,
    workers: int = 2,
    *,
    on: Literal["thread", "process"] = "thread",
    chunks: int = CHUNKS,
) -> list[Forecast]:
    """Predict the performance of each schedule for which the module has enough layers.

    The measurement runs forward and backward passes on copies of the layers, and takes as long as a few
    training steps.

    Args:
        module: An ``nn.Sequential`` or a list of layers.
        sample: A typical batch.
        workers: Number of workers.
        on: ``"thread"`` or ``"process"``.
        chunks: Number of micro-batches in a step.

    Returns:
        The forecasts, fastest first.

    Raises:
        ValueError: ``workers`` is larger than the number of layers, or the sample cannot be split.
    """
    module = copy.deepcopy(checked_module(module)).train()
    if not is_whole(workers) or not 1 <= workers <= len(module):
        raise ValueError(
            f"forecasts: workers must be between 1 and {len(module)} (the number of layers), got {workers!r}"
        )
    pieces = split(sample, chunks, "sample")
    threads = compute_threads(workers) if PLACEMENTS[on].own_process else torch.get_num_threads()
    times = step_seconds(module, pieces[0], threads)
    kept = costs(module, pieces[0], "memory", threads, param_scale=0.0)
    found = []
    for schedule in SCHEDULES:
        several = schedule == "interleaved" or schedule in IN_A_V
        parts = 2 * workers if several else workers
        if parts <= len(module):
            counts = best_split([sum(one) for one in times], parts)
            found.append(_forecast(schedule, counts, workers, len(pieces), times, kept, PASSING[on]))
    return sorted(found, key=lambda one: one.seconds)


def _forecast(
    schedule: Any,
    counts: list[int],
    workers: int,
    chunks: int,
    times: Sequence[tuple[float, float, float]],
    kept: Sequence[float],
    passing: float,
) -> Forecast:
    ends = list(pairwise(accumulate(counts, initial=0)))
    forward, inputs, weights = (
        [sum(column[begin:end]) for begin, end in ends] for column in zip(*times, strict=True)
    )
    sizes = [sum(kept[begin:end]) for begin, end in ends]
    run = simulate(
        plan(schedule, workers, len(counts), chunks),
        [one + passing for one in forward],
        [one + other + passing for one, other in zip(inputs, weights, strict=True)],
        weights=weights,
    )
    alone = chunks * sum(map(sum, times))
    return Forecast(schedule, counts, workers, chunks, run.makespan, alone, run.bubble, max(run.held(sizes)))

"""Measure the cost of a pipe and the idle time of its workers.

The first part measures the time that a micro-batch takes to pass through a part without work, compared with a
plain call of the layer. The second part compares the bubble of each schedule on two workers with the
simulator's forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.harness import Case, Effort, Report, Result, Row, in_figures, in_words
from benchmarks.pipes import CHUNKS, SAMPLES, batch, model, one_thread, sgd, timed
from flowchan.pipelines import Sequential
from flowchan.pipelines.sequential.balance import step_seconds
from flowchan.pipelines.sequential.engine.schedule import plan
from flowchan.pipelines.sequential.simulate import simulate

ISOLATES = (
    "In 'through a part', a batch with a single micro-batch passes through parts that each consist of one "
    "nn.Identity, without a graph. The result is the additional time per part, computed from a pipe of five "
    "parts and a pipe of one part. In 'bubble', the model of the benchmark 'sequential' runs in equal parts "
    "on two processes with one compute thread each. It trains with cross entropy, SGD and 8 micro-batches of "
    "512 samples. The result is the share of the last ten steps in which a worker neither computes nor "
    "passes data on. The forecast simulates the schedule with the measured times of the layers. It assumes "
    "that passing data on is free and that each worker has its own core."
)

SIZES = {"1 KB": 256, "1 MB": 1 << 18}
"""Number of 4-byte values for each size, by label."""
MORE, TURNS = 4, 11
"""Number of additional parts in the longer pipe, and number of turns per pipe. The first turn is a
warm-up."""
PLANS = (
    ("gpipe", 2),
    ("1f1b", 2),
    ("zbh1", 2),
    ("interleaved", 4),
    ("zbv", 4),
    ("dualpipev", 4),
    ("interleaved", 8),
)
"""Schedules, each with its number of parts."""
WORKERS, NEAR = 2, 5.0


def measure(effort: Effort) -> Report:
    report = Report()
    with one_thread():
        for size in SIZES:
            _compare_parts(report, size, effort)
        for schedule, parts in PLANS:
            _compare_bubbles(report, schedule, parts, effort)
    return report


# --- a micro-batch through a part ---


def _compare_parts(report: Report, size: str, effort: Effort) -> None:
    count = 100 if effort.full else 10
    x = torch.zeros(1, SIZES[size])
    cases = [
        Case("in a process", "s", partial(_through, "process", x, count)),
        Case("on a thread", "s", partial(_through, "thread", x, count)),
        Case("a plain call", "s", partial(_plainly, x, count)),
    ]
    apart, thread, plain = report.interleave(f"{size} through a part", cases, effort.rounds)
    report.rows += [_published(apart, plain), _published(thread, plain)]


@torch.no_grad()
def _through(on: Any, x: Tensor, count: int) -> tuple[Sequence[float], int]:
    few, many = (
        Sequential([nn.Identity() for _ in range(parts)], [1] * parts, on=on, chunks=1)
        for parts in (1, 1 + MORE)
    )
    with few, many:
        for pipe in (few, many):
            torch.testing.assert_close(pipe(x), x)
        took = [[timed(partial(pipe, x), count) / count for pipe in (few, many)] for _ in range(TURNS)]
    return [(longer - shorter) / MORE for shorter, longer in took[1:]], 2 * TURNS * count


@torch.no_grad()
def _plainly(x: Tensor, count: int) -> tuple[Sequence[float], int]:
    layer = nn.Identity()
    return [timed(partial(layer, x), 100 * count) / count / 100], 100 * count


def _published(mine: Result, plain: Result) -> Row:
    own, other = (in_words(result.figure(), result.unit) for result in (mine, plain))
    ratio = in_figures(plain.figure() / mine.figure())
    return Row(f"{mine.work}, {mine.name}", f"none ({plain.name})", own, other, ratio, True)


# --- bubbles ---


def _compare_bubbles(report: Report, schedule: str, parts: int, effort: Effort) -> None:
    cases = [
        Case("measured", "%", partial(_measured, schedule, parts, 20 if effort.full else 2)),
        Case("forecast", "%", partial(_forecast, schedule, parts)),
    ]
    work = f"bubble of {schedule}, {parts} parts on 2 workers"
    mine, forecast = report.interleave(work, cases, effort.rounds)
    own, other = (in_words(result.figure(), result.unit) for result in (mine, forecast))
    reached = mine.figure() <= forecast.figure() + NEAR
    ratio = in_figures(forecast.figure() / mine.figure())
    report.rows.append(Row(work, f"≤ {NEAR:g} points above the forecast", own, other, ratio, reached))


def _cut(parts: int) -> list[int]:
    return [len(model()) // parts] * parts


def _measured(schedule: Any, parts: int, steps: int) -> tuple[Sequence[float], int]:
    x, target = batch(SAMPLES)
    options: dict[str, Any] = {"loss": functional.cross_entropy, "optimizer": sgd, "workers": WORKERS}
    with (
        Sequential(model(), _cut(parts), on="process", chunks=CHUNKS) as pipe,
        pipe.trainer(schedule=schedule, **options) as training,
    ):
        for _ in range(steps):
            training.step(x, target)
    return [100 * training.report().bubble], steps * SAMPLES


def _forecast(schedule: Any, parts: int) -> tuple[Sequence[float], int]:
    x, _ = batch(SAMPLES // CHUNKS)
    times = step_seconds(model(), x, 1)
    ends = list(pairwise(accumulate(_cut(parts), initial=0)))
    forward, inputs, weights = (
        [sum(column[begin:end]) for begin, end in ends] for column in zip(*times, strict=True)
    )
    backward = [one + other for one, other in zip(inputs, weights, strict=True)]
    found = simulate(plan(schedule, WORKERS, parts, CHUNKS), forward, backward, weights=weights)
    return [100 * found.bubble], SAMPLES

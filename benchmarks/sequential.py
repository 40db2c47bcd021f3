"""Measure a stream of batches through a model in two equal parts, on two processes with one thread each.

The peers are the plain module, torchgpipe and ``torch.distributed.pipelining``.
"""

from __future__ import annotations

import time
from itertools import repeat

import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks.harness import Effort, Report
from benchmarks.pipes import (
    CHUNKS,
    SETTING,
    batch,
    beside_peers,
    check_output,
    gpipe,
    model,
    timed,
    together,
)
from flowchan.pipelines import Sequential

ISOLATES = (
    f"{SETTING} The plain module and flowchan's stream process whole batches. flowchan returns the outputs to"
    " the program; torch.distributed.pipelining (gloo) leaves them in the second of its two processes."
)


def measure(effort: Effort) -> Report:
    return beside_peers(effort, "stream of batches", 40, _stream, _plain, _rank_forward, _torchgpipe)


@torch.no_grad()
def _plain(rows: int, count: int) -> float:
    plain, (x, _) = model(), batch(rows)
    plain(x)
    return timed(lambda: plain(x), count)


def _stream(rows: int, count: int) -> float:
    x, _ = batch(rows)
    with Sequential(model(), parts=2, on="process", chunks=CHUNKS) as pipe:
        check_output(pipe(x))
        began = time.perf_counter()
        came = sum(len(y) for y in pipe.stream(repeat(x, count)))
        took = time.perf_counter() - began
    if came != count * rows:
        raise AssertionError(f"{count * rows} samples were sent, but {came} arrived")
    return took


@torch.no_grad()
def _torchgpipe(rows: int, count: int) -> float:
    x, _ = batch(rows)
    pipe = gpipe(model())
    check_output(pipe(x))
    return timed(lambda: pipe(x), count)


def _rank_forward(rank: int, stage: PipelineStage, rows: int, count: int) -> float:
    x, _ = batch(rows)
    schedule = ScheduleGPipe(stage, CHUNKS)
    with torch.no_grad():
        if rank == 0:
            schedule.eval(x)
            return together(lambda: schedule.eval(x), count)
        check_output(schedule.eval())
        return together(schedule.eval, count)

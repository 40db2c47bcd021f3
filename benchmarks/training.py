"""Measure training steps of a model in two equal parts, on two processes with one compute thread each.

The peers are the plain module, torchgpipe and ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional

from benchmarks.harness import Effort, Report, at_least
from benchmarks.pipes import (
    CHUNKS,
    SAMPLES,
    SETTING,
    SizedJob,
    batch,
    beside_peers,
    check_loss,
    gpipe,
    interleaved,
    model,
    one_thread,
    sgd,
    timed,
    together,
)
from flowchan.pipelines import Sequential

ISOLATES = (
    f"{SETTING} The loss is cross entropy and the optimizer is SGD, without recomputation. The peers use the "
    "GPipe schedule, and flowchan uses its default schedule. 'A loss of pipe(x)' computes the same step "
    "through autograd, with the optimizer in the program."
)


def measure(effort: Effort) -> Report:
    jobs = _training, _plain_training, _rank_training, _torchgpipe_training
    report = beside_peers(effort, "training steps", 10, *jobs)
    with one_thread():
        _compare_autograd(report, effort)
    return report


def _compare_autograd(report: Report, effort: Effort) -> None:
    """Compare two ways to train: a loop with an optimizer in the program, and the steps of ``trainer``."""
    jobs: dict[str, SizedJob] = {"flowchan": _autograd, "training.step": _training}
    count = 10 if effort.full else 2
    mine, step = interleaved(report, "a loss of pipe(x), 2 parts", jobs, effort, SAMPLES, count)
    report.rows.append(at_least(0.9, mine, step))


def _plain_training(rows: int, count: int) -> float:
    plain, (x, target) = model(), batch(rows)
    optimizer = sgd(plain.parameters())
    step = partial(plain_step, plain, optimizer, x, target)
    step()
    return timed(step, count)


def plain_step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> float:
    optimizer.zero_grad()
    loss = functional.cross_entropy(module(x), target)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def _autograd(rows: int, count: int) -> float:
    x, target = batch(rows)
    with Sequential(model(), parts=2, on="process", chunks=CHUNKS) as pipe:
        step = partial(plain_step, pipe, sgd(pipe.parameters()), x, target)
        check_loss(rows, step())
        return timed(step, count)


def _training(rows: int, count: int) -> float:
    x, target = batch(rows)
    with (
        Sequential(model(), parts=2, on="process") as pipe,
        pipe.trainer(loss=functional.cross_entropy, optimizer=sgd) as training,
    ):
        check_loss(rows, float(training.step(x, target)))
        return timed(lambda: training.step(x, target), count)


def _torchgpipe_training(rows: int, count: int) -> float:
    x, target = batch(rows)
    pipe = gpipe(model())
    step = partial(plain_step, pipe, sgd(pipe.parameters()), x, target)
    check_loss(rows, step())
    return timed(step, count)


def _rank_training(rank: int, stage: PipelineStage, rows: int, count: int) -> float:
    x, target = batch(rows)
    schedule = ScheduleGPipe(stage, CHUNKS, loss_fn=functional.cross_entropy)
    optimizer = sgd(stage.submod.parameters())
    losses: list[Tensor] = []

    def step() -> None:
        optimizer.zero_grad()
        losses.clear()
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=target, losses=losses)
        optimizer.step()

    step()
    if rank == 1:
        check_loss(rows, torch.stack(losses).mean().item())
    return together(step, count)

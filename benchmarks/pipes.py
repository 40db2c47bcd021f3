"""Shared parts of the benchmarks of pipes: the model, the comparison, torchgpipe and
``torch.distributed.pipelining`` as peers, and checks of the results."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import repeat
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import torch
import torch.distributed
import torchgpipe.pipeline
import torchgpipe.worker
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional
from torchgpipe import GPipe

from benchmarks.harness import Case, Effort, Report, Result, at_least
from benchmarks.peers import CONTEXT

WIDTH, LAYERS, CHUNKS = 512, 16, 8
SAMPLES = 512 * CHUNKS
SIZES = ((SAMPLES, "", 1.85), (SAMPLES // 4, " of a quarter", 1.6))
"""For each size: the samples of a batch, its label, and the target as a multiple of the plain module."""

SETTING = (
    "The model has 16 Linear layers of 512 units with a ReLU after each, cut in the middle. A batch has 4,096"
    " samples, or a quarter of that, in 8 micro-batches. The plain module and each part use one compute "
    "thread. Every step uses the same batch, and an item is one sample. Each case warms up before its clock "
    "starts, and its first output is compared with the plain module's. The CPU seconds include the start. "
    "torchgpipe 0.0.7 runs with devices=['cpu', 'cpu'] and checkpoint='never'. It has one worker thread per "
    "device, so one for both parts. In 'torchgpipe, a thread per part' its spawn_workers is replaced, so that"
    " its forward passes overlap. Its backward passes do not overlap, because autograd has one thread for the"
    " CPU."
)

Job = Callable[[int], float]
"""Repeats its work that many times and returns the seconds it took."""
SizedJob = Callable[[int, int], float]
"""A job whose first argument is the number of samples in a batch."""
RankJob = Callable[[int, PipelineStage, int, int], float]
"""A sized job of one of two ranks; the rank and its part come first."""


def beside_peers(
    effort: Effort, work: str, batches: int, mine: SizedJob, plain: SizedJob, rank: RankJob, peer: SizedJob
) -> Report:
    """Compare ``mine`` with the plain module, with ``rank`` in two processes, and with ``peer`` on
    torchgpipe, for each of the sizes. ``batches`` is the number of batches of the largest size. A stream
    needs many, because its first batch passes through all parts before any output comes."""
    report = Report()
    jobs = {
        "flowchan": mine,
        "the plain module": plain,
        "torch.distributed.pipelining": partial(_distributed, rank),
        "torchgpipe": peer,
        "torchgpipe, a thread per part": partial(_threaded, peer),
    }
    with one_thread():
        for rows, what, factor in SIZES:
            count = batches * SAMPLES // rows if effort.full else 2
            done = interleaved(report, f"{work}{what}, 2 parts", jobs, effort, rows, count)
            ours, module, pipelining, *peers = done
            report.rows += [at_least(factor, ours, module), at_least(1.05, ours, pipelining)]
            report.rows += [at_least(1, ours, one) for one in peers]
    return report


def interleaved(
    report: Report, work: str, jobs: dict[str, SizedJob], effort: Effort, rows: int, count: int
) -> list[Result]:
    cases = [
        Case(name, "items/s", partial(rate, partial(job, rows), count, rows)) for name, job in jobs.items()
    ]
    return report.interleave(work, cases, effort.rounds)


def rate(job: Job, count: int, rows: int) -> tuple[Sequence[float], int]:
    return [count * rows / job(count)], count * rows


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit this process, its new threads and its forks to one compute thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def model() -> nn.Sequential:
    """Make the model, with the same weights each time. Both halves cost the same."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """Return samples and their classes."""
    chance = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=chance), torch.randint(WIDTH, (rows,), generator=chance)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def timed(work: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in repeat(None, count):
        work()
    return time.perf_counter() - began


# The peers


def gpipe(module: nn.Sequential) -> GPipe:
    half = len(module) // 2
    return GPipe(module, balance=[half, half], devices=["cpu", "cpu"], chunks=CHUNKS, checkpoint="never")


def _threaded(job: SizedJob, rows: int, count: int) -> float:
    """Run ``job`` with a torchgpipe that has a worker thread for each part instead of each device."""
    original = torchgpipe.pipeline.spawn_workers
    torchgpipe.pipeline.spawn_workers = _spawn_workers
    try:
        return job(rows, count)
    finally:
        torchgpipe.pipeline.spawn_workers = original


@contextmanager
def _spawn_workers(devices: Sequence[torch.device]) -> Iterator[tuple[list[Queue[Any]], list[Queue[Any]]]]:
    tasks: list[Queue[Any]] = [Queue() for _ in devices]
    done: list[Queue[Any]] = [Queue() for _ in devices]
    mode = torch.is_grad_enabled()
    threads = [
        Thread(target=torchgpipe.worker.worker, args=(*one, mode))
        for one in zip(tasks, done, devices, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield tasks, done
    finally:
        for queue in tasks:
            queue.put(None)
        for thread in threads:
            thread.join()


def _distributed(work: RankJob, rows: int, count: int) -> float:
    """Return the seconds of ``work(rank, stage, rows, count)`` in two processes."""
    answers = CONTEXT.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "meeting")
        processes = [
            CONTEXT.Process(target=_rank, args=(rank, meeting, work, rows, count, answers))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise AssertionError(f"its processes ended with {[process.exitcode for process in processes]}")
    return max(answers.get() for _ in processes)


def _rank(rank: int, meeting: str, work: RankJob, rows: int, count: int, answers: Any) -> None:
    with _group(rank, meeting):
        module = model()
        half = len(module) // 2
        part = module[half * rank : half * (rank + 1)]
        answers.put(work(rank, PipelineStage(part, rank, 2, torch.device("cpu")), rows, count))


@contextmanager
def _group(rank: int, meeting: str) -> Iterator[None]:
    join = torch.distributed.init_process_group
    join("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=120))
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def together(work: Callable[[], object], count: int) -> float:
    """Return the seconds until both processes have done ``work`` ``count`` times."""
    torch.distributed.barrier()
    began = time.perf_counter()
    timed(work, count)
    torch.distributed.barrier()
    return time.perf_counter() - began


# Checks of the results


@torch.no_grad()
def check_output(output: Tensor) -> None:
    torch.testing.assert_close(output, model()(batch(len(output))[0]))


@torch.no_grad()
def check_loss(rows: int, loss: float) -> None:
    x, target = batch(rows)
    expected = functional.cross_entropy(model()(x), target).item()
    if abs(loss - expected) > 1e-4:
        raise AssertionError(f"the loss of the first step is {loss}, not {expected}")

"""Code shared by the benchmarks of pipes: the model, the comparison, the peers and checks of the results.

The peers are torchgpipe and ``torch.distributed.pipelining``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import repeat
from multiprocessing.queues import SimpleQueue
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
SIZES = ((SAMPLES, "", 1.85), (SAMPLES // 4, ", quarter batch size", 1.6))
"""Number of samples in a batch, its label, and the target as a multiple of the plain module's speed."""

SETTING = (
    "The model has 16 Linear layers of 512 units with a ReLU after each, cut in the middle. A batch has "
    "4,096 samples, or a quarter of that, in 8 micro-batches. The plain module and each part use one compute "
    "thread. Every step uses the same batch, and an item is one sample. Each case warms up before its clock "
    "starts, and its first output is compared with the plain module's. The CPU seconds include starting the "
    "workers. torchgpipe 0.0.7 runs with devices=['cpu', 'cpu'] and checkpoint='never'. torchgpipe has one "
    "worker thread per device, and both parts are on the same device, so they share a thread. In "
    "'torchgpipe, a thread per part', torchgpipe's spawn_workers is replaced so that its forward passes "
    "overlap. Its backward passes do not overlap, because autograd has one thread for the CPU."
)

Job = Callable[[int], float]
"""Function that repeats its work the given number of times and returns how many seconds it took."""
SizedJob = Callable[[int, int], float]
"""Job whose first argument is the number of samples in a batch."""
RankJob = Callable[[int, PipelineStage, int, int], float]
"""Sized job for one of two ranks. Its first two arguments are the rank and the rank's part."""


def beside_peers(
    effort: Effort, work: str, batches: int, mine: SizedJob, plain: SizedJob, rank: RankJob, peer: SizedJob
) -> Report:
    """Compare ``mine`` with the plain module and the peers, for each size.

    ``rank`` runs in two processes, and ``peer`` runs on torchgpipe. ``batches`` is the number of batches of
    the largest size. A stream needs many, because its first batch passes through all parts before any output
    arrives.
    """
    report = Report()
    jobs: dict[str, SizedJob] = {
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
    """Limit this process, its new threads and its forked children to one compute thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def model() -> nn.Sequential:
    """Create the model, with the same weights each time. Both halves cost the same."""
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


# --- peers ---


def gpipe(module: nn.Sequential) -> GPipe:
    half = len(module) // 2
    return GPipe(module, balance=[half, half], devices=["cpu", "cpu"], chunks=CHUNKS, checkpoint="never")


def _threaded(job: SizedJob, rows: int, count: int) -> float:
    """Run ``job`` with a version of torchgpipe that has one worker thread per part instead of one per
    device."""
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
    """Return how many seconds ``work(rank, stage, rows, count)`` takes in two processes."""
    answers: SimpleQueue[float] = CONTEXT.SimpleQueue()
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
        raise AssertionError(f"the ranks ended with {[process.exitcode for process in processes]}")
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
    """Return how many seconds it takes until both processes have done ``work`` ``count`` times."""
    torch.distributed.barrier()
    began = time.perf_counter()
    timed(work, count)
    torch.distributed.barrier()
    return time.perf_counter() - began


# --- checks of the results ---


@torch.no_grad()
def check_output(output: Tensor) -> None:
    torch.testing.assert_close(output, model()(batch(len(output))[0]))


@torch.no_grad()
def check_loss(rows: int, loss: float) -> None:
    x, target = batch(rows)
    expected = functional.cross_entropy(model()(x), target).item()
    if abs(loss - expected) > 1e-4:
        raise AssertionError(f"the loss in the first step must be {expected}, got {loss}")

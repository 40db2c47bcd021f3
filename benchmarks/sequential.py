"""A model in two equal parts on two processes with one compute thread each: a stream of batches through it,
and training steps; beside the plain module, torchgpipe and ``torch.distributed.pipelining``. And what a
newcomer gets, who says nothing but ``parts=2, on="process"``."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import product, repeat
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import torch
import torch.distributed
import torchgpipe.pipeline
import torchgpipe.worker
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional
from torchgpipe import GPipe

from benchmarks.harness import Case, Effort, Report, Result, at_least
from benchmarks.peers import CONTEXT
from flowchan.pipelines import Sequential

ISOLATES = (
    "one model of 16 Linear layers of 512 and their ReLUs, cut in the middle; batches of 4096 "
    "samples in 8 micro-batches, or of a quarter of them, "
    "for all but the plain module and flowchan's stream, which take them whole; one compute "
    "thread for the plain module "
    "and for each part; the same batch again and again, and items are samples. All are warm "
    "before their clocks, and the "
    "first answer is compared with the plain module's; CPU seconds include the start. flowchan's "
    "outputs come back to the "
    "program; torch.distributed.pipelining (gloo) leaves them with the last of its two "
    "processes. torchgpipe 0.0.7 has "
    "devices=['cpu', 'cpu'], checkpoint='never', and one worker thread for each device: one for "
    "both parts. 'torchgpipe, a "
    "thread per part' is the same with its spawn_workers replaced, so that its forward passes "
    "overlap; its backward passes "
    "do not, for autograd has one thread for all that is on the CPU. Training: cross entropy, "
    "SGD, no recomputation; the peers have the GPipe schedule, flowchan the one that it takes by itself. "
    "'A loss of pipe(x)' is the same step by autograd through the pipe, "
    "with an optimizer in the program. 'Defaults': 4 or 16 pairs of Linear(512), Tanh and a last "
    "Linear(512, 10), nothing "
    "said but parts=2 and on='process'; each round is a fresh start, with the cut measured again; "
    "the plain module once with one compute thread, once with torch's own number, which on two cores "
    "computes as quickly as two parts could at best; two plain modules, in processes that have nothing "
    "to do with each other, show how much of a second core this machine really gives."
)

WIDTH, LAYERS, CHUNKS = 512, 16, 8
SAMPLES = 512 * CHUNKS

Job = Callable[[int], float]
"""Does its work that many times and returns the seconds it took."""
SizedJob = Callable[[int, int], float]
"""The same with batches of so many samples, which come first."""


def measure(effort: Effort) -> Report:
    report = Report()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of threads that are yet to come, and of forked processes, too
    try:
        for rows, what, factor in ((SAMPLES, "", 1.85), (SAMPLES // 4, " of a quarter", 1.6)):
            many, few = (40 * SAMPLES // rows, 10 * SAMPLES // rows) if effort.full else (2, 2)
            jobs: dict[str, SizedJob] = {
                "flowchan": _stream,
                "the plain module": _plain,
                "torch.distributed.pipelining": partial(_distributed, _rank_forward),
                "torchgpipe": _torchgpipe,
                "torchgpipe, a thread per part": partial(_threaded, _torchgpipe),
            }
            _compare(report, f"stream of batches{what}, 2 parts", jobs, effort, rows, many, factor)
            jobs = {
                "flowchan": _training,
                "the plain module": _plain_training,
                "torch.distributed.pipelining": partial(_distributed, _rank_training),
                "torchgpipe": _torchgpipe_training,
                "torchgpipe, a thread per part": partial(_threaded, _torchgpipe_training),
            }
            _compare(report, f"training steps{what}, 2 parts", jobs, effort, rows, few, factor)
        _compare_autograd(report, effort)
    finally:
        torch.set_num_threads(threads)
    shapes = product((4, 16), (128, 256, 512)) if effort.full else [(4, 128), (16, 512)]
    for pairs, rows in shapes:
        _compare_defaults(report, pairs, rows, effort)
    return report


def _compare_defaults(report: Report, pairs: int, rows: int, effort: Effort) -> None:
    """Rows of what a newcomer gets against the plain module: the median of fresh starts, and what nine of ten
    reach."""
    count = (100_000 if effort.full else 8_000) // (pairs * rows // 4) // 2 * 2
    count = max(24, count)  # many times what is in flight
    threads = torch.get_num_threads()
    jobs = {
        "flowchan": partial(_default_stream, pairs, rows),
        "the plain module, 1 thread": partial(_default_plain, pairs, rows, 1),
        f"the plain module, torch's {threads} threads": partial(_default_plain, pairs, rows, threads),
        "two plain modules at once": partial(_default_twice, pairs, rows),
    }
    cases = [Case(name, "items/s", partial(_rate, job, count, rows)) for name, job in jobs.items()]
    rounds = 2 * effort.rounds if effort.full else effort.rounds
    work = f"defaults: {pairs} pairs, batches of {rows}"
    mine, one, own, twice = report.interleave(work, cases, rounds)
    report.rows += [at_least(1.8, mine, one), at_least(1.8, mine, one, quantile=0.1), at_least(1, mine, own)]
    report.rows.append(at_least(0.9, mine, twice))


def _rate(job: Job, count: int, rows: int) -> tuple[Sequence[float], int]:
    return [count * rows / job(count)], count * rows


def _compare(
    report: Report,
    work: str,
    jobs: dict[str, SizedJob],
    effort: Effort,
    rows: int,
    count: int,
    factor: float,
) -> None:
    """Rows of flowchan against each of the others, with ``factor`` for the first of them. ``count`` batches:
    of a stream many, for the first of them goes through all parts before any comes out."""
    mine, plain, pipelining, *peers = _interleaved(report, work, jobs, effort, rows, count)
    report.rows += [at_least(factor, mine, plain), at_least(1.05, mine, pipelining)]
    report.rows += [at_least(1, mine, peer) for peer in peers]


def _compare_autograd(report: Report, effort: Effort) -> None:
    """A row of a loss of ``pipe(x)`` with an optimizer in the program, against whole steps in the parts."""
    jobs: dict[str, SizedJob] = {"flowchan": _autograd, "training.step": _training}
    count = 10 if effort.full else 2
    mine, step = _interleaved(report, "a loss of pipe(x), 2 parts", jobs, effort, SAMPLES, count)
    report.rows.append(at_least(0.9, mine, step))


def _interleaved(
    report: Report, work: str, jobs: dict[str, SizedJob], effort: Effort, rows: int, count: int
) -> list[Result]:
    cases = [
        Case(name, "items/s", partial(_rate, partial(job, rows), count, rows)) for name, job in jobs.items()
    ]
    return report.interleave(work, cases, effort.rounds)


def model() -> nn.Sequential:
    """The same one every time. Both halves of it cost the same."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """Samples and their classes."""
    chance = torch.Generator().manual_seed(1)
    return torch.randn(rows, WIDTH, generator=chance), torch.randint(WIDTH, (rows,), generator=chance)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def timed(work: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in repeat(None, count):
        work()
    return time.perf_counter() - began


# A stream of batches


@torch.no_grad()
def _plain(rows: int, count: int) -> float:
    plain, (x, _) = model(), batch(rows)
    plain(x)
    return timed(lambda: plain(x), count)


def _stream(rows: int, count: int) -> float:
    x, _ = batch(rows)
    with Sequential(model(), parts=2, on="process", chunks=CHUNKS) as pipe:
        _check_output(pipe(x))
        began = time.perf_counter()
        came = sum(len(y) for y in pipe.stream(repeat(x, count)))
        took = time.perf_counter() - began
    if came != count * rows:
        raise AssertionError(f"{count * rows} samples went in, {came} came out")
    return took


@torch.no_grad()
def _torchgpipe(rows: int, count: int) -> float:
    x, _ = batch(rows)
    pipe = _gpipe(model())
    _check_output(pipe(x))
    return timed(lambda: pipe(x), count)


def _rank_forward(rank: int, stage: PipelineStage, rows: int, count: int) -> float:
    x, _ = batch(rows)
    schedule = ScheduleGPipe(stage, CHUNKS)
    with torch.no_grad():
        if rank == 0:
            schedule.eval(x)
            return _together(lambda: schedule.eval(x), count)
        _check_output(schedule.eval())
        return _together(schedule.eval, count)


def _default_model(pairs: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(pairs) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10)).eval()


def _default_stream(pairs: int, rows: int, count: int) -> float:
    x = batch(rows)[0]
    module = _default_model(pairs)
    with Sequential(module, parts=2, on="process") as pipe:
        outputs = pipe.stream(repeat(x))
        for _ in range(8):  # from then on the parts have as much to do as they ever have
            torch.testing.assert_close(next(outputs), module(x).detach())
        return timed(partial(next, outputs), count)


@torch.no_grad()
def _default_plain(pairs: int, rows: int, threads: int, count: int) -> float:
    x, module = batch(rows)[0], _default_model(pairs)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(5):
            module(x)
        return timed(lambda: module(x), count)
    finally:
        torch.set_num_threads(before)


def _default_twice(pairs: int, rows: int, count: int) -> float:
    """As much work by two processes that have nothing to do with each other, with a thread each: the most
    that two parts could reach on this machine."""
    barrier, took = CONTEXT.Barrier(2), CONTEXT.SimpleQueue()

    def work() -> None:
        torch.set_num_threads(1)
        x, module = batch(rows)[0], _default_model(pairs)
        with torch.no_grad():
            for _ in range(5):
                module(x)
            barrier.wait()
            took.put(timed(lambda: module(x), count // 2))

    processes = [CONTEXT.Process(target=work) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(took.get() for _ in processes)


# Training


def _plain_training(rows: int, count: int) -> float:
    plain, (x, target) = model(), batch(rows)
    optimizer = sgd(plain.parameters())
    step = partial(_plain_step, plain, optimizer, x, target)
    step()
    return timed(step, count)


def _plain_step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> float:
    optimizer.zero_grad()
    loss = functional.cross_entropy(module(x), target)
    loss.backward()
    optimizer.step()
    return loss.item()


def _autograd(rows: int, count: int) -> float:
    x, target = batch(rows)
    with Sequential(model(), parts=2, on="process", chunks=CHUNKS) as pipe:
        step = partial(_plain_step, pipe, sgd(pipe.parameters()), x, target)
        _check_loss(rows, step())
        return timed(step, count)


def _training(rows: int, count: int) -> float:
    x, target = batch(rows)
    with (
        Sequential(model(), parts=2, on="process") as pipe,
        pipe.trainer(loss=functional.cross_entropy, optimizer=sgd) as training,
    ):
        _check_loss(rows, float(training.step(x, target)))
        return timed(lambda: training.step(x, target), count)


def _torchgpipe_training(rows: int, count: int) -> float:
    x, target = batch(rows)
    pipe = _gpipe(model())
    step = partial(_plain_step, pipe, sgd(pipe.parameters()), x, target)
    _check_loss(rows, step())
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
        _check_loss(rows, torch.stack(losses).mean().item())
    return _together(step, count)


# The peers


def _gpipe(module: nn.Sequential) -> GPipe:
    half = len(module) // 2
    return GPipe(module, balance=[half, half], devices=["cpu", "cpu"], chunks=CHUNKS, checkpoint="never")


def _threaded(job: SizedJob, rows: int, count: int) -> float:
    """``job`` with a torchgpipe that has a worker thread for each part, not for each device."""
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


RankJob = Callable[[int, PipelineStage, int, int], float]


def _distributed(work: RankJob, rows: int, count: int) -> float:
    """Seconds that ``work(rank, stage, rows, count)`` took in two processes."""
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


def _together(work: Callable[[], object], count: int) -> float:
    """Seconds until both processes have done ``work`` that many times."""
    torch.distributed.barrier()
    began = time.perf_counter()
    timed(work, count)
    torch.distributed.barrier()
    return time.perf_counter() - began


# Nobody is quick by being wrong


@torch.no_grad()
def _check_output(output: Tensor) -> None:
    torch.testing.assert_close(output, model()(batch(len(output))[0]))


@torch.no_grad()
def _check_loss(rows: int, loss: float) -> None:
    x, target = batch(rows)
    expected = functional.cross_entropy(model()(x), target).item()
    if abs(loss - expected) > 1e-4:
        raise AssertionError(f"the loss of the first step is {loss}, not {expected}")

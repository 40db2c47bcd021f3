"""Compare ``Sequential(parts=2, on="process")``, with all other options at their defaults, with the plain
module."""

from __future__ import annotations

from functools import partial
from itertools import product, repeat
from multiprocessing.queues import SimpleQueue

import torch
from torch import nn

from benchmarks.harness import Case, Effort, Report, at_least
from benchmarks.peers import CONTEXT
from benchmarks.pipes import WIDTH, batch, rate, timed
from flowchan.pipelines import Sequential

ISOLATES = (
    "A stream of batches passes through 4 or 16 pairs of Linear(512) and Tanh, followed by one Linear(512, "
    "10). The only options are parts=2 and on='process'. Each round starts new workers and chooses the cut "
    "again. The plain module runs once with one compute thread and once with torch's default number of "
    "threads. On two cores, two parts can at best be as fast as the plain module with that default. Two "
    "independent plain modules in two processes show how much of a second core this machine really provides."
)


def measure(effort: Effort) -> Report:
    report = Report()
    for pairs, rows in product((4, 16), (128, 256, 512)) if effort.full else [(4, 128), (16, 512)]:
        _compare(report, pairs, rows, effort)
    return report


def _compare(report: Report, pairs: int, rows: int, effort: Effort) -> None:
    """Compare flowchan's defaults with the plain module: the medians, and the speeds that 9 of 10 runs
    reach."""
    count = (100_000 if effort.full else 8_000) // (pairs * rows // 4) // 2 * 2
    count = max(24, count)  # many more batches than can be in flight
    threads = torch.get_num_threads()
    jobs = {
        "flowchan": partial(_stream, pairs, rows),
        "the plain module, 1 thread": partial(_plain, pairs, rows, 1),
        f"the plain module, torch's {threads} threads": partial(_plain, pairs, rows, threads),
        "two plain modules at once": partial(_twice, pairs, rows),
    }
    cases = [Case(name, "items/s", partial(rate, job, count, rows)) for name, job in jobs.items()]
    rounds = 2 * effort.rounds if effort.full else effort.rounds
    work = f"defaults: {pairs} pairs, batches of {rows}"
    mine, one, own, twice = report.interleave(work, cases, rounds)
    report.rows += [at_least(1.8, mine, one), at_least(1.8, mine, one, quantile=0.1), at_least(1, mine, own)]
    report.rows.append(at_least(0.9, mine, twice))


def _model(pairs: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(pairs) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10)).eval()


def _stream(pairs: int, rows: int, count: int) -> float:
    x = batch(rows)[0]
    module = _model(pairs)
    with Sequential(module, parts=2, on="process") as pipe:
        outputs = pipe.stream(repeat(x))
        for _ in range(8):  # skip the first batches, during which the parts do not run at full speed
            torch.testing.assert_close(next(outputs), module(x).detach())
        return timed(partial(next, outputs), count)


@torch.no_grad()
def _plain(pairs: int, rows: int, threads: int, count: int) -> float:
    x, module = batch(rows)[0], _model(pairs)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(5):
            module(x)
        return timed(lambda: module(x), count)
    finally:
        torch.set_num_threads(before)


def _twice(pairs: int, rows: int, count: int) -> float:
    """Do the same work in two independent processes with one thread each.

    On this machine, two parts cannot be faster than these processes.
    """
    barrier = CONTEXT.Barrier(2)
    took: SimpleQueue[float] = CONTEXT.SimpleQueue()

    def work() -> None:
        torch.set_num_threads(1)
        x, module = batch(rows)[0], _model(pairs)
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

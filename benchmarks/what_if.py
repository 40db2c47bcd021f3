"""Compare predictions of ``run.what_if()`` with real runs of random graphs.

Usage: ``python -m benchmarks.what_if [--graphs N] [--seed S] [--kinds KIND…] [--json PATH]``. Each graph is a
chain of 2 to 5 stages. Each change adds a worker to the slowest stage, adds one to another stage, or doubles
the speed of the slowest stage. The benchmark predicts the effects of these three changes, then runs the
changed graphs. The benchmark also runs the unchanged graph twice. A prediction is the ratio of the new rate
to the old one, and the table shows the errors of these ratios. The row "same graph" shows the difference
between the two runs of the unchanged graph. Other programs on the machine disturb the measurement. 50 graphs
take about 10 minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flowchan import Graph, RunStats
from flowchan.run.observe.cgroups import local_cores
from flowchan.run.observe.throughput import Model
from flowchan.run.observe.what_if import NOISE, Prediction, end_rate, predict
from flowchan.run.observe.windows import between

MS = 0.001
WARM_S, WINDOW_S = 0.6, 1.4
"""Seconds of unmeasured warm-up, and seconds of measurement."""
GAIN = 1.05
"""Smallest ratio of new rate to old rate that counts as a gain."""
ITEMS_OUT = {"batch": 0.25, "flat_map": 2.0, "filter": 0.5}
"""Number of outputs per input, for the operators where this number is not 1."""
MOST_MERGED = 8
"""Maximum number of source items per item that leaves the graph."""
SAME = "same graph"
"""Name of the trials that run an unchanged graph twice."""

Kind = Literal["sleep", "sleep_process", "compute_process", "compute_thread"]
KINDS: tuple[Kind, ...] = ("sleep", "sleep_process", "compute_process", "compute_thread")
Spread = Literal["equal", "uniform", "exponential"]


@dataclass(frozen=True, slots=True)
class Step:
    """Stage of a random graph. ``ms`` is the mean work time per item in milliseconds."""

    name: str
    kind: Kind
    operator: str
    ms: float
    spread: Spread
    workers: int
    capacity: int

    def work(self) -> None:
        ms = self.ms
        if self.spread == "uniform":
            ms *= random.uniform(0.5, 1.5)
        elif self.spread == "exponential":
            ms *= random.expovariate(1)
        if self.kind.startswith("sleep"):
            time.sleep(ms * MS)
        else:
            ends = time.thread_time() + ms * MS
            while time.thread_time() < ends:
                pass


@dataclass(frozen=True, slots=True)
class Trial:
    """Prediction, and the ratio that a real run of the changed graph reached."""

    graph: int
    change: str
    kinds: tuple[Kind, ...]
    predicted: float
    low: float
    high: float
    measured: float
    limited_by: str

    @property
    def error(self) -> float:
        """Return the absolute error of the predicted ratio, as a fraction of the measured ratio."""
        return abs(self.predicted / self.measured - 1)

    @property
    def is_right(self) -> bool:
        """Return whether prediction and measurement agree on whether the gain exceeds 5 %."""
        return (self.predicted > GAIN) == (self.measured > GAIN)


def steps(chance: random.Random, kinds: Sequence[Kind]) -> list[Step]:
    """Return a random chain of 2 to 5 stages.

    At least one item leaves the graph for every ``MOST_MERGED`` source items, so each window contains enough
    items.
    """
    while True:
        chain = _steps(chance, kinds)
        if math.prod(ITEMS_OUT.get(step.operator, 1.0) for step in chain) >= 1 / MOST_MERGED:
            return chain


def _steps(chance: random.Random, kinds: Sequence[Kind]) -> list[Step]:
    chain = []
    for number in range(chance.randint(2, 5)):
        kind = chance.choice(kinds)
        operator = chance.choice(["map", "map", "map", "flat_map", "filter", "batch"])
        chain.append(
            Step(
                f"s{number}",
                kind,
                operator,
                chance.uniform(2, 10) if kind.startswith("sleep") else chance.uniform(0.3, 2),
                chance.choices(["equal", "uniform", "exponential"], [6, 3, 1])[0],  # type: ignore[arg-type]
                chance.randint(1, 4),
                chance.choice([1, 2, 4, 8, 16, 32, 64]),
            )
        )
    return chain


def counting() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def build(chain: Iterable[Step]) -> Graph:
    """Return the graph of a chain.

    A batch has 4 items, a flat_map returns 2 items for each input, and a filter keeps every second item.
    """
    graph = Graph("random")
    stream: Any = graph.source(counting, capacity=4)
    for step in chain:
        if step.operator == "batch":
            stream = stream.batch(4, capacity=4)
        how: Any = {
            "name": step.name,
            "workers": step.workers,
            "capacity": step.capacity,
            "on": "process" if step.kind.endswith("process") else "thread",
        }
        if step.operator == "flat_map":
            stream = stream.flat_map(_two(step), **how)
        elif step.operator == "filter":
            stream = stream.filter(_every_second(step), **how)
        else:
            stream = stream.map(_same(step), **how)
    stream.sink(id, name="end")
    return graph


def _same(step: Step) -> Callable[[Any], Any]:
    def same(item: Any) -> Any:
        step.work()
        return item

    return same


def _two(step: Step) -> Callable[[Any], list[Any]]:
    def two(item: Any) -> list[Any]:
        step.work()
        return [item, item]

    return two


def _every_second(step: Step) -> Callable[[Any], bool]:
    passed = [0]

    def every_second(item: Any) -> bool:
        step.work()
        passed[0] += 1
        return passed[0] % 2 == 0

    return every_second


def measured(chain: Iterable[Step]) -> RunStats:
    """Run a chain, and return the statistics of a time window after the warm-up."""
    with build(chain).start() as run:
        run.ready()
        time.sleep(WARM_S)
        before = run._supervisor._counters()
        time.sleep(WINDOW_S)
        after = run._supervisor._counters()
        run.abort()
    return between(before, after)


def changes(
    chain: list[Step], stats: RunStats, chance: random.Random
) -> Iterator[tuple[str, list[Step], Prediction]]:
    """Yield a description, the changed chain and the prediction for each change."""
    bounds = Model.of(stats).bounds()
    names = [step.name for step in chain]
    slowest = min(names, key=lambda name: bounds.get(name, math.inf))
    other = chance.choice([name for name in names if name != slowest])

    def changed(name: str, change: Callable[[Step], Step]) -> list[Step]:
        return [change(step) if step.name == name else step for step in chain]

    def more(step: Step) -> Step:
        return dataclasses.replace(step, workers=step.workers + 1)

    def faster(step: Step) -> Step:
        return dataclasses.replace(step, ms=step.ms / 2)

    yield "one more worker, slowest", changed(slowest, more), predict(stats, slowest, workers=1)
    yield "one more worker, other", changed(other, more), predict(stats, other, workers=1)
    yield "twice as fast, slowest", changed(slowest, faster), predict(stats, slowest, faster=2.0)


def trials(graphs: int, seed: int, kinds: Sequence[Kind]) -> Iterator[Trial]:
    """Yield trials of random graphs. The old rate is the mean of two runs of the unchanged graph."""
    for number in range(graphs):
        chance = random.Random(f"{seed} {number}")
        chain = steps(chance, kinds)
        used = tuple(sorted({step.kind for step in chain}))
        stats, again = measured(chain), measured(chain)
        before = (end_rate(stats) + end_rate(again)) / 2
        repeated = end_rate(again) / end_rate(stats)
        yield Trial(number, SAME, used, 1.0, 1 - NOISE, 1 + NOISE, repeated, "")
        for change, changed, one in changes(chain, stats, chance):
            predicted, low, high = one.predicted / one.now, one.low / one.now, one.high / one.now
            ratio = end_rate(measured(changed)) / before
            yield Trial(number, change, used, predicted, low, high, ratio, one.limited_by)


def rows(found: Sequence[Trial]) -> Iterator[tuple[str, list[Trial]]]:
    """Yield the rows of the table: all predictions, then trials by change and by kind of stage."""
    predicted = [trial for trial in found if trial.change != SAME]
    yield "all predictions", predicted
    for change in dict.fromkeys(trial.change for trial in found):
        yield change, [trial for trial in found if trial.change == change]
    for kind in KINDS:
        yield f"graphs with {kind}", [trial for trial in predicted if kind in trial.kinds]


def figures(found: Sequence[Trial]) -> dict[str, float]:
    """Return the number of trials, their errors, and how often the predicted gain and range were right."""
    errors = sorted(trial.error for trial in found)
    return {
        "trials": len(found),
        "median": statistics.median(errors),
        "p90": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "right": sum(trial.is_right for trial in found) / len(found),
        "in range": sum(trial.low <= trial.measured <= trial.high for trial in found) / len(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.what_if", description=__doc__)
    parser.add_argument("--graphs", type=int, default=50, help="number of random graphs")
    parser.add_argument("--seed", type=int, default=1, help="random seed for the graphs")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=KINDS, help="kinds of stages to use")
    parser.add_argument("--json", default="benchmarks/results/what_if.json", help="path of the JSON output")
    args = parser.parse_args()
    found: list[Trial] = []
    for trial in trials(args.graphs, args.seed, args.kinds):
        found.append(trial)
        print(".", end="", file=sys.stderr, flush=True)
    table = {name: figures(some) for name, some in rows(found) if some}
    print("\n| predictions | number | median error | 90th-percentile error | gain right | in range |")
    print("|---|---|---|---|---|---|")
    for name, row in table.items():
        print(
            f"| {name} | {row['trials']} | {row['median']:.1%} | {row['p90']:.1%} | {row['right']:.0%} "
            f"| {row['in range']:.0%} |"
        )
    record = {
        "python": platform.python_version(),
        "cores": local_cores(),
        "load": os.getloadavg(),
        "seed": args.seed,
        "table": table,
        "trials": [dataclasses.asdict(trial) for trial in found],
    }
    with open(args.json, "w") as file:
        json.dump(record, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()

"""Measure how fast ``workers=auto(…)`` finds a good number of workers, and how well it follows a changing
load."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.harness import Case, Effort, Report, Row, at_least, at_most, in_words
from flowchan import Graph, auto

ISOLATES = (
    "Two stages sleep 17 and 21 ms per item and share 8 workers; the best fixed split is 4 and 4. Times "
    "begin at the first result, so the start of Ray does not count. The rate counts the results from 10 "
    "to 15 s. The time to 95 % ends when the results within one second reach 95 % of the rate of the "
    "fixed split. Ray Data runs the same functions in two pools of 1 to 8 actors on 8 CPUs, with 10 "
    "items per block. For the changing load, the program puts 40, 150 and 60 items per second, for 25 s "
    "each. The table counts the items that are finished after 75 s."
)

SLOTS = 8
FIRST_S, SECOND_S = 0.017, 0.021
LOADS = (40, 150, 60)


def first(item: Any) -> Any:
    time.sleep(FIRST_S)
    return item


def second(item: Any) -> Any:
    time.sleep(SECOND_S)
    return item


def measure(effort: Effort) -> Report:
    report = Report()
    settle, end = (10.0, 15.0) if effort.full else (2.0, 3.0)
    arrivals: dict[str, list[list[float]]] = {}

    def case(name: str, items: Iterable[Any]) -> Case:
        def work() -> tuple[Sequence[float], int]:
            times = _arrivals(items, end)
            arrivals.setdefault(name, []).append(times)
            return [sum(at >= settle for at in times) / (end - settle)], len(times)

        return Case(name, "items/s", work)

    cases = [case("flowchan", _Graph(None)), case("a fixed split", _Graph(SLOTS // 2))]
    if (ray := _ray()) is not None:
        cases.append(case("Ray Data", ray))
    mine, fixed, *others = report.interleave("two stages, 8 workers", cases, min(3, effort.rounds))
    report.rows += [at_least(0.95, mine, fixed), *(at_least(1, mine, other) for other in others)]
    goal = 0.95 * fixed.figure()
    for name in (mine.name, *(other.name for other in others)):
        report.rows.append(_time_row(name, [_reached(times, goal) for times in arrivals[name]]))
    _load(report, 25.0 if effort.full else 2.0)
    return report


class _Graph:
    """A graph to iterate over. Each stage has ``workers`` workers; None lets the run choose the number."""

    def __init__(self, workers: int | None) -> None:
        self._workers = workers

    def __iter__(self) -> Iterator[Any]:
        workers = auto(most=SLOTS) if self._workers is None else self._workers
        graph = Graph("autoscale")
        halfway = graph.source(itertools.count()).map(first, workers=workers)
        results = halfway.map(second, workers=workers).collect()
        with graph.start() as run:
            yield from run.iter(results)


def _arrivals(items: Iterable[Any], seconds: float) -> list[float]:
    """Return when each item arrived, in seconds after the first item."""
    times: list[float] = []
    iterator, began = iter(items), None
    for _ in iterator:
        now = time.perf_counter()
        began = now if began is None else began
        times.append(now - began)
        if times[-1] > seconds:
            break
    if isinstance(iterator, Iterator) and hasattr(iterator, "close"):
        iterator.close()
    return times


def _reached(times: Sequence[float], goal: float) -> float:
    """Return the end of the first second in which the rate reaches ``goal``, or infinity."""
    least = round(goal)
    return next(
        (at for past, at in zip(times, times[least:], strict=False) if at - past <= 1.0), float("inf")
    )


def _time_row(name: str, seconds: Sequence[float]) -> Row:
    middle = sorted(seconds)[len(seconds) // 2]
    text = in_words(middle, "s") if middle < float("inf") else "not reached"
    work = "two stages, 8 workers, time to 95 %"
    if name == "flowchan":
        return Row(work, "≤ 10 s", text, "", "", middle <= 10)
    return Row(f"{work}, {name}", "none", "", text, "", True)


# --- Ray Data ---


def _ray() -> Iterable[Any] | None:
    try:
        import ray
        import ray.data
    except ImportError:
        return None

    class First:
        def __call__(self, row: dict[str, Any]) -> Any:
            return first(row)

    class Second:
        def __call__(self, row: dict[str, Any]) -> Any:
            return second(row)

    class Rows:
        def __iter__(self) -> Iterator[Any]:
            ray.init(num_cpus=SLOTS, include_dashboard=False, log_to_driver=False)
            try:
                rows = ray.data.range(100_000, override_num_blocks=10_000)
                pool = {"compute": ray.data.ActorPoolStrategy(min_size=1, max_size=SLOTS), "num_cpus": 1}
                yield from rows.map(First, **pool).map(Second, **pool).iter_rows()
            finally:
                ray.shutdown()

    return Rows()


# --- a changing load ---


def _load(report: Report, seconds: float) -> None:
    spent: dict[str, list[float]] = {}

    def case(name: str, workers: Any) -> Case:
        def work() -> tuple[Sequence[float], int]:
            done, worker_seconds = _loaded(workers, seconds)
            spent.setdefault(name, []).append(worker_seconds)
            return [done], done

        return Case(name, "items", work)

    cases = [case("flowchan", auto(most=SLOTS)), case("a fixed split", SLOTS // 2)]
    mine, fixed = report.interleave("load of 40, 150 and 60 items/s", cases, 1)
    report.rows.append(at_least(0.95, mine, fixed))

    def lifetimes(name: str) -> tuple[Sequence[float], int]:
        return spent[name], 1

    worked = [Case(name, "s", partial(lifetimes, name)) for name in spent]
    mine, fixed = report.interleave("load of 40, 150 and 60 items/s, total lifetime of workers", worked, 1)
    report.rows.append(at_most(1, mine, fixed))


def _loaded(workers: Any, seconds: float) -> tuple[int, float]:
    """Return the number of items finished under the load, and the total lifetime of all workers."""
    graph = Graph("load")
    items = graph.input()
    items.map(first, workers=workers, name="first").map(second, workers=workers, name="second").sink(
        hash, name="end"
    )
    with graph.start() as run:
        feeder = threading.Thread(target=_put, args=(run[items], seconds))
        feeder.start()
        feeder.join(len(LOADS) * seconds)
        stages = {stage.name: stage for stage in run.stats().stages}
        feeder.join()
    return stages["end"].items_out, stages["first"].seconds.working + stages["second"].seconds.working


def _put(out: Any, seconds: float) -> None:
    due = time.perf_counter()
    for rate in LOADS:
        for number in range(int(rate * seconds)):
            time.sleep(max(0.0, due - time.perf_counter()))
            out.put(number)
            due += 1 / rate


if __name__ == "__main__":
    import sys

    from benchmarks.harness import FULL, QUICK, show

    show("autoscale", ISOLATES, measure(QUICK if "--quick" in sys.argv else FULL))

"""Describe a graph and the state of its run as JSON values for the page.

All functions are pure. Stages and channels are identified by the IDs of their elements in the drawn graph
(see :mod:`flowchan.viz.dot`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flowchan.declare.blueprint import Blueprint
from flowchan.run.observe.latency import PathLatency
from flowchan.run.observe.problems import RunProblem
from flowchan.run.observe.what_if import advice, end_rate
from flowchan.run.policy.scaling import ScalingDecision
from flowchan.run.policy.stats import EdgeStats, RunStats, StageStats, WorkerStats, WorkSeconds
from flowchan.viz import labels
from flowchan.viz.live.model import Progress, items_of

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ElementIds:
    """Ids of stages and channels in the drawn graph, by name."""

    stages: Mapping[str, str]
    edges: Mapping[str, str]
    ends: frozenset[str]
    """Names of the stages where items leave the graph, except stages that only take failed items."""


def ids_of(graph: Blueprint) -> ElementIds:
    """Return the IDs of all stages and channels of a graph."""
    read = {edge.writer for edge in graph.edges if edge.reader is not None}
    ends = frozenset(stage.name for stage in graph.stages if stage.name not in read)
    failed = {edge.reader for edge in graph.edges if edge.errors}
    return ElementIds(
        {stage.name: f"s{number}" for number, stage in enumerate(graph.stages)},
        {edge.name: f"e{number}" for number, edge in enumerate(graph.edges)},
        ends - failed or ends,
    )


def describe(graph: Blueprint) -> Json:
    """Return everything about a graph that does not change during a run, except the picture."""
    ids = ids_of(graph)
    return {
        "name": graph.name,
        "stages": [
            {
                "id": ids.stages[stage.name],
                "name": stage.name,
                "kind": stage.kind,
                "on": stage.placement.name,
                "where": labels.place_text(stage),
            }
            for stage in graph.stages
        ],
        "edges": [
            {
                "id": ids.edges[edge.name],
                "name": edge.name,
                "writer": ids.stages[edge.writer],
                "reader": ids.stages.get(edge.reader or ""),
                "transport": edge.transport.name,
            }
            for edge in graph.edges
        ],
    }


def snapshot(
    progress: Progress,
    ids: ElementIds,
    now: RunStats,
    before: RunStats | None,
    problems: Iterable[RunProblem] = (),
    latencies: Iterable[PathLatency] = (),
) -> Json:
    """Return the state of a run.

    Args:
        progress: Progress of the run, which computes the remaining time from successive calls.
        ids: Ids of the stages and channels.
        now: Statistics with the rates and shares to show.
        before: Statistics from about a second earlier, used to derive the state of each worker; ``None`` at
            the start of the run.
        problems: Latest problems of the run.
        latencies: Latencies of the sampled items.

    Returns:
        A JSON object. Stages that were declared after the start of the run are left out.
    """
    earlier = {} if before is None else {stage.name: stage for stage in before.stages}
    cause = now.cause
    return {
        "elapsed": round(now.elapsed, 2),
        "state": now.state,
        "window": round(now.window, 2),
        "cause": cause and {"kind": cause.kind, "stage": ids.stages.get(cause.stage or ""), "why": cause.why},
        "advice": advice(now),
        "end_rate": _short(end_rate(now)),
        "progress": _progress(progress, now),
        "stages": [
            _stage(ids.stages[stage.name], stage, earlier.get(stage.name))
            for stage in now.stages
            if stage.name in ids.stages
        ],
        "edges": [_edge(ids.edges[edge.name], edge) for edge in now.edges if edge.name in ids.edges],
        "wait_for": [wait for edge in now.edges if edge.name in ids.edges for wait in _waits(ids, edge)],
        "latency": [
            {
                "path": [ids.stages[name] for name in one.path],
                "count": one.count,
                "p50": _short(one.p50),
                "p99": _short(one.p99),
            }
            for one in latencies
        ],
        "failures": [
            {
                "elapsed": round(problem.elapsed, 2),
                "stage": ids.stages.get(problem.stage),
                "text": problem.text,
            }
            for problem in problems
        ],
        "decisions": [_decision(ids, one) for one in now.decisions],
    }


def _decision(ids: ElementIds, decision: ScalingDecision) -> Json:
    numbers = f"{decision.workers_before} → {decision.workers} workers"
    return {
        "elapsed": round(decision.elapsed, 2),
        "stage": ids.stages[decision.stage],
        "text": "; ".join(filter(None, [f"{numbers}: {decision.reason}", decision.outcome])),
    }


def _progress(progress: Progress, now: RunStats) -> Json:
    """Return the progress of that end of the graph which has the largest fraction of its items left."""
    shown = progress.bars(now)
    known = [bar for bar in shown if bar.total is not None]
    if not known:
        return {"done": sum(bar.done for bar in shown), "total": None, "eta": None}
    last = min(known, key=lambda bar: bar.done / max(bar.total or 0, 1))
    return {"done": last.done, "total": last.total, "eta": None if last.left is None else _short(last.left)}


def _stage(id: str, stage: StageStats, before: StageStats | None) -> Json:
    return {
        "id": id,
        "state": stage.state,
        "rate": _short(stage.rate),
        "busy": _short(stage.busy),
        "input": _short(stage.waiting_input),
        "place": _short(max(0.0, stage.waiting_output - stage.waiting_turn)),
        "turn": _short(stage.waiting_turn),
        "items_in": stage.items_in,
        "items_out": stage.items_out,
        "failed": stage.failed + stage.members_failed,
        "retried": stage.retried,
        "restarts": stage.restarts,
        "cores": None if stage.cores is None else _short(stage.cores),
        "workers": [*_workers(stage, before)],
    }


def _workers(stage: StageStats, before: StageStats | None) -> Iterator[Json]:
    """Yield, for each live worker, the activity that took most of its time since ``before``."""
    earlier = {} if before is None else {worker.number: worker.seconds for worker in before.per_worker}
    for worker in stage.per_worker:
        if worker.working:
            yield {"number": worker.number, "state": _activity(worker, earlier.get(worker.number))}
    known = {worker.number for worker in stage.per_worker}
    free = [number for number in range(1, len(known) + stage.starting + 1) if number not in known]
    for number in free[: stage.starting]:
        yield {"number": number, "state": "starting"}


def _activity(worker: WorkerStats, before: WorkSeconds | None) -> str:
    spent = worker.seconds.since(before or WorkSeconds())
    shares = {"busy": spent.work, "input": spent.input, "place": spent.place, "turn": spent.turn}
    return max(shares, key=lambda state: shares[state])


def _edge(id: str, edge: EdgeStats) -> Json:
    return {
        "id": id,
        "inside": edge.inside,
        "capacity": edge.capacity,
        "rate": _short(edge.rate),
        "waiting_readers": edge.waiting_readers,
        "waiting_writers": edge.waiting_writers,
    }


def _waits(ids: ElementIds, edge: EdgeStats) -> Iterator[Json]:
    writer, reader = ids.stages[edge.writer], ids.stages.get(edge.reader or "")
    if reader is None:
        return
    if edge.waiting_readers:
        yield _wait(reader, writer, ids.edges[edge.name], edge.readers_waiting_for)
    if edge.waiting_writers:
        yield _wait(writer, reader, ids.edges[edge.name], edge.writers_waiting_for)


def _wait(waiting: str, other: str, edge: str, seconds: float) -> Json:
    return {"from": waiting, "to": other, "edge": edge, "seconds": _short(seconds)}


MOST_POINTS = 600
"""Maximum number of points in a history. If it is exceeded, every second point is dropped."""
POINT_EVERY_S = 0.9
"""Minimum number of seconds between two points of a history. Dropping points doubles this minimum."""


@dataclass(frozen=True, slots=True)
class _Point:
    """Counters of a run at one moment: each stage's items, busy seconds and seconds of work."""

    elapsed: float
    stages: tuple[tuple[int, float, float], ...]


class RateHistory:
    """Counters of a run at regular intervals, used to compute its rates over time."""

    def __init__(self) -> None:
        self._points: list[_Point] = []
        self._every = POINT_EVERY_S

    def add(self, stats: RunStats, last: bool = False) -> None:
        """Add a point if one is due or if ``last`` is true."""
        points = self._points
        if points and not last and stats.elapsed - points[-1].elapsed < self._every:
            return
        counters = [(items_of(stage), stage.seconds.work, stage.seconds.working) for stage in stats.stages]
        points = [*points, _Point(stats.elapsed, tuple(counters))]
        if len(points) > MOST_POINTS:
            points, self._every = points[1::2], 2 * self._every
        # Replace the whole list, because other threads read it. If two threads add a point at the same time,
        # one point is lost.
        self._points = points

    def series(self, ids: ElementIds) -> Json:
        """Return, over time, the rate at the end of the graph and the rate and busy share of each stage."""
        points, names = self._points, list(ids.stages)
        zeros = tuple((0, 0.0, 0.0) for _ in names)
        rates: list[list[float]] = [[] for _ in names]
        busy: list[list[float]] = [[] for _ in names]
        before = _Point(0.0, zeros)
        for point in points:
            window = max(point.elapsed - before.elapsed, 1e-9)
            # Not strict, because a stage that was declared after the start has counters but no name.
            for rate, share, now, then in zip(rates, busy, point.stages, before.stages, strict=False):
                rate.append(_short(max(0, now[0] - then[0]) / window))
                worked = max(now[2] - then[2], 1e-9)
                share.append(_short(min(1.0, max(0.0, now[1] - then[1]) / worked)))
            before = point
        ends = [series for name, series in zip(names, rates, strict=True) if name in ids.ends]
        return {
            "elapsed": [round(point.elapsed, 2) for point in points],
            "end_rate": [_short(sum(at_once)) for at_once in zip(*ends, strict=True)],
            "stages": {
                ids.stages[name]: {"rate": rate, "busy": share}
                for name, rate, share in zip(names, rates, busy, strict=True)
            },
        }


def _short(number: float) -> float:
    """Return a number with four significant digits, which keeps the JSON text short."""
    return float(f"{number:.4g}")

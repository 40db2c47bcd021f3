"""Test the JSON that the page receives, on hand-made statistics."""

from __future__ import annotations

import dataclasses
import json

from flowchan import Graph, RunStats, StageStats
from flowchan.run.observe.problems import RecentProblems
from flowchan.run.policy.events import ErrorSent, WorkerId
from flowchan.run.policy.stats import Cause, EdgeStats, WorkerStats, WorkSeconds
from flowchan.viz.insight import snapshot as snapshots
from flowchan.viz.insight.snapshot import RateHistory, describe, ids_of, snapshot
from flowchan.viz.live.model import Progress

MARKUP = "<b>work</b>"


def drawn() -> Graph:
    graph = Graph("demo")
    numbers = graph.source(range(100), name="numbers").map(abs, name=MARKUP, workers=3)
    numbers.errors.sink(print, name="failed")
    numbers.sink(print, name="end")
    return graph


def stage(name: str, **values: object) -> StageStats:
    kind = {"numbers": "source", MARKUP: "map"}.get(name, "sink")
    first = StageStats(
        name=name, kind=kind, on="thread", workers=1, alive=1, items_in=0, items_out=0, failed=0, retried=0,
        restarts=0, unwanted=0, in_hand=0, rate=0.0, busy=0.0, waiting_input=0.0, waiting_output=0.0,
    )  # fmt: skip
    return dataclasses.replace(first, **values)  # type: ignore[arg-type]


def edge(name: str, writer: str, reader: str, **values: object) -> EdgeStats:
    first = EdgeStats(name, writer, reader, "threads", 0, 64, 0, 0.0)
    return dataclasses.replace(first, **values)  # type: ignore[arg-type]


def stats(*stages: StageStats, edges: tuple[EdgeStats, ...] = (), **values: object) -> RunStats:
    """Return statistics of the graph, in which all stages that are not given are idle."""
    given = {one.name: one for one in stages}
    every = tuple(given.pop(name, None) or stage(name) for name in ("numbers", MARKUP, "failed", "end"))
    first = RunStats("demo", "running", 10.0, (*every, *given.values()), edges, None, window=5.0)
    return dataclasses.replace(first, **values)  # type: ignore[arg-type]


def shown(now: RunStats, before: RunStats | None = None) -> snapshots.Json:
    """Return a snapshot in the form that the browser receives."""
    graph = drawn()
    text = json.dumps(snapshot(Progress(graph), ids_of(graph), now, before), allow_nan=False)
    return json.loads(text)  # type: ignore[no-any-return]


def test_graph_description_has_ids_names_and_source_locations() -> None:
    described = describe(drawn())
    assert [stage["id"] for stage in described["stages"]] == ["s0", "s1", "s2", "s3"]
    assert described["stages"][1]["name"] == MARKUP
    assert described["stages"][1]["where"].startswith("tests/insight/test_page_snapshot.py:")
    assert {(edge["writer"], edge["reader"]) for edge in described["edges"]} == {
        ("s0", "s1"),
        ("s1", "s2"),
        ("s1", "s3"),
    }


def test_end_rate_sums_all_ends_but_excludes_failed_items() -> None:
    edges = tuple(
        dataclasses.replace(edge(e.name, e.writer, e.reader or ""), errors=e.errors) for e in drawn().edges
    )
    now = stats(stage("end", rate=12.0), stage("failed", rate=3.0), stage("numbers", rate=20.0), edges=edges)
    assert shown(now)["end_rate"] == 12.0


def test_snapshot_separates_shares_of_place_and_turn() -> None:
    work = shown(stats(stage(MARKUP, busy=0.5, waiting_output=0.4, waiting_turn=0.1)))["stages"][1]
    assert (work["busy"], work["place"], work["turn"]) == (0.5, 0.3, 0.1)


def test_snapshot_counts_failed_batch_members_as_failed_items() -> None:
    found = shown(stats(stage(MARKUP, failed=2, members_failed=3)))
    assert found["stages"][1]["failed"] == 5


def worker(number: int, working: float, **waits: float) -> WorkerStats:
    return WorkerStats(number, True, WorkSeconds(working, **waits))


def test_worker_state_is_its_main_activity_since_the_last_snapshot() -> None:
    before = (worker(1, 5.0, input=4.0), worker(2, 5.0), worker(3, 5.0), worker(4, 5.0, input=1.0))
    now = (
        worker(1, 6.0, input=4.1),
        worker(2, 6.0, input=0.9),
        worker(3, 6.0, place=0.6, input=0.2),
        worker(4, 6.0, turn=0.7, input=1.0),
    )
    found = shown(stats(stage(MARKUP, per_worker=now)), stats(stage(MARKUP, per_worker=before)))
    states = [worker["state"] for worker in found["stages"][1]["workers"]]
    assert states == ["busy", "input", "place", "turn"]


def test_worker_that_has_not_begun_is_shown_as_starting() -> None:
    found = shown(stats(stage(MARKUP, per_worker=(worker(2, 1.0),), starting=2, alive=3)))
    assert found["stages"][1]["workers"] == [
        {"number": 2, "state": "busy"},
        {"number": 1, "state": "starting"},
        {"number": 3, "state": "starting"},
    ]


def test_snapshot_omits_worker_that_has_ended() -> None:
    ended = WorkerStats(1, False, WorkSeconds(1.0))
    assert shown(stats(stage(MARKUP, per_worker=(ended,))))["stages"][1]["workers"] == []


def test_wait_for_edges_point_to_the_stage_waited_for() -> None:
    graph = drawn()
    first, second = (next(e for e in graph.edges if e.reader == name) for name in (MARKUP, "end"))
    edges = (
        edge(first.name, "numbers", MARKUP, waiting_writers=1, writers_waiting_for=2.5),
        edge(second.name, MARKUP, "end", waiting_readers=1, readers_waiting_for=1.5),
    )
    ids = ids_of(graph).edges
    assert shown(stats(edges=edges))["wait_for"] == [
        {"from": "s0", "to": "s1", "edge": ids[first.name], "seconds": 2.5},
        {"from": "s3", "to": "s1", "edge": ids[second.name], "seconds": 1.5},
    ]


def test_cause_identifies_stage_by_id() -> None:
    cause = Cause("bottleneck", MARKUP, "its workers are busy")
    assert shown(stats(cause=cause))["cause"] == {
        "kind": "bottleneck",
        "stage": "s1",
        "why": "its workers are busy",
    }
    assert shown(stats(cause=Cause("gil", None, "threads")))["cause"]["stage"] is None
    assert shown(stats())["cause"] is None


def test_remaining_time_is_estimated_from_latest_snapshots() -> None:
    graph = drawn()
    progress = Progress(graph)

    def shown_at(elapsed: float, items: int) -> object:
        edges = tuple(edge(e.name, e.writer, e.reader or "", passed=items, put=items) for e in graph.edges)
        stages = [
            stage(name, items_in=items, items_out=items) for name in ("numbers", MARKUP, "failed", "end")
        ]
        now = stats(*stages, edges=edges, elapsed=elapsed)
        return snapshot(progress, ids_of(graph), now, None)["progress"]

    assert shown_at(10.0, 20) == {"done": 20, "total": 100, "eta": None}
    assert shown_at(20.0, 60) == {"done": 60, "total": 100, "eta": 10.0}


def test_snapshot_omits_stage_declared_after_start() -> None:
    graph = drawn()
    ids = ids_of(graph)
    graph.source([1], name="later").sink(print, name="last")
    now = stats(stage("later"), stage("last"), edges=(edge("later", "later", "last"),))
    found = snapshot(Progress(graph), ids, now, None)
    assert [stage["id"] for stage in found["stages"]] == ["s0", "s1", "s2", "s3"]
    assert (found["edges"], found["wait_for"]) == ([], [])


def test_recent_problems_keep_only_the_latest_fifty() -> None:
    problems = RecentProblems()
    for number in range(60):
        problems.record(ErrorSent(WorkerId(MARKUP, 1), f"item {number}"))
    graph = drawn()
    found = snapshot(Progress(graph), ids_of(graph), stats(), None, problems.latest())["failures"]
    assert [found[0]["text"], found[-1]["text"], len(found)] == ["item 10", "item 59", 50]
    assert found[0]["stage"] == "s1"


def counted(elapsed: float, items: int, work: float) -> RunStats:
    seconds = WorkSeconds(working=elapsed, input=elapsed - work)
    stages = [
        stage(name, items_in=items, items_out=items, seconds=seconds)
        for name in ("numbers", MARKUP, "failed", "end")
    ]
    return stats(*stages, elapsed=elapsed)


def test_history_contains_rate_for_each_interval() -> None:
    history, ids = RateHistory(), ids_of(drawn())
    for elapsed, items, work in ((1.0, 10, 0.5), (1.5, 12, 0.6), (2.0, 40, 1.5)):
        history.add(counted(elapsed, items, work))
    series = history.series(ids)
    assert series["elapsed"] == [1.0, 2.0]
    assert series["end_rate"] == [10.0, 30.0]
    assert series["stages"]["s1"] == {"rate": [10.0, 30.0], "busy": [0.5, 1.0]}


def test_history_keeps_last_point_of_short_run() -> None:
    history = RateHistory()
    history.add(counted(0.2, 4, 0.1))
    history.add(counted(0.4, 8, 0.1), last=True)
    assert history.series(ids_of(drawn()))["end_rate"] == [20.0, 20.0]


def test_long_history_drops_every_second_point() -> None:
    history, ids = RateHistory(), ids_of(drawn())
    for second in range(1, 3 * snapshots.MOST_POINTS):
        history.add(counted(float(second), 2 * second, second / 2))
    series = history.series(ids)
    assert len(series["elapsed"]) <= snapshots.MOST_POINTS
    assert set(series["end_rate"]) == {2.0}
    assert series["elapsed"][-1] >= 3 * snapshots.MOST_POINTS - 5

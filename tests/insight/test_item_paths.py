"""Test the paths of sampled items through a graph, and the latencies along them."""

from __future__ import annotations

from collections.abc import Sequence

from flowchan import Graph
from flowchan.run.observe import item_paths
from flowchan.run.observe.item_paths import COMPLETE_AFTER_NS, ItemPaths
from flowchan.run.observe.latency import PathLatencies, PathLatency
from flowchan.run.policy.events import ItemSpan, ItemSpans, ItemTraced, WorkerId
from flowchan.run.policy.plan import Plan, plan
from flowchan.run.worker.item_recorder import first_mark, source_of

MARK = first_mark(0, 1, 0)
SECOND = 1_000_000_000


def chain() -> Plan:
    graph = Graph()
    graph.source([1]).map(str, name="show").sink(print, name="end")
    return plan(graph, 0, 1000)


def spans(stage: str, *own: ItemSpan) -> ItemSpans:
    return ItemSpans(WorkerId(stage, 1), own)


def path_of(plan: Plan, reports: Sequence[ItemSpans]) -> list[ItemTraced]:
    completed: list[ItemTraced] = []
    paths = ItemPaths(plan, completed.append)
    early = [item for report in reports for item in paths.add(report, 0)]
    assert early == []
    paths.end()
    return completed


def test_item_path_lists_all_stages_in_time_order() -> None:
    reports = [
        spans("end", ((MARK,), 3 * SECOND, 4 * SECOND)),  # the worker of the last stage reports first
        spans("source", ((MARK,), 0, 0)),
        spans("show", ((MARK,), 1 * SECOND, 2 * SECOND)),
    ]
    (item,) = path_of(chain(), reports)
    assert item.spans == (("source", 1, 0, 0), ("show", 1, 1, 2), ("end", 1, 3, 4))
    assert (item.source, item.number, item.path, item.latency) == (
        "source",
        MARK,
        ("source", "show", "end"),
        4,
    )


def test_item_path_follows_graph_if_host_clock_is_behind() -> None:
    graph = Graph()
    graph.source([1]).map(str, name="here").map(len, name="there").sink(print, name="end")
    reports = [
        spans("source", ((MARK,), 10, 10)),
        spans("here", ((MARK,), 20, 30)),
        spans("there", ((MARK,), 5, 15)),  # in fact 40 to 50
        spans("end", ((MARK,), 60, 70)),
    ]
    (item,) = path_of(plan(graph, 0, 1000), reports)
    assert item.path == ("source", "here", "there", "end")


def test_item_path_includes_host_with_clock_ahead() -> None:
    reports = [
        spans("source", ((MARK,), 10, 10)),
        spans("show", ((MARK,), 80, 90)),  # in fact 20 to 30
        spans("end", ((MARK,), 60, 70)),
    ]
    (item,) = path_of(chain(), reports)
    assert item.path == ("source", "show", "end")


def test_item_with_a_missing_span_is_left_out() -> None:
    reports = [spans("source", ((MARK,), 0, 0)), spans("end", ((MARK,), 3 * SECOND, 4 * SECOND))]
    assert path_of(chain(), reports) == []


def test_item_is_complete_shortly_after_it_reaches_an_end() -> None:
    completed: list[ItemTraced] = []
    paths = ItemPaths(chain(), completed.append)
    paths.add(spans("source", ((MARK,), 0, 0)), 0)
    paths.add(spans("show", ((MARK,), 0, 1)), 0)
    assert paths.add(spans("end", ((MARK,), 1, 2)), 10) == []
    assert paths.add(spans("source", ((MARK + 1,), 0, 0)), 10 + COMPLETE_AFTER_NS - 1) == []
    (item,) = paths.add(spans("source", ((MARK + 2,), 0, 0)), 10 + COMPLETE_AFTER_NS)
    assert item.number == MARK
    paths.end()
    assert completed == []


def test_batch_at_an_end_completes_all_of_its_items() -> None:
    marks = (MARK, MARK + 1)
    reports = [
        spans("source", ((MARK,), 0, 0), ((MARK + 1,), 1, 1)),
        spans("show", (marks, 1, 2)),
        spans("end", (marks, 2, 3)),
    ]
    assert [item.number for item in path_of(chain(), reports)] == [*marks]


def test_item_that_reaches_two_ends_has_path_to_each() -> None:
    graph = Graph()
    one, two = graph.source([1]).tee(2)
    one.map(str, name="one").sink(print, name="end one")
    two.map(str, name="two").sink(print, name="end two")
    reports = [
        spans(stage, ((MARK,), at, at + 1))
        for at, stage in enumerate(["source", "tee", "one", "two", "end one", "end two"])
    ]
    assert [item.path for item in path_of(plan(graph, 0, 1000), reports)] == [
        ("source", "tee", "one", "end one"),
        ("source", "tee", "two", "end two"),
    ]


def test_item_without_report_from_its_source_is_omitted() -> None:
    assert path_of(chain(), [spans("end", ((MARK,), 2, 3))]) == []


def test_number_of_tracked_items_is_bounded() -> None:
    paths = ItemPaths(chain(), print)
    for number in range(2 * item_paths.MOST_ITEMS):
        paths.add(spans("source", ((MARK + number,), 0, 0)), 0)
    assert len(paths._items) == item_paths.MOST_ITEMS


def test_number_of_spans_per_item_is_bounded() -> None:
    paths = ItemPaths(chain(), print)
    for at in range(2 * item_paths.MOST_SPANS):
        paths.add(spans("show", ((MARK,), at, at + 1)), 0)
    assert len(paths._items[MARK].spans) == item_paths.MOST_SPANS


def test_mark_identifies_its_source() -> None:
    marks = {
        first_mark(stage, worker, starts) for stage in (0, 7) for worker in (1, 999) for starts in (0, 50)
    }
    assert len(marks) == 8
    assert {source_of(mark) for mark in marks} == {0, 7}


def traced(latency: float, at: float = 100.0, end: str = "end") -> ItemTraced:
    return ItemTraced("source", 0, (("source", 1, at - latency, at - latency), (end, 1, at, at)))


def test_latencies_include_median_and_p99_for_each_path() -> None:
    latencies = PathLatencies()
    for milliseconds in range(1, 101):
        latencies.add(traced(milliseconds / 1000))
    latencies.add(traced(5.0, end="other"))
    path, other = latencies.paths(100.0)
    assert (path.path, path.count) == (("source", "end"), 100)
    assert (round(path.p50, 6), round(path.p99, 6)) == (0.05, 0.099)
    assert other == PathLatency(("source", "other"), 1, 5.0, 5.0)


def test_latencies_exclude_items_older_than_the_window() -> None:
    latencies = PathLatencies(window=10)
    latencies.add(traced(1.0, at=100.0))
    latencies.add(traced(3.0, at=105.0))
    assert [(path.count, path.p50) for path in latencies.paths(112.0)] == [(1, 3.0)]
    assert latencies.paths(120.0) == ()

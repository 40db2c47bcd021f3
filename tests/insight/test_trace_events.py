"""Test the events of a trace when the clocks of hosts are corrected and workers change hosts."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from trace_files import Event, check_trace, names_of

from flowchan.run.observe.trace_events import TraceEvents
from flowchan.run.policy.events import ItemTraced

MS = 1_000_000


def parsed(lines: Iterable[str]) -> list[Event]:
    events = [json.loads(line) for line in lines]
    check_trace(events)
    return events


def item_events(*spans: tuple[str, int, int]) -> list[Event]:
    """Return the events of one item that passes through these spans.

    Each span is (stage, begin, end), with times in ms. Before that, stage "b" has processed another item,
    from 50 to 60 ms.
    """
    events = TraceEvents("g", ("a", "b", "c"), 0)
    lines = [*events.begin(), *events.items("b", 1, (7,), 50 * MS, 60 * MS)]
    for stage, begin, end in spans:
        lines += events.items(stage, 1, (8,), begin * MS, end * MS)
    path = tuple((stage, 1, begin * MS / 1e9, end * MS / 1e9) for stage, begin, end in spans)
    lines += events.flow(ItemTraced("a", 8, path))
    return parsed(lines)


def arrow(events: list[Event]) -> list[tuple[str, str, float]]:
    """Return the kind, the stage and the time in ms of each step of the arrow."""
    processes, _ = names_of(events)
    steps = [event for event in events if event["ph"] in "stf"]
    return [(step["ph"], processes[step["pid"]], step["ts"] / 1000) for step in steps]


def test_arrow_meets_span_that_clock_correction_has_moved() -> None:
    """After the correction, the span of "b" would overlap its worker's previous span."""
    assert arrow(item_events(("a", 30, 31), ("b", 40, 70), ("c", 80, 81))) == [
        ("s", "a", 30),
        ("t", "b", 60),
        ("f", "c", 80),
    ]


def test_arrow_skips_span_that_begins_before_previous_span() -> None:
    assert arrow(item_events(("a", 100, 101), ("b", 70, 105), ("c", 110, 111))) == [
        ("s", "a", 100),
        ("f", "c", 110),
    ]


def test_arrow_with_a_single_span_is_not_drawn() -> None:
    assert arrow(item_events(("a", 100, 101), ("b", 70, 90))) == []


@pytest.mark.parametrize("seconds", [1, 10**7])
def test_arrow_meets_its_spans_after_long_uptime(seconds: int) -> None:
    start = seconds * 1_000_000_000 + 123_456_789
    events = TraceEvents("g", ("a", "b"), start - MS)
    lines = [*events.begin(), *events.items("a", 1, (8,), start + 1, start + 1)]
    lines += events.items("b", 1, (8,), start + 5003, start + 9007)
    path = (("a", 1, (start + 1) / 1e9, (start + 1) / 1e9), ("b", 1, (start + 5003) / 1e9, 0.0))
    assert len(arrow(parsed([*lines, *events.flow(ItemTraced("a", 8, path))]))) == 2


def test_restarted_worker_has_a_track_for_each_host() -> None:
    events = TraceEvents("g", ("a",), 0)
    lines = [*events.begin()]
    for place, host in enumerate(["", "one", "two", "one"]):
        events.started("a", 1, host)
        lines += events.span("a", 1, "busy", place * MS, (place + 1) * MS)
    found = parsed(lines)
    _, threads = names_of(found)
    assert [threads[event["tid"]] for event in found if event["ph"] == "X"] == [
        "worker 1",
        "worker 1 on one",
        "worker 1 on two",
        "worker 1 on one",
    ]

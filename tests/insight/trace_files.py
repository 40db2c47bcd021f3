"""Read trace files, and check that they follow Chrome's trace-event format."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]

REQUIRED = {
    "M": {"name", "args"},
    "X": {"name", "ts", "dur"},
    "i": {"name", "ts", "s"},
    "C": {"name", "ts", "args"},
    "s": {"name", "ts", "id", "cat"},
    "t": {"name", "ts", "id", "cat", "bp"},
    "f": {"name", "ts", "id", "cat", "bp"},
}
"""Fields of each kind of event, except for the process and the thread."""


def read_trace(path: Path) -> list[Event]:
    """Return the events of a trace file."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(data)
    assert isinstance(events, list)
    return events


def names_of(events: list[Event]) -> tuple[dict[int, str], dict[int, str]]:
    """Return the names of the processes (the stages) and of the threads."""
    processes = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    threads = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    return processes, threads


def spans_of(events: list[Event]) -> dict[int, list[Event]]:
    """Return the spans of each thread in order."""
    spans = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["tid"]].append(event)
    return {tid: sorted(own, key=lambda event: event["ts"]) for tid, own in spans.items()}


def seconds_of(events: list[Event], stage: str) -> dict[str, float]:
    """Return the total seconds of a stage's worker spans, by span name."""
    processes, _ = names_of(events)
    seconds: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X" and processes[event["pid"]] == stage and not event["name"].startswith("item"):
            seconds[event["name"]] += event["dur"] / 1e6
    return seconds


def check_trace(events: list[Event]) -> None:
    """Check the fields and names of trace events, that no spans overlap, and that each flow has a span."""
    processes, threads = names_of(events)
    for event in events:
        assert REQUIRED[event["ph"]] <= event.keys() - {"pid", "tid"}, event
        assert event["pid"] in processes
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    spans = spans_of(events)
    assert spans.keys() <= threads.keys()
    for own in spans.values():
        for earlier, later in itertools.pairwise(own):
            assert later["ts"] >= earlier["ts"] + earlier["dur"] - 0.0011, (earlier, later)
    flows: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
            assert any(
                one["ts"] - 1e-3 <= event["ts"] <= one["ts"] + one["dur"] + 1e-3
                for one in spans[event["tid"]]
            )
    for steps in flows.values():
        assert steps[0]["ph"] == "s"
        assert steps[-1]["ph"] == "f"
        assert all(step["ph"] == "t" for step in steps[1:-1])
        assert [step["ts"] for step in steps] == sorted(step["ts"] for step in steps)

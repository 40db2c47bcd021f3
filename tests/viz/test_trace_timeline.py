"""Test the timeline that is drawn from a trace file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from flowchan import Graph
from flowchan.cli.commands import main
from flowchan.run.observe.trace_events import LABELS
from flowchan.viz import timeline
from flowchan.viz.trace_timeline import COLOURS, WIDTH

SVG = "{http://www.w3.org/2000/svg}"


def named(pid: int, tid: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}


def span(pid: int, tid: int, name: str, ms: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": 1000 * ms, "dur": 1000 * length}


TRACE = [
    named(1, 0, "process_name", name="run of <shop>"),
    named(2, 0, "process_name", name="numbers"),
    named(3, 0, "process_name", name="decode"),
    named(3, 12, "thread_name", name="worker 2"),
    named(3, 12, "thread_sort_index", sort_index=4),
    named(3, 11, "thread_name", name="worker 1"),
    named(3, 11, "thread_sort_index", sort_index=2),
    named(3, 13, "thread_name", name="worker 1: sampled items"),
    named(2, 10, "thread_name", name="worker 1"),
    span(3, 12, "starting", 10, 10),
    span(3, 12, "busy", 20, 25),
    span(3, 12, "waits for its turn", 45, 5),
    span(3, 13, "item 7", 20, 25),
    span(3, 11, "busy", 10, 50),
    span(3, 11, "waits for input", 60, 50),
    span(2, 10, "waits for room", 10, 100),
    {"ph": "i", "s": "t", "pid": 3, "tid": 12, "name": "died", "ts": 50_000, "args": {"text": "SIGKILL"}},
    {"ph": "i", "s": "t", "pid": 3, "tid": 11, "name": "retry", "ts": 60_000, "args": {}},
    {"ph": "C", "pid": 1, "tid": 1, "name": "numbers: items inside", "ts": 0, "args": {"value": 3}},
]


def written(path: Path, events: list[dict[str, Any]]) -> Path:
    """Write events in the format of a trace file, one per line."""
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    return path


def drawn(path: Path) -> ElementTree.Element:
    return ElementTree.fromstring(timeline(path))


def words(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.findall(SVG + "text")]


def boxes(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [box for box in root.findall(SVG + "rect") if box.find(SVG + "title") is not None]


def test_timeline_rows_follow_graph_order(tmp_path: Path) -> None:
    found = words(drawn(written(tmp_path / "out.json", TRACE)))
    rows = [word for word in found if ", worker" in word]
    assert rows == ["numbers, worker 1", "decode, worker 1", "decode, worker 2"]
    assert found[:2] == ["run of <shop>", "100 ms, 3 workers"]
    assert [word for word in found if word.endswith("% busy")] == ["0% busy", "50% busy", "25% busy"]


def test_timeline_boxes_show_worker_activity(tmp_path: Path) -> None:
    found = boxes(drawn(written(tmp_path / "out.json", TRACE)))
    titles = [box.findtext(SVG + "title") for box in found]
    assert titles == [
        "waits for room: 100 ms, beginning at 0 ms",
        "busy: 50 ms, beginning at 0 ms",
        "waits for input: 50 ms, beginning at 50 ms",
        "starting: 10 ms, beginning at 0 ms",
        "busy: 25 ms, beginning at 10 ms",
        "waits for its turn: 5 ms, beginning at 35 ms",
    ]
    assert {box.attrib["fill"] for box in found} == set(COLOURS.values())
    assert float(found[1].attrib["width"]) == pytest.approx(WIDTH / 2)


def test_timeline_has_a_colour_for_every_activity() -> None:
    assert set(LABELS.values()) | {"starting"} == set(COLOURS)


def test_timeline_of_a_real_run_shows_its_workers(tmp_path: Path) -> None:
    graph = Graph("traced")
    graph.source(range(50)).map(abs, workers=2, name="work").sink(abs, name="end")
    graph.run(trace=tmp_path / "out.json")
    found = words(drawn(tmp_path / "out.json"))
    assert found[0] == "run of traced"
    rows = [word for word in found if ", worker" in word]
    assert {"source, worker 1", "work, worker 1", "work, worker 2", "end, worker 1"} <= set(rows)


def test_timeline_marks_worker_death_with_its_reason(tmp_path: Path) -> None:
    root = drawn(written(tmp_path / "out.json", TRACE))
    titles = [line.findtext(SVG + "title") for line in root.findall(SVG + "line")]
    assert [title for title in titles if title] == ["died SIGKILL"]
    assert "red line: death" in words(root)


def test_legend_explains_only_states_that_are_drawn(tmp_path: Path) -> None:
    root = drawn(written(tmp_path / "out.json", [span(2, 10, "busy", 0, 5)]))
    assert [word for word in words(root) if word in COLOURS] == ["busy"]


def test_timeline_accepts_trace_of_killed_program(tmp_path: Path) -> None:
    path = written(tmp_path / "out.json", TRACE)
    text = path.read_text()
    path.write_text(text[: text.index('"name": "retry"')])
    assert len(boxes(drawn(path))) == 6


def test_timeline_accepts_compressed_trace(tmp_path: Path) -> None:
    path = tmp_path / "out.json.gz"
    path.write_bytes(gzip.compress(json.dumps(TRACE).encode()))
    assert len(boxes(drawn(path))) == 6


def test_timeline_accepts_incomplete_compressed_trace(tmp_path: Path) -> None:
    text = written(tmp_path / "whole.json", TRACE * 50).read_bytes()
    (tmp_path / "out.json.gz").write_bytes(gzip.compress(text)[:-8])
    assert len(boxes(drawn(tmp_path / "out.json.gz"))) == 300


def test_timeline_accepts_json_object_with_trace_events(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(json.dumps({"traceEvents": TRACE}))
    assert len(boxes(drawn(path))) == 6


def test_timeline_merges_short_events_into_one_box_per_pixel(tmp_path: Path) -> None:
    names = ("busy", "waits for input")
    events = [span(2, 10, names[number % 2], number, 0.9 - 0.5 * (number % 2)) for number in range(50_000)]
    found = boxes(drawn(written(tmp_path / "out.json", events)))
    assert 1 <= len(found) <= 2 * WIDTH
    assert {box.attrib["fill"] for box in found} == {COLOURS["busy"]}


def test_timeline_of_long_run_is_labelled_in_seconds(tmp_path: Path) -> None:
    found = words(drawn(written(tmp_path / "out.json", [span(2, 10, "busy", 0, 90_000)])))
    assert "time in s" in found
    assert "90.0 s, 1 worker" in found


@pytest.mark.parametrize("text", ["", "no JSON", "3", "[1]", "{}"])
def test_timeline_refuses_file_without_events(text: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"timeline: .*out\.json' must be a trace in JSON: "):
        timeline(path)


def test_timeline_refuses_damaged_compressed_trace(tmp_path: Path) -> None:
    path = tmp_path / "out.json.gz"
    path.write_bytes(b"no gzip")
    with pytest.raises(ValueError, match="must be a trace in JSON"):
        timeline(path)


def test_timeline_refuses_trace_without_worker_events(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be the trace of a run, but it has no worker events"):
        timeline(written(tmp_path / "out.json", TRACE[:3]))


def test_command_writes_timeline(tmp_path: Path) -> None:
    trace, picture = written(tmp_path / "out.json", TRACE), tmp_path / "run.svg"
    result = CliRunner().invoke(main, ["viz", "--timeline", str(trace), "-o", str(picture)])
    assert (result.exit_code, result.output) == (0, f"{picture}\n")
    assert picture.read_text() == timeline(trace)


def test_command_refuses_a_missing_trace_and_other_formats(tmp_path: Path) -> None:
    picture = tmp_path / "run.svg"
    result = CliRunner().invoke(main, ["viz", "--timeline", str(tmp_path / "none.json"), "-o", str(picture)])
    assert result.exit_code == 2
    assert "can't read" in result.output
    other = CliRunner().invoke(main, ["viz", "--timeline", "out.json", "-o", "run.png"])
    assert other.exit_code == 2
    assert "must end in one of .svg" in other.output

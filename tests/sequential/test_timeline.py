"""Test timelines as pictures and as traces. These tests use neither a model nor torch."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from flowchan.pipelines.sequential.engine.schedule import plan
from flowchan.pipelines.sequential.simulate import simulate
from flowchan.pipelines.sequential.timeline import Timeline, TimelineEvent

NOW = 31_415.926  # a realistic value of time.monotonic()
SVG = "{http://www.w3.org/2000/svg}"


def real(steps: int = 1) -> Timeline:
    """Return a timeline of ``steps`` batches with four micro-batches, on two workers with recomputation."""
    events = []
    for step in range(steps):
        for worker in range(2):
            when = NOW + 0.05 * step + 0.003 * worker
            for chunk in range(4):
                for op, took in (("F", 0.0031), ("recompute", 0.0029), ("B", 0.0042)):
                    events.append(TimelineEvent(worker, worker, op, step, chunk, when, when := when + took))  # type: ignore[arg-type]
            events.append(TimelineEvent(worker, None, "update", step, None, when, when + 0.001))
    return Timeline(events[::-1], "digits <1f1b> & more")


LINES = {
    "gpipe": simulate(plan("gpipe", 4, 4, 8)).timeline("gpipe"),
    "1f1b": simulate(plan("1f1b", 7, 7, 64)).timeline("1f1b"),
    "interleaved": simulate(plan("interleaved", 4, 12, 8)).timeline("interleaved"),
    "one box": simulate(plan("gpipe", 1, 1, 1)).timeline("a long title " * 30),
    "real": real(),
    "several steps": real(30),
    "short steps": Timeline(simulate(plan("gpipe", 2, 2, 2), 1e-6, 2e-6).timeline().events, "nanoseconds"),
    "long": simulate(plan("1f1b", 2, 2, 2000), 1000, 2000).timeline("hours"),
    "no time": Timeline([TimelineEvent(0, 0, "F", 0, 0, NOW, NOW)], "no time"),
    "empty": Timeline([], "empty"),
}

lines = pytest.mark.parametrize("line", LINES.values(), ids=LINES)


# --- saving ---


@pytest.mark.parametrize("name", ["run.png", "run", "run.svg.gz", ".svg", "run.SVG"])
def test_save_with_another_suffix_raises_and_writes_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^save: path must end in \.svg or \.json, got '.*{name}'$"):
        real().save(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [str, Path])
def test_save_chooses_the_format_by_suffix(tmp_path: Path, kind: Any) -> None:
    line = real()
    assert line.save(kind(tmp_path / "run.svg")).read_text(encoding="utf-8") == line.svg()
    assert line.save(kind(tmp_path / "run.json")).read_text(encoding="utf-8") == line.trace()


# --- numbers ---


def test_events_are_sorted_by_start() -> None:
    assert all(one.begin <= other.begin for one, other in pairwise(real(3).events))


def test_busy_is_a_fraction_of_the_total_time() -> None:
    line = Timeline(
        [
            TimelineEvent(1, 0, "F", 0, 0, 10.0, 11.0),
            TimelineEvent(0, 1, "B", 0, 0, 11.5, 14.0),
            TimelineEvent(1, 0, "B", 0, 0, 13.0, 13.5),
        ]
    )
    assert line.seconds == 4
    assert line.busy() == {0: 0.625, 1: 0.375}
    assert line.parts() == {0: [1], 1: [0]}


def test_empty_timeline_takes_no_time() -> None:
    assert (Timeline([]).seconds, Timeline([]).busy()) == (0, {})


def test_str_of_an_event_describes_it() -> None:
    assert str(TimelineEvent(0, 1, "F", 2, 3, 0, 1)) == "F3 of part 1, step 2"
    assert str(TimelineEvent(0, 1, "recompute", 2, 3, 0, 1)) == "recompute 3 of part 1, step 2"
    assert str(TimelineEvent(0, None, "update", 2, None, 0, 1)) == "update, step 2"


# --- trace ---


@lines
def test_trace_has_all_events_without_overlap(line: Timeline) -> None:
    found = json.loads(line.trace())
    complete = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert found["displayTimeUnit"] == "ms"
    assert len(complete) == len(line.events)
    for event, one in zip(line.events, complete, strict=True):
        assert (one["tid"], one["cat"]) == (event.worker, event.op)
        assert one["args"] == {"part": event.part, "chunk": event.chunk, "step": event.step}
        assert one["ts"] == pytest.approx((event.begin - line.events[0].begin) * 1e6, abs=1e-3)
        assert one["dur"] == pytest.approx((event.end - event.begin) * 1e6, abs=1.1e-3)
    for worker in line.busy():
        actual = [event for event in complete if event["tid"] == worker]
        # compared in whole nanoseconds, as in Perfetto
        assert all(
            round(1000 * (one["ts"] + one["dur"])) <= round(1000 * other["ts"])
            for one, other in pairwise(actual)
        )


def test_trace_names_run_workers_and_parts() -> None:
    found = json.loads(LINES["interleaved"].trace())["traceEvents"]
    named = [(event["name"], event["tid"], event["args"]) for event in found if event["ph"] == "M"]
    assert named[:3] == [
        ("process_name", 0, {"name": "interleaved"}),
        ("thread_name", 0, {"name": "worker 0 (parts 0, 4, 8)"}),
        ("thread_sort_index", 0, {"sort_index": 0}),
    ]
    assert [tid for name, tid, _ in named if name == "thread_name"] == [0, 1, 2, 3]
    assert [event["name"] for event in found if event["ph"] == "X" and event["tid"] == 0][:2] == [
        "F 0",
        "F 1",
    ]


# --- picture ---


def elements(line: Timeline, tag: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(line.svg()).findall(SVG + tag)


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.attrib[name])


def words(line: Timeline) -> list[str]:
    return [element.text or "" for element in elements(line, "text")]


def area(element: ElementTree.Element) -> tuple[float, float, float, float]:
    """Return the left, top, right and bottom of a text, assuming a wide font."""
    size = number(element, "font-size")
    wide = 0.6 * size * len(element.text or "")
    left = number(element, "x") - wide * {"start": 0, "middle": 0.5, "end": 1}[element.attrib["text-anchor"]]
    return left, number(element, "y") - 0.75 * size, left + wide, number(element, "y") + 0.22 * size


@lines
def test_labels_in_the_timeline_svg_do_not_overlap(line: Timeline) -> None:
    root = ElementTree.fromstring(line.svg())
    texts = [(element.text, area(element)) for element in root.findall(SVG + "text")]
    for text, (left, top, right, bottom) in texts:
        assert left >= 0, text
        assert top >= 0, text
        assert right <= number(root, "width"), text
        assert bottom <= number(root, "height"), text
    texts.sort(key=lambda one: one[1][1])
    for (one, (left, top, right, bottom)), (other, (left2, top2, right2, bottom2)) in combinations(
        texts[:400], 2
    ):
        separate = right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top
        assert separate, f"{one!r} and {other!r}"


@lines
def test_every_event_is_a_box_with_details(line: Timeline) -> None:
    boxes = [box for box in elements(line, "rect") if box.find(SVG + "title") is not None]
    assert len(boxes) == len(line.events)
    width = number(ElementTree.fromstring(line.svg()), "width")
    assert all(number(box, "x") >= 0 and number(box, "x") + number(box, "width") <= width for box in boxes)
    titles = {title.text for box in boxes if (title := box.find(SVG + "title")) is not None}
    assert len(titles) == len({(str(event), event.begin) for event in line.events})


def test_boxes_are_placed_by_time() -> None:
    """Widths are proportional to durations, each worker has a row, and the first event is at the left."""
    boxes = [box for box in elements(LINES["gpipe"], "rect") if box.find(SVG + "title") is not None]
    assert len({box.attrib["y"] for box in boxes}) == 4
    widths = [number(box, "width") for box in boxes]
    assert max(widths) == pytest.approx(2 * min(widths), abs=0.05)
    assert number(boxes[0], "x") == min(number(box, "x") for box in boxes)
    assert boxes[0].findtext(SVG + "title") == "F0 of part 0, step 0: 1 ms, beginning at 0 ms"


def test_timeline_svg_shows_title_time_workers_and_busy_fractions() -> None:
    found = words(LINES["gpipe"])
    assert found[:4] == ["gpipe", "33 ms, workers idle 27% of the time", "forward (F)", "backward (B)"]
    assert found.count("73% busy") == 4
    assert [word for word in found if word.startswith(("worker", "part"))] == [
        word for worker in range(4) for word in (f"worker {worker}", f"part {worker}")
    ]
    assert found.count("7") == 2 * 4  # micro-batch 7, once forward and once backward in each part
    axis = found[4 : found.index("time in ms")]
    assert axis == ["0", "5", "10", "15", "20", "25", "30"]


def test_picture_distinguishes_operations_and_parts_by_colour() -> None:
    assert {"forward (F)", "backward (B)", "forward again", "update"} <= set(words(real()))
    assert "lighter: a worker's later parts" not in words(real())
    assert "lighter: a worker's later parts" in words(LINES["interleaved"])
    boxes = [box for box in elements(LINES["interleaved"], "rect") if box.find(SVG + "title") is not None]
    assert len({box.attrib["fill"] for box in boxes}) == 2 * 3


def test_picture_marks_steps_if_there_are_several() -> None:
    assert {"step 0", "step 29"} <= set(words(real(30)))
    assert "step 0" not in words(real(1))


def test_narrow_box_has_no_number() -> None:
    found = words(LINES["long"])
    assert "1999" not in found
    assert float(ElementTree.fromstring(LINES["long"].svg()).attrib["width"]) < 17_000


def test_empty_picture_says_that_nothing_ran() -> None:
    assert "0 ms: nothing ran" in words(LINES["empty"])


def test_title_is_escaped() -> None:
    assert "digits <1f1b> & more" in words(real())
    assert "<1f1b>" not in real().svg()

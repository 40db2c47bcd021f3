"""Test where ``record`` inserts its stage, and that loops and services stay in their positions."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from flowchan import Channel, Graph, In, Out
from flowchan.check.rules import check
from flowchan.declare.blueprint import Blueprint


def turn(back: In[int], fresh: In[int], out: Out[int], done: Out[int]) -> None: ...


def pass_on(items: In[int], out: Out[int]) -> None: ...


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "items.rec"


def ways(graph: Blueprint) -> list[tuple[str, str | None, int]]:
    """Return the writer, reader and capacity of each channel, in order."""
    return [(edge.writer, edge.reader, edge.capacity) for edge in graph.edges]


def line_of_caller() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_record_inserts_its_stage_behind_the_writer(path: Path) -> None:
    graph = Graph("recorded")
    numbers = graph.source(range(3), name="numbers", capacity=5)
    declared = line_of_caller() - 1
    numbers.map(abs, name="work", capacity=7).map(str, name="text").sink(print, name="sink")
    graph.record("numbers", path)
    assert [stage.name for stage in graph.stages] == ["numbers", "record", "work", "text", "sink"]
    assert ways(graph) == [
        ("numbers", "record", 5), ("record", "work", 5), ("work", "text", 7), ("text", "sink", 64),
    ]  # fmt: skip
    assert graph.stage_named("record").where.line == declared
    assert check(graph) == ()


def test_record_may_be_inserted_behind_each_stage(path: Path) -> None:
    graph = Graph("recorded")
    graph.source(range(3), name="numbers").map(abs, name="work").sink(print, name="sink")
    graph.record("work", path)
    graph.record("numbers", path.with_name("other.rec"))
    assert [stage.name for stage in graph.stages] == ["numbers", "record-2", "work", "record", "sink"]
    assert [one[:2] for one in ways(graph)] == [
        ("numbers", "record-2"), ("record-2", "work"), ("work", "record"), ("record", "sink"),
    ]  # fmt: skip


def two_loops() -> Graph:
    graph = Graph("loops")
    first, second = graph.feedback("first"), graph.feedback("second")
    out, done = graph.stage(turn, first, graph.source([1], name="a"), name="one")
    first.feed(out.map(abs, name="step"))
    out, again = graph.stage(turn, second, done, name="two")
    second.feed(again.map(abs, name="leap"))
    out.sink(print, name="sink")
    return graph


def test_record_in_a_loop_keeps_all_loops_closed(path: Path) -> None:
    graph = two_loops()
    graph.record("step", path)
    assert check(graph) == ()
    back = [(edge.writer, edge.reader) for edge in graph.edges if edge.feedback]
    assert back == [("record", "one"), ("leap", "two")]


def test_recorded_feedback_is_read_behind_the_record(path: Path) -> None:
    graph = Graph("loops")
    back, other = graph.feedback("back"), graph.feedback("other")
    for feedback, name in ((back, "a"), (other, "b")):
        stream = graph.source(range(3), name=name)
        stream.sink(print, name=f"end of {name}")
        feedback.feed(stream)
    graph.record("a", path)
    for feedback, name in ((back, "reader of a"), (other, "reader of b")):
        graph.stage(pass_on, feedback, name=name).sink(print)
    assert [str(graph.stage_named(f"reader of {name}").inputs[0]) for name in "ab"] == ["record.out", "b.out"]


def test_feedbacks_declared_next_to_foreign_streams_differ() -> None:
    other = Graph("other")
    graph = Graph("loops")
    backs = [graph.feedback("a"), graph.feedback("b")]
    graph.stage(pass_on, other.source(range(3), name="foreign"), name="wrong").sink(print)
    backs.append(graph.feedback("c"))
    for feedback in backs:
        graph.stage(pass_on, feedback, name=f"reader of {feedback.name}").sink(print)
    for feedback in backs:
        feedback.feed(graph.source(range(3), name=f"source of {feedback.name}"))
    found = [graph.stage_named(f"reader of {name}").inputs[0].stage for name in "abc"]
    assert found == ["source of a", "source of b", "source of c"]
    assert [problem.stage for problem in check(graph)] == ["wrong"]


def test_only_the_last_stage_becomes_a_service() -> None:
    graph = Graph("served")
    graph.source(range(3), name="numbers").map(abs, name="work").sink(print, name="sink")
    requests = graph.input("requests")
    requests.map(abs, name="serve").sink(print, name="service")
    inbox: Channel[Any] = Channel(across="processes")
    ended: Channel[None] = Channel(across="processes")
    graph._serve(inbox, ended, inbox.close)
    assert [stage.name for stage in graph.stages if stage.service] == ["service"]
    assert [stage.name for stage in graph.stages] == [
        "numbers", "work", "sink", "requests", "serve", "service",
    ]  # fmt: skip
    assert graph.stage_named("service").max_deaths >= 10**9
    assert graph.stage_named("work").max_deaths == 3

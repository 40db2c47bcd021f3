"""Test declared feedbacks, the only edges that may form a loop in a graph, and their rules."""

from __future__ import annotations

import itertools

import pytest
from support.graph_samples import only, pass_on, rules, to_text

from flowchan import Feedback, In, Out
from flowchan.check.rules import check
from flowchan.declare.blueprint import Blueprint
from flowchan.declare.stream import Stream


def steer(fresh: In[int], again: In[int], work: Out[int], done: Out[int]) -> None: ...


def turn(again: In[int], work: Out[int]) -> None: ...


def step(item: int) -> int:
    return item


def looped(graph: Blueprint) -> tuple[Feedback, Stream]:
    """Return a feedback stream without a writer, and the stream to feed into it."""
    again = graph.feedback("again")
    work, done = graph.stage(steer, graph.source(range(3)), again)
    done.sink(print)
    return again, work.map(step)


def test_loop_that_is_closed_by_a_feedback_has_no_problem(graph: Blueprint) -> None:
    again, work = looped(graph)
    again.feed(work)
    assert check(graph) == ()


def test_reader_of_a_feedback_reads_the_stream_that_feeds_it(graph: Blueprint) -> None:
    again, work = looped(graph)
    before = graph.stage_named("steer")
    again.feed(work)
    after = graph.stage_named("steer")
    assert before.inputs[1] == again._origin
    assert after.inputs == (before.inputs[0], work._origin)
    assert before.feedback == after.feedback == {"again"}


def test_only_the_edge_that_leads_back_is_marked_feedback(graph: Blueprint) -> None:
    again, work = looped(graph)
    assert not any(edge.feedback for edge in graph.edges)
    again.feed(work)
    assert [(edge.writer, edge.reader) for edge in graph.edges if edge.feedback] == [("step", "steer")]


def test_a_feedback_may_be_fed_before_it_is_read(graph: Blueprint) -> None:
    again = graph.feedback()
    again.feed(graph.source(range(3), name="late"))
    work, done = graph.stage(steer, graph.source(range(3)), again)
    graph.merge(work, done).sink(print)
    assert check(graph) == ()
    assert graph.stage_named("steer").inputs[1].stage == "late"


def test_graph_may_have_several_loops(graph: Blueprint) -> None:
    backs = [graph.feedback(f"back{number}") for number in range(3)]
    stream = graph.source(range(3))
    for back in backs:
        stream, answer = graph.stage(steer, stream, back)
        back.feed(answer.map(step))
    stream.sink(print)
    assert check(graph) == ()


def test_a_stage_that_reads_only_feedback_begins_the_graph(graph: Blueprint) -> None:
    again = graph.feedback()
    again.feed(graph.stage(turn, again).map(step))
    assert check(graph) == ()
    assert graph.stage_named("turn").begins


def test_loop_without_feedback_next_to_a_feedback_is_a_cycle(graph: Blueprint) -> None:
    again, work = looped(graph)
    again.feed(work)
    graph.merge(Stream(graph, "b", "out", "b"), name="a").map(step, name="b")
    assert "cycle" in rules(graph)
    assert not any("steer" in problem.message for problem in check(graph))


def test_the_message_of_a_cycle_names_the_remedy(graph: Blueprint) -> None:
    graph.source(range(3)).sink(print)
    graph.merge(Stream(graph, "b", "out", "b"), name="a").map(step, name="b")
    assert "graph.feedback()" in next(problem.message for problem in check(graph) if problem.rule == "cycle")


def test_feedback_without_writer_is_reported_at_its_line(graph: Blueprint) -> None:
    again, work = looped(graph)
    work.sink(print)
    problem = only(graph)
    assert (problem.rule, problem.stage) == ("loop", "steer")
    assert problem.where == graph._loops[again._origin].where
    assert problem.where.file == __file__
    assert problem.message == "nothing feeds 'again'; close the loop with .feed(stream)"


def test_feedback_without_writer_and_reader_is_reported(graph: Blueprint) -> None:
    graph.source(range(3)).sink(print)
    graph.feedback()
    assert [(problem.rule, problem.stage) for problem in check(graph)] == [("loop", "")]


def test_feedback_without_reader_is_reported_as_unread_output(graph: Blueprint) -> None:
    graph.feedback().feed(graph.source(range(3)))
    assert rules(graph) == ["unread"]


@pytest.mark.parametrize("operator", ["map", "merge", "batch", "zip", "collect"])
def test_feedback_read_by_another_operator_is_reported(graph: Blueprint, operator: str) -> None:
    again = graph.feedback()
    source = graph.source(range(3))
    readers = {
        "map": lambda: again.map(step, name="reader"),
        "merge": lambda: graph.merge(source, again, name="reader"),
        "batch": lambda: again.batch(3, name="reader"),
        "zip": lambda: source.zip(again, name="reader"),
        "collect": lambda: again.collect(name="reader"),
    }
    read = readers[operator]()
    again.feed(read)
    problems = [problem for problem in check(graph) if problem.rule == "loop"]
    assert [(problem.stage, problem.where.file) for problem in problems] == [("reader", __file__)]
    assert f"{operator} reads a feedback stream" in problems[0].message


def test_type_of_items_fed_back_is_checked_against_the_port(graph: Blueprint) -> None:
    again = graph.feedback()
    work, done = graph.stage(steer, graph.source(range(3)), again)
    again.feed(work.map(to_text))
    done.sink(print)
    assert (only(graph).rule, only(graph).stage) == ("type", "steer")


def test_feeding_a_stream_from_another_graph_is_reported(graph: Blueprint) -> None:
    again, work = looped(graph)
    work.sink(print)
    again.feed(Blueprint("other").source(range(3)))
    assert rules(graph) == ["foreign"]


def test_a_stream_that_is_fed_and_read_has_two_readers(graph: Blueprint) -> None:
    again, work = looped(graph)
    again.feed(work)
    work.sink(print)
    assert rules(graph) == ["read-twice"]


def test_feeding_twice_raises_at_once(graph: Blueprint) -> None:
    again, work = looped(graph)
    again.feed(work)
    with pytest.raises(ValueError, match=r"again.* is already fed by .*step"):
        again.feed(work)


def test_feed_accepts_only_a_stream_of_a_stage(graph: Blueprint) -> None:
    with pytest.raises(TypeError, match="feed: argument 1 must be a stream"):
        graph.feedback().feed([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be the output of a stage"):
        graph.feedback().feed(graph.feedback())
    with pytest.raises(TypeError, match="feedback: name must be a string"):
        graph.feedback(7)  # type: ignore[arg-type]


def test_feedback_cannot_be_buffered_and_has_no_errors(graph: Blueprint) -> None:
    again = graph.feedback("again")
    with pytest.raises(ValueError, match=r"'again'.* is a feedback stream, which no stage writes to"):
        again.buffer(3)
    with pytest.raises(ValueError, match=r"'again'.* is a feedback stream, which no stage writes to"):
        _ = again.errors


def test_feedbacks_with_equal_names_differ(graph: Blueprint) -> None:
    first, second = graph.feedback(), graph.feedback()
    assert first != second
    assert len({first, second, graph.feedback("again")}) == 3
    assert repr(first) == "<Stream 'feedback' in graph 'test'>"


def test_surplus_streams_of_a_stage_with_feedback_are_reported(graph: Blueprint) -> None:
    source, again = graph.source(range(3)), graph.feedback()
    again.feed(graph.stage(pass_on, source, again, limit=1))
    assert rules(graph) == ["ports"]


def test_a_thousand_loops_are_checked(graph: Blueprint) -> None:
    stream = graph.source(range(3))
    for _, back in zip(range(300), map(graph.feedback, itertools.repeat("back")), strict=False):
        stream, answer = graph.stage(steer, stream, back)
        back.feed(answer)
    stream.sink(print)
    assert check(graph) == ()

"""Test results that the run collects while the program does not read them."""

from __future__ import annotations

import itertools

import pytest
from support.waiting import wait_until

from flowchan import Graph, Stream

pytestmark = pytest.mark.usefixtures("checks")


def service() -> tuple[Graph, Stream, Stream]:
    """Return a graph with an input for the program, the input's stream and the stream of answers."""
    graph = Graph("service")
    questions = graph.input()
    return graph, questions, questions.map(str).collect()


def test_program_may_put_more_than_the_channels_hold_before_reading() -> None:
    """While the program is blocked in its put, the run starts to collect the unread result."""
    graph, questions, answers = service()
    with graph.start() as run:
        for number in range(1000):
            run[questions].put(number)
    assert run.wait()[answers] == [str(number) for number in range(1000)]


def test_run_collects_a_full_result_before_the_program_reads_it() -> None:
    graph = Graph("collected")
    numbers = graph.source(range(500)).collect()
    run = graph.start()
    wait_until(lambda: run.stats().state == "done")
    assert run.wait()[numbers] == list(range(500))


def test_run_stops_collecting_a_result_when_the_program_reads_it() -> None:
    graph = Graph("endless")
    numbers = graph.source(itertools.count).collect()
    with graph.start() as run:
        wait_until(lambda: run.stats().edges[0].passed > 1000)
        items = run.iter(numbers)
        assert next(items) == 0
        most = run.stats().edges[0].passed + 1  # one more item may be in transit
        wait_until(lambda: run.stats().edges[0].inside == run.stats().edges[0].capacity)
        assert list(itertools.islice(items, most + 100)) == list(range(1, most + 101))
        assert run.stats().edges[0].passed <= most + 101
        items.close()


def test_collected_result_can_still_be_iterated() -> None:
    graph, questions, answers = service()
    with graph.start() as run:
        for number in range(500):
            run[questions].put(number)
        items = run.iter(answers)
        assert [next(items) for _ in range(400)] == [str(number) for number in range(400)]
        run[questions].put(500)
        run[questions].close()
        assert list(items) == [str(number) for number in range(400, 501)]
    assert answers not in run.wait()


def test_iteration_over_one_branch_works_while_another_is_unread() -> None:
    graph = Graph("branches")
    left, right = (branch.collect() for branch in graph.source(range(500)).tee(2))
    with graph.start() as run:
        assert list(run.iter(left)) == list(range(500))
    assert run.wait()[right] == list(range(500))


def test_ending_the_iteration_of_a_collected_result_stops_earlier_stages() -> None:
    graph, questions, answers = service()
    with graph.start() as run:
        for number in range(500):
            run[questions].put(number)
        for _ in run.iter(answers):
            break
    assert run.stats().state in ("done", "stopped")

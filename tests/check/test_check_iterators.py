"""Test sources that read from an iterator, although an iterator works only once.

An exhausted iterator must raise an error, or the source would seem to be empty.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowchan import Channel, Graph, GraphError


def numbers() -> Iterator[int]:
    yield from (1, 2, 3)


def spent(graph: Graph) -> str:
    """Run the graph again, and return the message of the reported problem."""
    with pytest.raises(GraphError, match="pass a callable") as caught:
        graph.run()
    (problem,) = caught.value.problems
    assert problem.rule == "spent"
    return problem.message


@pytest.mark.parametrize("items", [numbers(), iter([1, 2, 3]), map(int, "123"), csv.reader(["1"])])
def test_second_run_with_the_same_iterator_raises(items: Any) -> None:
    graph = Graph("spent")
    result = graph.source(items).collect()
    assert graph.check() == ()
    assert graph.run()[result]
    assert type(items).__name__ in spent(graph)


def test_second_run_with_the_same_open_file_raises(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("a\nb\nc\n")
    with (tmp_path / "lines").open() as file:
        graph = Graph("spent")
        first = graph.source(file).take(1).collect()
        assert graph.run()[first] == ["a\n"]
        assert "was read by an earlier run" in spent(graph)


def test_exhausted_generator_is_reported_before_the_first_run() -> None:
    items = numbers()
    list(items)
    graph = Graph("spent")
    graph.source(items).collect()
    (problem,) = graph.check()
    assert problem.rule == "spent"
    assert "is already at its end" in spent(graph)


def test_graph_runs_again_if_a_process_gets_a_copied_iterator() -> None:
    graph = Graph("spent")
    result = graph.source(iter([1, 2, 3]), on="process").collect()
    assert graph.run()[result] == graph.run()[result] == [1, 2, 3]


def test_graph_runs_again_if_its_iterable_makes_new_iterators() -> None:
    graph = Graph("spent")
    results = [graph.source(items).collect() for items in ([1], range(1, 2), {1: 1}, lambda: iter([1]))]
    for _ in range(2):
        found = graph.run()
        assert [found[result] for result in results] == [[1]] * 4


def test_drained_channel_as_source_is_reported() -> None:
    channel: Channel[int] = Channel(8)
    channel.put_many([1, 2])
    channel.close()
    graph = Graph("spent")
    result = graph.source(channel).collect()
    assert graph.run()[result] == [1, 2]
    assert graph.check() == ()


def test_source_declared_after_a_run_works_in_the_next_run() -> None:
    graph = Graph("spent")
    graph.source([1]).sink(id)
    graph.run()
    later = graph.source(numbers()).collect()
    assert graph.run()[later] == [1, 2, 3]

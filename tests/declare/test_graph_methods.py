"""Test the declarations of a graph's methods: sources, merged streams, broadcast values and records."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowchan import Graph


def numbers(upto: int = 3) -> Iterator[int]:
    yield from range(upto)


async def later() -> AsyncIterator[int]:
    yield 1


class Indexed:
    """A sequence that uses the old protocol, with ``__getitem__`` but no ``__iter__``."""

    def __getitem__(self, index: int) -> int:
        if index > 2:
            raise IndexError
        return index


class CallableList(list[int]):
    def __call__(self, upto: int) -> list[int]:
        return list(range(upto))


@pytest.mark.parametrize("items", [[1, 2], range(3), "ab", Indexed(), {1: 2}, iter([1]), CallableList()])
def test_source_keeps_an_iterable(items: Any) -> None:
    graph = Graph("sources")
    graph.source(items, name="items")
    stage = graph.stage_named("items")
    assert (stage.function, stage.options["iterable"], stage.gpus, stage.workers) == (None, items, 0, 1)


def test_source_keeps_a_callable_and_its_arguments() -> None:
    graph = Graph("sources")
    for name, call, args, kwargs in (
        ("plain", numbers, (), {}), ("async", later, (), {}), ("positional", numbers, (2,), {}),
        ("keyword", numbers, (), {"upto": 2}), ("callable list", CallableList(), (2,), {}),
    ):  # fmt: skip
        graph.source(call, *args, name=name, **kwargs)
        stage = graph.stage_named(name)
        assert (stage.function, stage.args, dict(stage.kwargs), dict(stage.options)) == (
            call,
            args,
            kwargs,
            {},
        )


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (3, "items must be an iterable or a callable that returns one, got 3"),
        (None, "items must be an iterable or a callable that returns one, got None"),
        (later(), "pass the async generator function and its arguments"),
    ],
    ids=["int", "None", "async generator"],
)
def test_source_refuses_items_without_an_iterator(items: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^source: .*{message}"):
        Graph("sources").source(items)


def test_source_refuses_arguments_for_an_iterable() -> None:
    with pytest.raises(TypeError, match="items must be a callable if arguments are passed, got"):
        Graph("sources").source([1], 2)  # type: ignore[arg-type]


def made_lists(_: int) -> list[int]:
    return []


def made_texts(_: int) -> str:
    return ""


def test_merged_stream_has_the_type_that_all_streams_have() -> None:
    graph = Graph("merged")
    source = graph.source(numbers)
    lists = [source.map(made_lists) for _ in range(2)]
    texts = source.map(made_texts)
    assert graph.merge(source).item is int
    assert graph.merge(*lists).item == list[int]
    assert graph.merge(*lists, texts).item is None
    assert graph.merge(texts, *lists).item is None
    assert graph.merge(texts, graph.input()).item is None


def test_broadcast_values_of_a_graph_are_numbered() -> None:
    graph = Graph("told")
    values = [graph.broadcast(name) for name in "abc"]
    assert list(map(repr, values)) == [f"<Broadcast {number} of graph 'told'>" for number in (1, 2, 3)]
    assert [value.get() for value in values] == ["a", "b", "c"]
    assert [values[1].set(item) for item in ("x", "y", "z")] == [1, 2, 3]
    assert [value.read() for value in values] == [("a", 0), ("z", 3), ("c", 0)]


@pytest.mark.parametrize("channel", ["routed to 1", "before 1", "unread", "missing"])
def test_record_refuses_a_channel_of_one_worker(channel: str, tmp_path: Path) -> None:
    graph = Graph("recorded")
    graph.source(numbers, name="numbers").map(abs, key=abs, workers=2, name="routed").sink(print)
    graph.source(numbers, name="others").map(abs, workers=2, name="before").allreduce(name="sum").collect()
    graph.source(numbers, name="unread")
    with pytest.raises(ValueError, match="channel must be one of 'numbers', 'routed', 'others', 'sum' "):
        graph.record(channel, tmp_path / "items.rec")
    assert "record" not in {stage.kind for stage in graph.stages}
    graph.record("sum", tmp_path / "items.rec")
    assert ("record", "collect") in {(edge.writer, edge.reader) for edge in graph.edges}

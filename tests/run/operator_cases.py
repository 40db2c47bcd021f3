"""Define functions and streams for the tests of the operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flowchan import Graph, Stream


def same(item: Any) -> Any:
    return item


def is_even(item: int) -> bool:
    return item % 2 == 0


def words(line: str) -> Iterator[str]:
    yield from line.split()


def repeated(item: int) -> list[int]:
    return [item] * (item % 4)


def fail_odd(item: int) -> int:
    if item % 2:
        raise ValueError(item)
    return item


def collected(stream: Stream) -> Any:
    """Run the stream's graph and return the items of the stream."""
    result = stream.collect()
    return stream.graph.run()[result]


def numbers(upto: int, **options: Any) -> Stream:
    return Graph("operators").source(range(upto), **options)

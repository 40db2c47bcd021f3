"""Test that operators reject wrong arguments at once, and that the errors name the allowed values."""

from __future__ import annotations

from typing import Any

import pytest

from flowchan import In, Out
from flowchan.declare.blueprint import Blueprint
from flowchan.declare.stream import Stream


def split(items: In[int], even: Out[int], odd: Out[str], limit: int = 3) -> None: ...


@pytest.fixture
def stream(graph: Blueprint) -> Stream:
    return graph.source(range(3), name="start")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: s.map(int, workers=0), ValueError, "map: workers must be at least 1, got 0"),
        (
            lambda s: s.map(int, workers=True),
            TypeError,
            "map: workers must be an int of at least 1, got True (bool)",
        ),
        (
            lambda s: s.map(int, workers=1.5),
            TypeError,
            "map: workers must be an int of at least 1, got 1.5 (float)",
        ),
        (
            lambda s: s.map(int, on="gpu"),
            ValueError,
            'map: on must be "thread", "process", "hosts" or a pool from flowchan.hosts, got \'gpu\' (str)',
        ),
        (
            lambda s: s.map(int, on=None),
            TypeError,
            'map: on must be "thread", "process", "hosts" or a pool from flowchan.hosts, got None (NoneType)',
        ),
        (
            lambda s: s.map(int, on=[]),
            TypeError,
            'map: on must be "thread", "process", "hosts" or a pool from flowchan.hosts, got [] (list)',
        ),
        (lambda s: s.map(int, capacity=0), ValueError, "map: capacity must be at least 1, got 0"),
        (
            lambda s: s.map(int, capacity="9"),
            TypeError,
            "map: capacity must be an int of at least 1, got '9' (str)",
        ),
        (lambda s: s.map(int, retries=-1), ValueError, "map: retries must be at least 0, got -1"),
        (
            lambda s: s.map(int, rate=0),
            ValueError,
            "map: rate must be greater than 0 and finite, or None for no limit, got 0",
        ),
        (
            lambda s: s.sink(int, rate=float("inf")),
            ValueError,
            "sink: rate must be greater than 0 and finite, or None for no limit, got inf",
        ),
        (
            lambda s: s.filter(int, rate="20"),
            TypeError,
            "filter: rate must be a number of items per second or None, got '20' (str)",
        ),
        (
            lambda s: s.map(int, rate=True),
            TypeError,
            "map: rate must be a number of items per second or None, got True (bool)",
        ),
        (
            lambda s: s.map(int, rate=20, on="hosts"),
            ValueError,
            "map: rate=20 requires on='thread' or on='process', because hosts do not share a clock; set "
            "rate= on a stage of this machine instead",
        ),
        (lambda s: s.map(int, ordered=1), TypeError, "map: ordered must be True or False, got 1 (int)"),
        (lambda s: s.map(int, name=""), ValueError, "map: name must not be empty"),
        (lambda s: s.map(int, name=3), TypeError, "map: name must be a string, got 3 (int)"),
        (lambda s: s.map(3), TypeError, "map: function must be a function or a callable class, got 3 (int)"),
        (
            lambda s: s.partition(3, 2),
            TypeError,
            "partition: key must be a function or a callable class, got 3 (int)",
        ),
        (lambda s: s.partition(hash, 0), ValueError, "partition: n must be at least 1, got 0"),
        (lambda s: s.batch(0), ValueError, "batch: size must be at least 1, got 0"),
        (lambda s: s.batch(2, timeout=-1), ValueError, "batch: timeout must be greater than 0 seconds"),
        (
            lambda s: s.batch(2, timeout=float("nan")),
            ValueError,
            "batch: timeout must be greater than 0 seconds",
        ),
        (lambda s: s.batch(2, timeout="1"), TypeError, "batch: timeout must be a number of seconds or None"),
        (lambda s: s.take(-1), ValueError, "take: n must be at least 0, got -1"),
        (lambda s: s.tee(0), ValueError, "tee: n must be at least 1, got 0"),
        (lambda s: s.buffer(0), ValueError, "buffer: capacity must be at least 1, got 0"),
        (
            lambda s: s.zip([1]),
            TypeError,
            "zip: argument 2 must be a stream, got [1] (list); write zip(*streams)",
        ),
        (lambda s: s.graph.merge(), TypeError, "merge: streams must contain at least one stream, got none"),
        (lambda s: s.graph.merge([s]), TypeError, "merge: argument 1 must be a stream, got [<Stream 'start'"),
        (lambda s: s.graph.stage(split, 3), TypeError, "stage: argument 1 must be a stream, got 3 (int)"),
        (
            lambda s: s.graph.source(3),
            TypeError,
            "source: items must be an iterable or a callable that returns one",
        ),
        (
            lambda s: s.graph.source([1], 2),
            TypeError,
            "source: items must be a callable if arguments are passed, got [1]",
        ),
        (lambda s: s.graph.input(capacity=0), ValueError, "input: capacity must be at least 1, got 0"),
        (lambda s: Blueprint(""), ValueError, "Graph: name must not be empty"),
    ],
)
def test_wrong_argument_raises_at_once(stream: Stream, call: Any, error: Any, message: str) -> None:
    with pytest.raises(error) as raised:
        call(stream)
    assert message in str(raised.value)
    assert len(stream.graph.stages) == 1


def test_argument_with_failing_repr_is_rejected_clearly(stream: Stream) -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(
        TypeError, match="take: n must be an int of at least 0, got <Silent whose repr raises RuntimeError>"
    ):
        stream.take(Silent())  # type: ignore[arg-type]

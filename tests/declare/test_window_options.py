"""Test which options windows, joins and keyed stages accept and record."""

from __future__ import annotations

import math
from typing import Any

import pytest

from flowchan import Graph
from flowchan.declare.stream import Stream


def own(stream: Stream[Any]) -> dict[str, Any]:
    """Return the options that are specific to this stream's operator."""
    return dict(stream.graph.stage_named(stream.stage).options)


def numbers() -> Stream[float]:
    return Graph("windows").source([1.0])


BY_COUNT = {"seconds": None, "key": None, "time": None, "allowed_lateness": 0.0}


@pytest.mark.parametrize(
    ("options", "every"), [({}, 3), ({"every": 1}, 1), ({"every": 2}, 2), ({"every": 3}, 3)]
)
def test_window_of_items_slides_by_its_size_or_less(options: dict[str, Any], every: int) -> None:
    assert own(numbers().window(3, **options)) == {"size": 3, "every": every, **BY_COUNT}


@pytest.mark.parametrize(
    ("options", "every"), [({}, 2.5), ({"every": 0.5}, 0.5), ({"every": 2.5}, 2.5), ({"every": 1}, 1.0)]
)
def test_window_of_seconds_slides_by_its_length_or_less(options: dict[str, Any], every: float) -> None:
    found = own(numbers().window(seconds=2.5, key=abs, time=float, allowed_lateness=7, **options))
    assert found == {
        "size": None, "seconds": 2.5, "every": every, "key": abs, "time": float, "allowed_lateness": 7.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"size": 3, "every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"size": 3, "every": 4}, ValueError, "every must be at most the length of a window, got 4"),
        ({"size": 3, "every": 0.5}, TypeError, "every must be an int of at least 1, got 0.5"),
        ({"seconds": 2, "every": 0}, ValueError, "every must be greater than 0 seconds, got 0"),
        ({"seconds": 2, "every": 2.1}, ValueError, "every must be at most the length of a window, got 2.1"),
        ({"seconds": 0}, ValueError, "seconds must be greater than 0 seconds, got 0"),
        ({"size": 3, "allowed_lateness": 1}, TypeError, "time and allowed_lateness require seconds="),
        ({"size": 3, "seconds": 2}, TypeError, "either size .* or seconds must be passed, got both"),
        ({}, TypeError, "either size .* or seconds must be passed, got neither"),
        ({"seconds": 2, "time": 3}, TypeError, "time must be a function"),
    ],
)
def test_window_option_that_loses_items_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^window: {message}"):
        numbers().window(**options)


def test_group_by_is_a_window_as_long_as_the_stream() -> None:
    found = own(numbers().group_by(abs))
    assert found == {"size": math.inf, "seconds": None, "every": math.inf, "key": abs}


def join(**options: Any) -> dict[str, Any]:
    left = numbers()
    return own(left.join(left.graph.source([2.0], name="right"), within=1.5, **options))


def test_join_uses_one_key_for_both_streams_by_default() -> None:
    assert join(key=abs) == {
        "within": 1.5, "key": abs, "other_key": abs, "time": None, "other_time": None,
        "allowed_lateness": 0.0,
    }  # fmt: skip
    assert join(key=abs, other_key=int, time=float, other_time=round, allowed_lateness=2) == {
        "within": 1.5, "key": abs, "other_key": int, "time": float, "other_time": round,
        "allowed_lateness": 2.0,
    }  # fmt: skip
    found = join(key=abs, time=float)
    assert (found["time"], found["other_time"]) == (float, float)


@pytest.mark.parametrize("name", ["other_key", "other_time", "time"])
def test_join_refuses_a_key_without_a_call(name: str) -> None:
    with pytest.raises(TypeError, match=f"^join: {name} must be a function"):
        join(key=abs, **{"time": float, name: 3})


class Key:
    def __call__(self, item: float) -> float:
        return item


async def key_later(item: float) -> float:
    return item


@pytest.mark.parametrize("key", [Key, key_later], ids=["class", "async"])
def test_key_must_be_a_function_that_is_not_async(key: Any) -> None:
    for declare in (
        lambda: numbers().window(2, key=key),
        lambda: numbers().group_by(key),
        lambda: join(key=key),
        lambda: numbers().map(abs, key=key),
    ):
        with pytest.raises(TypeError, match="key must be a function that is not async"):
            declare()


def test_callable_object_may_be_a_key() -> None:
    key = Key()
    assert own(numbers().map(abs, key=key)) == {"key": key}
    assert own(numbers().group_by(key))["key"] is key


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"workers": 3, "on": "process"}])
def test_keyed_stage_records_its_key_and_state(options: dict[str, Any]) -> None:
    assert own(numbers().map(abs, **options)) == {}
    assert own(numbers().map(abs, key=int, **options)) == {"key": int}
    assert own(numbers().map(max, key=int, state=list, **options)) == {"key": int, "state": list}
    assert own(numbers().map(max, key=int, state=list, concurrency_per_key=1, **options))["state"] is list


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"concurrency_per_key": 1}, TypeError, "concurrency_per_key requires key"),
        ({"state": list}, TypeError, "state requires key"),
        ({"state": list, "concurrency_per_key": 1}, TypeError, "state requires key"),
        ({"key": int, "concurrency_per_key": 0}, ValueError, "concurrency_per_key must be at least 1, got 0"),
        (
            {"key": int, "state": list, "concurrency_per_key": 2, "workers": 3},
            ValueError,
            "concurrency_per_key must be 1 if the stage has state, got 2",
        ),
        ({"key": int, "workers": "auto"}, ValueError, "key requires a fixed number of workers"),
    ],
)
def test_keyed_option_without_a_meaning_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^map: {message}"):
        numbers().map(abs, **options)

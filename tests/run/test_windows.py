"""Test windows by count and by time, groups by key, joins of two streams, and late items."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from time import time as real_time
from typing import Any

import pytest

from flowchan import Failed, Graph, LateItem, RunError, Window

Event = tuple[str, float]


def key_of(event: Event) -> str:
    return event[0]


def time_of(event: Event) -> float:
    return event[1]


def windows_of(items: Any, *args: Any, **options: Any) -> list[Window[Any]]:
    graph = Graph()
    out = graph.source(items).window(*args, **options).collect()
    return graph.run()[out]


def lists_of(items: Any, *args: Any, **options: Any) -> list[list[Any]]:
    return [window.items for window in windows_of(items, *args, **options)]


@pytest.mark.parametrize(
    ("items", "size", "every", "expected"),
    [
        (5, 2, None, [[0, 1], [2, 3], [4]]),
        (4, 2, None, [[0, 1], [2, 3]]),
        (5, 3, 1, [[0, 1, 2], [1, 2, 3], [2, 3, 4]]),
        (6, 3, 2, [[0, 1, 2], [2, 3, 4], [4, 5]]),
        (5, 3, 2, [[0, 1, 2], [2, 3, 4]]),
        (2, 3, 1, [[0, 1]]),
        (0, 3, 1, []),
    ],
)
def test_window_by_count_contains_items_with_its_numbers(
    items: int, size: int, every: int | None, expected: list[list[int]]
) -> None:
    assert lists_of(range(items), size, every=every) == expected


def test_each_key_has_its_own_windows_by_count() -> None:
    windows = windows_of(range(7), 2, key=lambda number: number % 2)
    assert windows == [
        Window(0, 0, 2, [0, 2]), Window(1, 0, 2, [1, 3]), Window(0, 2, 4, [4, 6]), Window(1, 2, 4, [5]),
    ]  # fmt: skip


def test_tumbling_windows_begin_at_multiples_of_their_length() -> None:
    times = [0, 1, 9.5, 10, 35, -1]
    graph = Graph()
    windows = graph.source(times).window(seconds=10, time=float, allowed_lateness=100).collect()
    assert graph.run()[windows] == [
        Window(None, -10, 0, [-1]), Window(None, 0, 10, [0, 1, 9.5]),
        Window(None, 10, 20, [10]), Window(None, 30, 40, [35]),
    ]  # fmt: skip


def test_item_is_in_every_sliding_window_that_covers_its_time() -> None:
    assert windows_of([0, 4, 7, 12], seconds=10, every=5, time=float) == [
        Window(None, -5, 5, [0, 4]), Window(None, 0, 10, [0, 4, 7]), Window(None, 5, 15, [7, 12]),
        Window(None, 10, 20, [12]),
    ]  # fmt: skip


def test_window_is_emitted_when_an_item_passes_its_end() -> None:
    graph = Graph()
    events = graph.input()
    out = events.window(seconds=10, time=float, allowed_lateness=5).collect()
    with graph.start() as run:
        windows = run.iter(out)
        run[events].put_many([1, 12, 14.5, 2, 15])
        assert next(windows) == Window(None, 0, 10, [1, 2])


def test_window_by_arrival_is_emitted_without_another_item() -> None:
    graph = Graph()
    events = graph.input()
    out = events.window(seconds=0.05).collect()
    with graph.start() as run:
        run[events].put("a")
        assert next(run.iter(out)).items == ["a"]


def test_late_item_goes_to_the_errors_stream() -> None:
    graph = Graph()
    windows = graph.source([1, 20, 2, 21]).window(seconds=10, time=float)
    out, late = windows.collect(), windows.errors.collect()
    results = graph.run()
    assert [window.items for window in results[out]] == [[1], [20, 21]]
    (failed,) = results[late]
    assert isinstance(failed, Failed)
    assert failed.item == 2
    assert isinstance(failed.error, LateItem)
    assert "18 s behind the latest item, but allowed_lateness is 0 s" in str(failed.error)


def test_late_item_ends_the_run_without_an_errors_stream() -> None:
    with pytest.raises(RunError) as raised:
        windows_of([1, 20, 2], seconds=10, time=float)
    assert isinstance(raised.value.exceptions[0].__cause__, LateItem)


def test_item_within_the_allowed_lateness_is_in_its_window() -> None:
    assert lists_of([1, 19, 2], seconds=10, time=float, allowed_lateness=10) == [[1, 2], [19]]


def test_late_item_is_in_sliding_windows_still_open() -> None:
    assert windows_of([4, 12, 8], seconds=10, every=5, time=float) == [
        Window(None, -5, 5, [4]), Window(None, 0, 10, [4]), Window(None, 5, 15, [12, 8]),
        Window(None, 10, 20, [12]),
    ]  # fmt: skip


def expected_windows(
    events: list[Event], length: float, every: float
) -> dict[tuple[str, float], list[Event]]:
    found: dict[tuple[str, float], list[Event]] = {}
    for start in range(-40, 240):
        for event in events:
            begin = start * every
            if begin <= event[1] < begin + length:
                found.setdefault((event[0], begin), []).append(event)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_random_windows_by_time_equal_a_plain_computation(seed: int) -> None:
    chance = random.Random(seed)
    length, every = chance.choice([(10, 10), (10, 5), (6, 2), (7, 3)])
    events = [(chance.choice("abc"), time + chance.uniform(0, 8)) for time in range(100)]
    windows = windows_of(events, seconds=length, every=every, key=key_of, time=time_of, allowed_lateness=8)
    assert {(window.key, window.start): window.items for window in windows} == expected_windows(
        events, length, every
    )
    assert [window.end for window in windows] == sorted(window.end for window in windows)


def test_group_by_emits_one_group_per_key_at_the_end() -> None:
    graph = Graph()
    groups = graph.source(range(7)).group_by(lambda number: number % 3).collect()
    found = graph.run()[groups]
    assert [(group.key, group.items) for group in found] == [(0, [0, 3, 6]), (1, [1, 4]), (2, [2, 5])]


def test_item_with_a_failing_key_goes_to_the_errors_stream() -> None:
    graph = Graph()
    groups = graph.source([[1], [], [1, 2]]).group_by(lambda item: item[0])
    out, failed = groups.collect(), groups.errors.collect()
    results = graph.run()
    assert [group.items for group in results[out]] == [[[1], [1, 2]]]
    assert [(one.item, type(one.error)) for one in results[failed]] == [([], IndexError)]


def pairs_of(left: Any, right: Any, **options: Any) -> list[tuple[Event, Event]]:
    graph = Graph()
    one, other = graph.source(left), graph.source(right)
    out = one.join(other, key=key_of, time=time_of, **options).collect()
    return sorted(graph.run()[out])


def test_join_emits_pairs_with_equal_keys_and_near_times() -> None:
    left, right = [("a", 1.0), ("b", 2.0), ("a", 20.0)], [("a", 3.0), ("a", 26.0), ("b", 30.0)]
    assert pairs_of(left, right, within=5) == [(("a", 1.0), ("a", 3.0))]
    assert pairs_of(left, right, within=6) == [(("a", 1.0), ("a", 3.0)), (("a", 20.0), ("a", 26.0))]


@pytest.mark.parametrize("seed", range(20))
def test_random_join_equals_a_plain_computation(seed: int) -> None:
    chance = random.Random(seed)
    left, right = (
        [(chance.choice("abc"), time + chance.uniform(0, 8)) for time in range(0, 100, step)]
        for step in (1, 3)
    )
    expected = [
        (one, other) for one in left for other in right if one[0] == other[0] and abs(one[1] - other[1]) <= 4
    ]
    assert pairs_of(left, right, within=4, allowed_lateness=8) == sorted(expected)


def test_join_of_an_idle_branch_does_not_block_its_source() -> None:
    """All items go to the left input before the first item goes to the right input."""
    graph = Graph()
    one, other = graph.source([("a", float(time)) for time in range(1_000)]).tee(2)
    last = other.filter(lambda event: event[1] == 999)
    out = one.join(last, key=key_of, time=time_of, within=1).collect()
    assert graph.run()[out] == [(("a", 998.0), ("a", 999.0)), (("a", 999.0), ("a", 999.0))]


def test_join_uses_other_functions_for_the_other_stream() -> None:
    graph = Graph()
    orders, payments = graph.source([("a", 1.0)]), graph.source([{"order": "a", "at": 2.0}])
    out = orders.join(
        payments, key=key_of, time=time_of, within=3,
        other_key=lambda payment: payment["order"], other_time=lambda payment: payment["at"],
    ).collect()  # fmt: skip
    assert graph.run()[out] == [(("a", 1.0), {"order": "a", "at": 2.0})]


def test_join_without_times_uses_the_times_of_arrival() -> None:
    graph = Graph()
    out = graph.source("ab").join(graph.source("bc"), key=str, within=60).collect()
    assert graph.run()[out] == [("b", "b")]


def test_late_item_of_a_join_goes_to_the_errors_stream() -> None:
    graph = Graph()
    left, right = graph.input(), graph.input()
    joined = left.join(right, key=key_of, time=time_of, within=5)
    out, late = joined.collect(), joined.errors.collect()
    with graph.start() as run:
        pairs = run.iter(out)
        run[left].put(("a", 100.0))
        run[right].put(("a", 100.0))
        assert next(pairs) == (("a", 100.0), ("a", 100.0))
        run[left].put(("a", 99.0))
        run[left].put(("a", 101.0))
        assert next(pairs) == (("a", 101.0), ("a", 100.0))
    assert [failed.item for failed in run.wait()[late]] == [("a", 99.0)]


def test_join_drops_items_that_can_have_no_more_partners(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowchan.run.worker import window_loops

    most = 0

    class Side(window_loops._Side):  # type: ignore[type-arg]
        def keep(self, key: Any, at: float, item: Any) -> None:
            nonlocal most
            super().keep(key, at, item)
            most = max(most, len(self._times))

    def alternating() -> Iterator[tuple[int, Event]]:
        for time in range(2_000):
            yield 0, ("a", float(time))
            yield 1, ("a", float(time))

    monkeypatch.setattr(window_loops, "_Side", Side)
    graph = Graph()
    left, right = graph.source(alternating).partition(lambda pair: pair[0], 2)
    left, right = left.map(lambda pair: pair[1]), right.map(lambda pair: pair[1])
    joined = left.join(right, key=key_of, time=time_of, within=1).collect()
    assert len(graph.run()[joined]) == 3 * 2_000 - 2
    assert most < 1_000


@pytest.mark.parametrize(
    ("args", "options", "error", "match"),
    [
        ((), {}, TypeError, "either size .* or seconds .*, got neither"),
        ((3,), {"seconds": 3}, TypeError, "got both"),
        ((0,), {}, ValueError, "size must be"),
        ((2,), {"every": 3}, ValueError, "every must be at most the length of a window, got 3"),
        ((), {"seconds": 2, "every": 3}, ValueError, "every must be at most the length of a window, got 3"),
        ((2,), {"time": float}, TypeError, "time and allowed_lateness require seconds="),
        ((), {"seconds": 2, "allowed_lateness": 1}, TypeError, "allowed_lateness requires time"),
        ((), {"seconds": 2, "time": float, "allowed_lateness": -1}, ValueError, "allowed_lateness must be"),
        (
            (),
            {"seconds": 2, "time": float, "allowed_lateness": None},
            TypeError,
            "allowed_lateness must be a number of seconds, got None",
        ),
        ((2,), {"key": 1}, TypeError, "key must be a function"),
        ((2,), {"sice": 1}, TypeError, "did you mean 'size'"),
    ],
)
def test_wrong_window_option_raises_at_the_declaration(
    args: Any, options: Any, error: Any, match: str
) -> None:
    with pytest.raises(error, match=match):
        Graph().source([1]).window(*args, **options)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"key": 1, "within": 1}, TypeError, "key must be a function"),
        ({"key": str, "within": 0}, ValueError, "within must be greater than 0"),
        ({"key": str, "within": 1, "other_time": float}, TypeError, "other_time also requires time="),
        ({"key": str, "within": 1, "allowed_lateness": 1}, TypeError, "allowed_lateness requires time"),
        (
            {"key": str, "within": 1, "time": float, "allowed_lateness": None},
            TypeError,
            "allowed_lateness must be a number of seconds, got None",
        ),
    ],
)
def test_wrong_join_option_raises_at_the_declaration(options: Any, error: Any, match: str) -> None:
    graph = Graph()
    with pytest.raises(error, match=match):
        graph.source([1]).join(graph.source([2]), **options)


@pytest.mark.parametrize("kind", ["window", "join"])
def test_key_that_cannot_be_hashed_raises_with_the_remedy(kind: str) -> None:
    graph = Graph()
    numbers = graph.source([1])
    stream: Any = (
        numbers.window(2, key=lambda number: [number])
        if kind == "window"
        else numbers.join(graph.source([1]), key=lambda number: [number], within=1)
    )
    stream.sink(print)
    with pytest.raises(RunError) as raised:
        graph.run()
    message = f"{kind}: key must return hashable values such as str or tuple, got [1] (list)"
    assert message in str(raised.value.exceptions[0])


# --- a clock that is set back ---

HOUR = 3600


@pytest.fixture
def set_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event; once it is set, the system's clock is one hour behind."""
    happened = threading.Event()
    monkeypatch.setattr("time.time", lambda: real_time() - HOUR * happened.is_set())
    return happened


def test_windows_still_end_after_the_clock_is_set_back(set_back: threading.Event) -> None:
    arrived, ended = threading.Event(), threading.Event()

    def numbers() -> Iterator[int]:
        yield from (0, 1)
        arrived.wait()
        set_back.set()
        yield from itertools.takewhile(lambda _: not ended.wait(0.01), itertools.count(2))

    def key(number: int) -> None:
        if number == 1:  # by now, number 0 has its time
            arrived.set()

    def note(window: Window[int]) -> Window[int]:
        if window.items[0] > 1:  # the window began after the clock was set back
            ended.set()
        return window

    graph = Graph()
    windows = graph.source(numbers).window(seconds=0.1, key=key).map(note).collect()
    found = graph.run()[windows]
    assert [window.start for window in found] == sorted({window.start for window in found})
    inside = [number for window in found for number in window.items]
    assert inside == list(range(len(inside)))


def test_join_pairs_arrivals_after_the_clock_is_set_back(set_back: threading.Event) -> None:
    arrived = threading.Event()

    def left() -> Iterator[str]:
        yield "before"
        arrived.wait()
        set_back.set()
        yield "after"

    def right() -> Iterator[str]:
        set_back.wait()
        yield "right"

    graph = Graph()
    joined = (
        graph.source(left, name="left")
        .map(lambda word: (arrived.set(), word)[1])
        .join(graph.source(right, name="right"), key=lambda _: 0, other_key=lambda _: 0, within=HOUR / 2)
        .collect()
    )
    assert set(graph.run()[joined]) == {("before", "right"), ("after", "right")}

"""Test retries and timeouts of failed items.

An item is retried after a delay and only for some errors, or fails after a time limit. In a batch, single
items may fail.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import stage_of
from support.waiting import wait_until

from flowchan import Graph, RunError, Stream


def failed(stream: Stream) -> Stream:
    """Return the stream of failed items, with the type and text of each error and the number of attempts."""
    return stream.errors.map(
        lambda one: (one.item, type(one.error).__name__, str(one.error), one.attempts)
    ).collect()


class Fails:
    """Function that raises in its first ``times`` calls and records when each call was made."""

    def __init__(self, times: int, error: type[Exception] = ValueError) -> None:
        self.times, self.error = times, error
        self.calls: list[float] = []

    def __call__(self, number: int) -> int:
        self.calls.append(time.monotonic())
        if len(self.calls) <= self.times:
            raise self.error(number)
        return number

    async def later(self, number: int) -> int:
        return self(number)


@pytest.mark.parametrize("how", ["thread", "async"])
def test_item_is_retried_after_the_delay(how: str) -> None:
    fails = Fails(2)
    graph = Graph("delayed")
    function: Any = fails if how == "thread" else fails.later
    result = graph.source([7]).map(function, retries=2, retry_delay=0.05).collect()
    assert graph.run()[result] == [7]
    first, second, third = fails.calls
    assert second - first >= 0.05
    assert third - second >= 0.05


@pytest.mark.parametrize("none", [0, 0.0, None])
def test_zero_delay_retries_at_once(none: float | None) -> None:
    graph = Graph("at once")
    result = graph.source([7]).map(Fails(2), retries=2, retry_delay=none).collect()
    assert graph.run()[result] == [7]


@pytest.mark.parametrize("wrong", [-1, float("nan")])
def test_negative_delay_is_rejected(wrong: float) -> None:
    with pytest.raises(ValueError, match=rf"^map: retry_delay must be at least 0 seconds, got {wrong}$"):
        Graph().source([7]).map(abs, retries=1, retry_delay=wrong)


def test_aborted_run_does_not_wait_for_the_next_retry() -> None:
    fails = Fails(10)
    graph = Graph("delayed")
    graph.source([7]).map(fails, retries=9, retry_delay=1e6, name="slow").sink(abs)
    run = graph.start()
    wait_until(lambda: stage_of(run, "slow").retried == 1)
    run.abort()
    run.wait()
    assert len(fails.calls) == 1


@pytest.mark.parametrize("how", ["thread", "async"])
@pytest.mark.parametrize("retry_on", [KeyError, (OSError, LookupError)])
def test_only_the_exception_types_in_retry_on_are_retried(how: str, retry_on: Any) -> None:
    tried: list[int] = []

    def call(number: int) -> int:
        tried.append(number)
        raise KeyError if number else ValueError

    async def later(number: int) -> int:
        return call(number)

    graph = Graph("named")
    function: Any = call if how == "thread" else later
    numbers = graph.source([0, 1]).map(function, retries=2, retry_on=retry_on)
    numbers.sink(abs)
    bad = numbers.errors.map(lambda one: (one.item, one.attempts)).collect()
    assert graph.run()[bad] == [(0, 1), (1, 3)]
    assert tried == [0, 1, 1, 1]


def slow_at_two(number: int) -> int:
    if number == 2:
        re.match("(a*)*b", "a" * 40)  # would take years and hold the GIL
    return number


@pytest.mark.usefixtures("_method")
def test_item_exceeding_the_timeout_fails_and_its_worker_is_replaced() -> None:
    graph = Graph("late")
    numbers = graph.source(range(5)).map(slow_at_two, on="process", timeout=0.2, name="slow", max_deaths=1)
    good, bad = numbers.collect(), failed(numbers)
    with graph.start() as run:
        results = run.wait()
    assert results[good] == [0, 1, 3, 4]
    assert results[bad] == [(2, "TimeoutError", "the worker took longer than timeout=0.2 s", 1)]
    stage = stage_of(run, "slow")
    # the run killed the worker, so this does not count as a death
    assert (stage.failed, stage.restarts) == (1, 0)


def test_item_that_exceeds_the_timeout_is_retried(tmp_path: Path) -> None:
    tries = tmp_path / "tries"

    def call(number: int) -> int:
        with tries.open("a") as file:
            file.write(f"{number}\n")
        if number == 1 or len(tries.read_text().split()) < 3:
            signal.pause()
        return number

    graph = Graph("late")
    numbers = graph.source([0, 1]).map(call, on="process", timeout=0.2, retries=2, max_deaths=1)
    good, bad = numbers.collect(), failed(numbers)
    results = graph.run()
    assert results[good] == [0]
    assert results[bad] == [(1, "TimeoutError", "the worker took longer than timeout=0.2 s", 3)]
    assert tries.read_text().split() == ["0", "0", "0", "1", "1", "1"]


def test_timeouts_do_not_count_as_restarts() -> None:
    graph = Graph("late")
    numbers = graph.source(range(6)).map(lambda n: signal.pause(), on="process", timeout=0.02, restarts=0)
    numbers.sink(lambda item: None)
    bad = failed(numbers)
    assert [item for item, *_ in graph.run()[bad]] == list(range(6))


def test_timeout_ends_the_run_if_errors_are_unread() -> None:
    graph = Graph("late")
    graph.source([1]).sink(lambda number: signal.pause(), on="process", timeout=0.02, name="slow")
    with pytest.raises(RunError) as caught:
        graph.run()
    (error,) = caught.value.exceptions
    assert (error.stage, error.item) == ("slow", "1")
    assert isinstance(error.__cause__, TimeoutError)


def test_waiting_for_room_does_not_count_towards_the_timeout() -> None:
    """The time between two elements from one item does not count either."""

    def pour(number: int) -> Iterator[int]:
        yield from range(10)

    graph = Graph("full")
    poured = graph.source(range(2)).flat_map(pour, on="process", timeout=0.3, capacity=1, name="pour")
    result = poured.map(abs, capacity=1).collect()
    with graph.start() as run:
        wait_until(lambda: stage_of(run, "pour").waiting_output * run.stats().elapsed > 0.4)
        assert run.wait()[result] == [*range(10), *range(10)]
    assert stage_of(run, "pour").restarts == 0


def test_coroutine_that_exceeds_the_timeout_is_cancelled() -> None:
    cancelled = []

    async def call(number: int) -> int:
        try:
            if number == 2:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        return number

    async def pour(number: int) -> Any:
        yield number
        yield await call(number)

    graph = Graph("late")
    one, other = graph.source(range(4)).tee(2)
    numbers = one.map(call, timeout=0.05)
    twice = other.flat_map(pour, timeout=0.05)
    good, bad = numbers.collect(), numbers.errors.map(lambda one: (one.item, repr(one.error))).collect()
    poured, late = twice.collect(), twice.errors.map(lambda one: (one.item, repr(one.error))).collect()
    results = graph.run()
    assert results[good] == [0, 1, 3]
    expected = "TimeoutError('the worker took longer than timeout=0.05 s')"
    assert results[bad] == results[late] == [(2, expected)]
    assert results[poured] == [0, 0, 1, 1, 2, 3, 3]
    assert cancelled == [2, 2]


def test_timeout_on_a_thread_is_rejected_with_the_remedy() -> None:
    message = (
        r"map: timeout=3 requires on='process', a pool from flowchan.hosts or an async def function, because"
    )
    with pytest.raises(ValueError, match=message):
        Graph("late").source([1]).map(abs, timeout=3)


@pytest.mark.parametrize("retry_on", [3, KeyboardInterrupt, (KeyError, "x"), KeyError("x")])
def test_option_retry_on_must_name_exceptions(retry_on: Any) -> None:
    with pytest.raises(TypeError, match="map: retry_on must be a subclass of Exception, or a tuple"):
        Graph("named").source([1]).map(abs, retry_on=retry_on)


def halve(numbers: list[int]) -> list[Any]:
    return [8 // number if number else ZeroDivisionError("not 0") for number in numbers]


async def halve_later(numbers: list[int]) -> list[Any]:
    return halve(numbers)


@pytest.mark.parametrize(("function", "on"), [(halve, "thread"), (halve, "process"), (halve_later, "thread")])
def test_single_items_of_a_batch_can_fail(function: Any, on: Any) -> None:
    graph = Graph("members")
    halves = graph.source([1, 0, 2, 0, 0, 4]).batch(2).map(function, on=on, name="halve")
    good, bad = halves.unbatch().collect(), failed(halves)
    with graph.start() as run:
        results = run.wait()
    assert results[good] == [8, 4, 2]
    assert results[bad] == [(0, "ZeroDivisionError", "not 0", 1)] * 3
    stage = stage_of(run, "halve")
    assert (stage.items_in, stage.items_out, stage.failed, stage.members_failed) == (3, 3, 0, 3)
    assert "halve      3 = 3 out, 3 members failed" in run.report().splitlines()


def test_failed_batch_item_ends_the_run_if_errors_are_unread() -> None:
    graph = Graph("members")
    graph.source([1, 0]).batch(2).map(halve, name="halve").sink(lambda item: None)
    with pytest.raises(RunError) as caught:
        graph.run()
    (error,) = caught.value.exceptions
    assert (error.stage, error.item) == ("halve", "0")


def halve_in_tuple(numbers: list[int]) -> tuple[Any, ...]:
    return tuple(halve(numbers))


def halve_shorter(numbers: list[int]) -> list[Any]:
    return [result for result in halve(numbers) if result != 8]


async def halve_shorter_later(numbers: list[int]) -> list[Any]:
    return halve_shorter(numbers)


@pytest.mark.parametrize(
    ("function", "on", "kind"),
    [
        (halve_in_tuple, "thread", "tuple of 2"),
        (halve_in_tuple, "process", "tuple of 2"),
        (halve_shorter, "thread", "list of 1"),
        (halve_shorter_later, "thread", "list of 1"),
    ],
)
def test_exceptions_that_do_not_match_batch_items_fail_the_batch(function: Any, on: Any, kind: str) -> None:
    graph = Graph("members")
    halves = graph.source([1, 0, 2, 4]).batch(2).map(function, on=on, name="halve")
    good, bad = halves.collect(), failed(halves)
    with graph.start() as run:
        results = run.wait()
    assert [sorted(given) for given in results[good]] == [[2, 4]]
    ((item, error, text, _),) = results[bad]
    assert (item, error) == ([1, 0], "TypeError")
    assert f"for a batch with failed members, got a {kind}" in text
    stage = stage_of(run, "halve")
    assert (stage.items_in, stage.items_out, stage.failed, stage.members_failed) == (2, 1, 1, 0)


def test_exceptions_in_ordinary_lists_are_values() -> None:
    graph = Graph("values")
    given = graph.source([[1, 0]]).map(halve).collect()
    ((first, second),) = graph.run()[given]
    assert (first, type(second)) == (8, ZeroDivisionError)

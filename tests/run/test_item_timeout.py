"""Test the timer that limits the time of an item, and programs that handle or block its signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from support.scripted_clock import ScriptedClock

from flowchan import Graph
from flowchan.declare.values import Stage
from flowchan.run.worker import item_timeout

OFF = 0.0


class Timer:
    """Record the number of seconds in each call of ``setitimer``."""

    def __init__(self) -> None:
        self.armed: list[float] = []

    def set(self, which: int, seconds: float) -> None:
        assert which == signal.ITIMER_REAL
        self.armed.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ScriptedClock:
    clock = ScriptedClock()
    monkeypatch.setattr(item_timeout, "time", clock)
    return clock


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Timer]:
    timer = Timer()
    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(signal, "setitimer", timer.set)
    yield timer
    signal.signal(signal.SIGALRM, before)


def stage_with_timeout(operator: str, timeout: float) -> Stage:
    graph = Graph("limited")
    getattr(graph.source([1]), operator)(abs, on="process", timeout=timeout, name="limited")
    (stage,) = (stage for stage in graph.stages if stage.name == "limited")
    return stage


def test_elements_of_one_item_share_its_time_limit(clock: ScriptedClock, timer: Timer) -> None:
    """The time for which the caller keeps an element does not count."""

    def pour(number: int) -> Iterator[int]:
        clock.now += 1
        return elements(number)

    def elements(number: int) -> Iterator[int]:
        for element in range(number):
            clock.now += 2
            yield element
        clock.now += 4

    for element in item_timeout.limited(pour, stage_with_timeout("flat_map", 10.0))(2):
        assert timer.armed[-1] == OFF, element
        clock.now += 100
    assert timer.armed == [10.0, OFF, 9.0, OFF, 7.0, OFF, 5.0, OFF]


def test_item_without_time_left_gets_the_shortest_timer(clock: ScriptedClock, timer: Timer) -> None:
    """Zero would disable the timer, and the kernel rejects negative times."""

    def pour(number: int) -> list[int]:
        clock.now += number
        return [number]

    call = item_timeout.limited(pour, stage_with_timeout("flat_map", 10.0))
    assert [*call(10), *call(11)] == [10, 11]
    shortest = item_timeout.MIN_TIMEOUT_S
    assert timer.armed == [10.0, OFF, *[shortest, OFF] * 2] * 2
    assert shortest > 0


def test_timer_is_turned_off_after_each_item(clock: ScriptedClock, timer: Timer) -> None:
    def divide(number: int) -> float:
        clock.now += 3
        return 1 / number

    call = item_timeout.limited(divide, stage_with_timeout("map", 10.0))
    assert call(2) == 0.5
    with pytest.raises(ZeroDivisionError):
        call(0)
    assert timer.armed == [10.0, OFF] * 2


def test_result_of_a_map_is_not_iterated(timer: Timer) -> None:
    result = item_timeout.limited(lambda number: [number], stage_with_timeout("map", 10.0))(1)
    assert result == [1]
    assert timer.armed == [10.0, OFF]


@pytest.mark.parametrize("_method", ["fork"], indirect=True)
@pytest.mark.usefixtures("_method")
def test_time_limit_ends_a_worker_that_inherits_a_signal_handler() -> None:
    """The inherited handler would only interrupt ``pause``, and the item would count as finished."""

    def pause(number: int) -> int:
        signal.pause()
        return number

    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        graph = Graph("limited")
        numbers = graph.source([1]).map(pause, on="process", timeout=0.02, max_deaths=1)
        good, bad = numbers.collect(), numbers.errors.map(lambda one: repr(one.error)).collect()
        results = graph.run()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert results[good] == []
    assert results[bad] == ["TimeoutError('the worker took longer than timeout=0.02 s')"]


@pytest.mark.parametrize("_method", ["fork"], indirect=True)
@pytest.mark.usefixtures("_method")
def test_item_timeout_applies_if_the_program_blocks_signals() -> None:
    """A worker inherits the blocked signals. A blocked timer signal would disable the worker's timer."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        graph = Graph("limited")
        numbers = graph.source([1]).map(
            lambda _: signal.sigwait([signal.SIGTERM]), on="process", timeout=0.02
        )
        bad = numbers.errors.map(lambda one: repr(one.error)).collect()
        numbers.sink(abs)
        results = graph.run()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert results[bad] == ["TimeoutError('the worker took longer than timeout=0.02 s')"]

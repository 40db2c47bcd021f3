"""Test subscribers to a run's feed: what they receive and when, and subscribers that fail or leave."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from typing import Any

import pytest
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Graph, RunStats
from flowchan.run.observe.feed import Feed
from flowchan.run.policy.decisions import (
    StopRequested,
)
from flowchan.run.policy.events import Began, Ended, Retried, WorkerId


def fed() -> Graph:
    graph = Graph("fed")
    graph.source(range(20), name="numbers").map(abs, name="work").sink(abs, name="end")
    return graph


def feed_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.endswith(" feed")]


def test_subscriber_gets_stats_at_once_and_after_the_end() -> None:
    seen: list[RunStats] = []
    came = threading.Event()

    def see(stats: RunStats) -> None:
        seen.append(stats)
        came.set()

    graph = Graph("fed")
    gate = Gate()
    graph.source([1]).sink(lambda _: gate.wait(), name="end")
    with graph.start() as run, run.subscribe(stats=see, every=600):
        came.wait()
        gate.open()
        run.wait()
        assert [stats.state for stats in seen] == ["running", "done"]
        assert seen[-1] == run.stats()


def test_subscriber_of_an_ended_run_gets_stats_once() -> None:
    run = fed().start()
    run.wait()
    seen: list[RunStats] = []
    run.subscribe(stats=seen.append).close()
    assert [stats.state for stats in seen] == ["done"]
    assert not feed_threads()


def test_run_without_subscribers_has_no_feed_thread() -> None:
    gate = Gate()
    graph = Graph("fed")
    graph.source([1]).sink(lambda _: gate.wait())
    with graph.start() as run:
        assert not feed_threads()
        with run.subscribe(stats=lambda stats: None):
            assert len(feed_threads()) == 1
        assert not feed_threads()
        gate.open()
        run.wait()


def test_events_of_each_worker_arrive_in_order() -> None:
    seen: list[Any] = []
    graph, gate = Graph("fed"), Gate()
    graph.source([1], name="held").map(lambda _: gate.wait() or 1, name="work").sink(abs, name="last")
    with graph.start() as run, run.subscribe(events=seen.append):
        gate.open()
        run.wait()
    for stage in ("work", "last"):
        own = [event for event in seen if getattr(event, "worker", None) == WorkerId(stage, 1)]
        kinds = [type(event) for event in own]
        assert kinds[-1:] == [Ended]
        assert kinds in ([Began, Ended], [Ended])  # the worker may have started before the subscription


def test_events_include_retries_and_stops() -> None:
    seen: list[Any] = []
    graph, gate, failed = Graph("fed"), Gate(), []

    def work(number: int) -> int:
        gate.wait()
        if not failed:
            failed.append(number)
            raise ValueError(number)
        return number

    graph.source([1]).map(work, retries=1, name="work").sink(abs)
    with graph.start() as run, run.subscribe(events=seen.append):
        run.stop()
        gate.open()
        run.wait()
    assert Retried(WorkerId("work", 1)) in seen
    assert any(isinstance(event, StopRequested) for event in seen)


def test_failing_subscriber_is_removed_without_affecting_other_subscribers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[RunStats] = []
    checks = threading.Semaphore(0)

    def fail(stats: RunStats) -> None:
        calls.append(stats)
        raise OSError("no reader is left")

    graph, gate = Graph("fed"), Gate()
    end = graph.source([1, 2]).map(lambda number: gate.wait() or number).collect()
    with (
        graph.start() as run,
        run.subscribe(stats=fail, every=0.01),
        run.subscribe(stats=lambda stats: checks.release(), every=0.01),
    ):
        for _ in range(3):
            checks.acquire()
        gate.open()
        assert run.wait()[end] == [1, 2]
    assert len(calls) == 1
    assert [record.getMessage() for record in caplog.records if "subscriber" in record.getMessage()] == [
        "a subscriber of a run's feed failed and was removed: OSError: no reader is left"
    ]


def test_closed_subscription_gets_nothing() -> None:
    seen: list[RunStats] = []
    came = threading.Event()
    graph, gate = Graph("fed"), Gate()
    graph.source([1]).sink(lambda _: gate.wait())
    with graph.start() as run:
        with run.subscribe(stats=lambda stats: (seen.append(stats), came.set()), every=0.01):
            came.wait()
        left = len(seen)
        gate.open()
        run.wait()
    assert len(seen) == left


def test_subscribers_share_one_thread_and_have_their_own_context() -> None:
    """In a notebook, the context identifies the cell for output."""
    cell: contextvars.ContextVar[str] = contextvars.ContextVar("cell")
    seen: set[tuple[str, str]] = set()
    run = fed().start()
    for name in ("one", "other"):
        cell.set(name)
        run.subscribe(stats=lambda stats, me=name: seen.add((me, cell.get())))
    run.wait()
    assert seen == {("one", "one"), ("other", "other")}
    assert not feed_threads()


def test_subscriber_receives_statistics_for_its_window_until_run_ends() -> None:
    seen: dict[float | None, list[RunStats]] = {0.5: [], None: []}
    graph, gate = Graph("fed"), Gate()
    graph.source([1]).sink(lambda _: gate.wait())
    with graph.start() as run, contextlib.ExitStack() as ends:
        for window, found in seen.items():
            ends.enter_context(run.subscribe(stats=found.append, every=0.01, window=window))
        wait_until(lambda: all(found and found[-1].elapsed > 2 for found in seen.values()), what=lambda: seen)
        gate.open()
        run.wait()
    recent = next(stats for stats in seen[0.5] if stats.elapsed > 2)
    assert recent.window < recent.elapsed
    whole = next(stats for stats in seen[None] if stats.elapsed > 2)
    assert whole.window == pytest.approx(whole.elapsed)
    assert all(found[-1].window == pytest.approx(found[-1].elapsed) for found in seen.values())


def test_subscription_window_defaults_to_five_seconds() -> None:
    asked: list[float | None] = []

    def stats(window: float | None) -> RunStats:
        asked.append(window)
        return RunStats("graph", "running", 0.0, (), (), None)

    class Source:
        def stats(self, window: float | None) -> RunStats:
            return stats(window)

    source = Source()
    feed = Feed("fed", weakref.WeakMethod(source.stats))
    came = threading.Event()
    feed.subscribe(stats=lambda stats: came.set(), every=600)
    came.wait()
    feed.end()
    assert asked == [5.0, None]


def test_subscription_window_must_be_a_number_of_seconds() -> None:
    run = fed().start()
    with pytest.raises(ValueError, match="subscribe: window must be"):
        run.subscribe(window=0)
    with pytest.raises(ValueError, match="report: window must be"):
        run.report(window=0)
    run.wait()


def test_option_every_must_be_a_number_of_seconds() -> None:
    run = fed().start()
    with pytest.raises(ValueError, match="subscribe: every must be"):
        run.subscribe(every=0)
    run.wait()

"""Test graphs with a declared feedback.

Such graphs end when their work is done, and do not lose items. Stopping, failures and progress work as in
other graphs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from runs import everywhere, stage_of
from support.waiting import wait_until

from flowchan import Deadlock, Drained, Graph, In, Out, RunError, Stream, select

MOST = 16
"""Maximum number of numbers in the loop at once. The loop's channels can hold this many."""


def steer(fresh: In[Any], again: In[Any], work: Out[Any], done: Out[Any]) -> None:
    """Send each item (start, number, steps) through the loop until the number is 1."""
    under_way = 0
    while True:
        try:
            taken = select([again] if under_way == MOST else [fresh, again] if under_way else [fresh])
        except Drained:
            return
        under_way -= taken.channel is again
        start, number, steps = taken.item
        if number == 1:
            done.put((start, steps))
        else:
            work.put(taken.item)
            under_way += 1


def collatz(item: tuple[int, int, int]) -> tuple[int, int, int]:
    start, number, steps = item
    return start, 3 * number + 1 if number % 2 else number // 2, steps + 1


def steps_of(start: int) -> int:
    item = (start, start, 0)
    while item[1] != 1:
        item = collatz(item)
    return item[2]


def fresh(numbers: Iterable[int]) -> Iterable[tuple[int, int, int]]:
    return ((number, number, 0) for number in numbers)


def declare(
    numbers: Iterable[int], on: Any, function: Any = collatz, workers: int = 2
) -> tuple[Graph, Stream]:
    graph = Graph("loop")
    again = graph.feedback("again")
    work, done = graph.stage(steer, graph.source(fresh, numbers), again, on=on)
    again.feed(work.map(function, on=on, workers=workers, name="step"))
    return graph, done.collect()


@everywhere
def test_loop_ends_after_all_its_items(on: Any) -> None:
    graph, done = declare(range(1, 101), on)
    assert sorted(graph.run()[done]) == [(number, steps_of(number)) for number in range(1, 101)]


def test_loop_may_span_threads_and_processes() -> None:
    graph = Graph("both")
    again = graph.feedback()
    work, done = graph.stage(steer, graph.source(fresh, range(1, 50)), again)
    again.feed(work.map(collatz, on="process").map(lambda item: item))
    result = done.collect()
    assert sorted(graph.run()[result]) == [(number, steps_of(number)) for number in range(1, 50)]


@everywhere
def test_reader_that_stops_ends_a_loop(on: Any) -> None:
    graph = Graph("early")
    again = graph.feedback()
    work, done = graph.stage(steer, graph.source(fresh, itertools.count(1)), again, on=on)
    again.feed(work.map(collatz, on=on))
    result = done.take(20).collect()
    assert all(steps == steps_of(start) for start, steps in graph.run()[result])


def test_stage_may_feed_itself() -> None:
    """The stage reads only its own output, so the graph begins and ends with this stage."""

    def doubled(items: In[int], out: Out[int], messages: Out[int]) -> None:
        out.put(1)
        for number in items:
            messages.put(number)
            if number > 500:
                return
            out.put(2 * number)

    graph = Graph("self")
    items = graph.feedback()
    out, messages = graph.stage(doubled, items)
    items.feed(out)
    result = messages.collect()
    assert graph.run()[result] == [2**power for power in range(10)]


@everywhere
def test_stop_finishes_the_items_of_a_loop(on: Any) -> None:
    graph, done = declare(itertools.count(1), on)  # type: ignore[arg-type]
    run = graph.start()
    wait_until(lambda: stage_of(run, "collect").items_in >= 100 or stage_of(run, "step").items_in > 1000)
    run.stop()
    found = sorted(run.wait()[done])
    assert found == [(number, steps_of(number)) for number in range(1, len(found) + 1)]


@everywhere
def test_abort_breaks_a_loop(on: Any) -> None:
    graph, _ = declare(itertools.count(1), on)  # type: ignore[arg-type]
    run = graph.start()
    wait_until(lambda: stage_of(run, "step").items_in > 100)
    run.abort()
    run.wait()
    assert run.stats().state == "aborted"


@everywhere
def test_failure_in_a_loop_ends_the_run(on: Any) -> None:
    def fail_at_52(item: tuple[int, int, int]) -> tuple[int, int, int]:
        if item[1] == 52:
            raise ValueError("no 52")
        return collatz(item)

    graph, _ = declare(range(1, 100), on, fail_at_52)
    with pytest.raises(RunError) as raised:
        graph.run()
    assert raised.value.exceptions[0].stage == "step"
    assert repr(raised.value.exceptions[0].__cause__) == "ValueError('no 52')"


def test_killed_worker_in_a_loop_loses_nothing(tmp_path: Path) -> None:
    def fragile(item: tuple[int, int, int]) -> tuple[int, int, int]:
        if item[0] in (7, 9, 11) and item[1] == 52:
            try:
                os.close(os.open(tmp_path / str(item[0]), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return collatz(item)
            os.kill(os.getpid(), 9)
        return collatz(item)

    numbers = range(1, 36)
    graph, done = declare(numbers, "process", fragile)
    assert sorted(graph.run()[done]) == [(number, steps_of(number)) for number in numbers]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.usefixtures("checks")
@everywhere
def test_loop_in_which_all_stages_wait_is_a_deadlock(on: Any) -> None:
    """The stage waits for the feedback before it has put anything."""

    def too_patient(again: In[int], fresh: In[int], work: Out[int]) -> None:
        work.put(again.get() + fresh.get())

    graph = Graph("stuck")
    again = graph.feedback()
    work = graph.stage(too_patient, again, graph.source(range(3)), name="patient", on=on)
    again.feed(work.map(lambda item: item, on=on, name="step"))
    with pytest.raises(RunError) as raised:
        graph.run()
    cause = raised.value.exceptions[0].__cause__
    assert isinstance(cause, Deadlock)
    assert "'patient' waits for an item from 'step'" in str(cause)


def test_slow_loop_is_not_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowchan.run.policy.deadlock.STILL", 0.0)
    monkeypatch.setattr("flowchan.run.supervisor.POLL_INTERVAL_S", 0.0001)

    def one_by_one(fresh: In[Any], again: In[Any], work: Out[Any], done: Out[Any]) -> None:
        for item in fresh:
            while item[1] != 1:
                work.put(item)
                item = again.get()
            done.put(item)

    graph = Graph("slow")
    again = graph.feedback()
    work, done = graph.stage(one_by_one, graph.source(fresh, range(1, 30)), again, capacity=1)
    again.feed(work.map(collatz, capacity=1))
    result = done.collect()
    assert [(start, steps) for start, _, steps in graph.run()[result]] == [
        (n, steps_of(n)) for n in range(1, 30)
    ]


def test_item_counts_of_a_loop_are_balanced() -> None:
    graph, _ = declare(range(1, 40), "thread")
    with graph.start() as run:
        run.wait()
    step = stage_of(run, "step")
    assert step.items_in == step.items_out == sum(map(steps_of, range(1, 40)))
    assert "again" not in run.report()

"""Test R5 (Stop) when the program itself stops or aborts the run.

``run.stop()`` stops the sources, and all items in flight are finished. ``run.abort()`` breaks all channels.
"""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Gate, everywhere, script, stage_of, start
from support.waiting import wait_until

from flowchan import Broken, Closed, Graph, Out, RunError

pytestmark = pytest.mark.usefixtures("forked_programs")


def same(item: Any) -> Any:
    return item


@everywhere
def test_stop_finishes_items_in_flight(on: Any) -> None:
    gate = Gate()

    def hold_the_first(item: int) -> int:
        if item == 0:
            gate.wait()
        return item

    graph = Graph("r5")
    numbers = graph.source(itertools.count, on=on, name="numbers", capacity=8)
    result = numbers.map(hold_the_first, on=on, workers=2).map(same, on=on).collect()
    run = graph.start()
    gate.wait_held()
    run.stop()
    wait_until(lambda: run._ports.channels["numbers"].closed)
    gate.open()
    items = run.wait()[result]
    assert items == list(range(len(items)))
    assert len(items) == stage_of(run, "numbers").items_out
    assert run.stats().state == "stopped"


def test_stop_ends_a_reduce_with_the_items_so_far() -> None:
    graph = Graph("r5")
    numbers = graph.input()
    total = numbers.reduce(int.__add__, 0)
    run = graph.start()
    run[numbers].put(3)
    run[numbers].put(4)
    run.stop()
    assert run.wait()[total] == 7


def test_stop_stops_general_stages_without_inputs() -> None:
    def count(out: Out[int]) -> None:
        for number in itertools.count():
            out.put(number)

    graph = Graph("r5")
    graph.stage(count).sink(id)
    run = graph.start()
    run.stop()
    run.wait()
    assert run.stats().state == "stopped"


@everywhere
def test_abort_discards_items_in_flight(on: Any) -> None:
    gate = Gate()

    def hold(item: int) -> int:
        gate.wait()
        return item

    graph = Graph("r5")
    result = graph.source(itertools.count, on=on).map(hold, on=on, name="hold").collect()
    run = graph.start()
    gate.wait_held()
    run.abort()
    gate.open()
    assert result not in run.wait()
    assert run.stats().state == "aborted"


@pytest.mark.usefixtures("short_grace")
def test_abort_ends_workers_that_are_blocked_in_user_code() -> None:
    gate = Gate()
    graph = Graph("r5")
    graph.source([1]).map(lambda _: gate.wait(), on="process").sink(id)
    run = graph.start()
    gate.wait_held()
    run.abort()
    run.wait()
    assert not any(stage.alive for stage in run.stats().stages)


@pytest.mark.usefixtures("short_grace")
def test_abort_ends_workers_that_ignore_sigterm() -> None:
    gate = Gate()

    def stubborn(item: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        gate.wait()

    graph = Graph("r5")
    graph.source([1]).map(stubborn, on="process").sink(id)
    run = graph.start()
    gate.wait_held()
    run.abort()
    run.wait()
    assert run.stats().state == "aborted"


@pytest.mark.usefixtures("short_grace")
def test_abort_abandons_threads_that_cannot_be_interrupted() -> None:
    held = threading.Event()
    entered = threading.Event()

    def stubborn(item: int) -> None:
        entered.set()
        held.wait()

    graph = Graph("r5")
    graph.source([1]).sink(stubborn)
    with pytest.warns(  # noqa: PT031
        RuntimeWarning,
        match="worker stubborn 1 of graph 'r5' is still running code that cannot be interrupted",
    ):
        run = graph.start()
        entered.wait()
        run.abort()
        run.wait()
        run._supervisor._thread.join()
    held.set()


def test_abandoned_thread_ends_the_run_if_warnings_are_errors(tmp_path: Path) -> None:
    text = """
        import threading
        from flowchan import Graph

        entered, held = threading.Event(), threading.Event()

        def stubborn(item):
            entered.set()
            held.wait()

        graph = Graph("r5")
        graph.source([1]).sink(stubborn)
        run = graph.start()
        entered.wait()
        run.abort()
        run.wait()
        run._supervisor._thread.join()
        print(run.stats().state)
    """
    with start("-W", "error", script(tmp_path, text)) as process:
        out, err = process.communicate()
    assert (process.returncode, out) == (0, "aborted\n"), err
    assert "is still running code that cannot be interrupted" in err


@pytest.mark.usefixtures("short_grace")
@everywhere
def test_stop_does_not_wait_for_a_blocked_source(on: Any) -> None:
    device = Gate()

    def camera() -> Iterator[int]:
        yield 1
        device.wait()

    graph = Graph("r5")
    result = graph.source(camera, on=on).collect()
    run = graph.start()
    device.wait_held()
    run.stop()
    if on == "thread":
        with pytest.warns(RuntimeWarning, match="camera 1"):  # noqa: PT031
            assert run.wait()[result] == [1]
            run._supervisor._thread.join()
    else:
        assert run.wait()[result] == [1]
    assert run.stats().state == "stopped"
    device.open()
    for thread in run._crew.local.threads.values():
        thread.join()


def test_stop_of_an_ended_run_does_nothing() -> None:
    graph = Graph("r5")
    result = graph.source([1]).collect()
    run = graph.start()
    run.wait()
    run.stop()
    run.abort()
    assert run.wait()[result] == [1]
    assert run.stats().state == "done"


@pytest.mark.usefixtures("short_grace")
def test_abort_after_a_stop_breaks_at_once() -> None:
    gate = Gate()
    graph = Graph("r5")
    graph.source(itertools.count).map(lambda _: gate.wait(), on="process").sink(id)
    run = graph.start()
    gate.wait_held()
    run.stop()
    run.stop()
    run.abort()
    run.wait()
    assert run.stats().state == "aborted"


def test_failure_after_a_stop_is_reported() -> None:
    gate = Gate()

    def fail(item: int) -> None:
        gate.wait()
        raise ValueError

    graph = Graph("r5")
    graph.source(itertools.count).sink(fail)
    run = graph.start()
    gate.wait_held()
    run.stop()
    gate.open()
    with pytest.raises(RunError):
        run.wait()


def test_stop_closes_the_inputs_for_the_program() -> None:
    graph = Graph("r5")
    numbers = graph.input()
    numbers.sink(id)
    run = graph.start()
    run.stop()
    run.wait()
    with pytest.raises((Closed, Broken, ValueError)):
        run[numbers].put(1)

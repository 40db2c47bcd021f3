"""Test ``run.explain()``: which stage waits at which channel, and which stage can end the wait.

A deadlocked run fails with this explanation. A run that only looks deadlocked for some time continues.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Gate, everywhere, feedback, script, start, waits
from support.waiting import wait_until

from flowchan import Deadlock, Graph, In, Out, Run, RunError, StageError


def same(item: Any) -> Any:
    return item


def line_of(run: Run, stage: str) -> str:
    """Return the line about one stage in the explanation."""
    return next((line for line in run.explain().splitlines() if line.startswith(f"  '{stage}'")), "")


# --- the text ---


@everywhere
def test_explain_describes_a_blocked_graph(on: Any) -> None:
    gate = Gate()
    graph = Graph("photos")
    resized = graph.source(itertools.count, on=on, name="photos", capacity=3)
    resized = resized.map(same, workers=4, on=on, name="resize", capacity=2, ordered=False)
    resized.sink(lambda _: gate.wait(), on=on, name="upload")
    run = graph.start()
    gate.wait_held()
    lines = [
        r"graph 'photos' \(running for \d+\.\d s\):",
        r"  'photos' waits to put into 'photos' \(3 of 3\) for \d+\.\d s, whose reader "
        r"'resize' is busy \d+ %",
        r"  'resize' ×4 waits to put into 'resize' \(2 of 2\) for \d+\.\d s, whose reader "
        r"'upload' is busy \d+ %",
        r"  'upload' works on 1 item \(busy \d+ %\)",
    ]
    wait_until(lambda: re.fullmatch("\n".join(lines), run.explain()) is not None, what=run.explain)
    gate.open()
    run.abort()
    run.wait()


def test_explain_names_the_writer_that_a_reader_waits_for() -> None:
    gate = Gate()
    graph = Graph("explain")
    held = graph.source(range(3)).map(lambda _: gate.wait(), name="slow")
    held.map(same, workers=2, name="fast").sink(same)
    run = graph.start()
    gate.wait_held()
    waits(run, "slow", readers=2)
    line = line_of(run, "fast")
    assert re.match(
        r"  'fast' ×2 waits for an item from 'slow' \(0 of 64\) for .* whose writer 'slow' is busy", line
    )
    gate.open()
    run.wait()


def test_open_input_is_described_as_filled_from_outside() -> None:
    graph = Graph("explain")
    graph.input(name="orders").map(same, name="work").sink(same)
    with graph.start() as run:
        waits(run, "orders", readers=1)
        assert line_of(run, "work").endswith("whose writer 'orders' is filled from outside")


def test_explain_omits_ended_stages() -> None:
    gate = Gate()
    graph = Graph("explain")
    graph.source([1], name="short").sink(lambda _: gate.wait(), name="last")
    run = graph.start()
    gate.wait_held()
    wait_until(lambda: not line_of(run, "short"))
    assert line_of(run, "last").startswith("  'last' works on 1 item")
    gate.open()
    run.wait()
    assert run.explain() == f"graph 'explain' (done for {run.stats().elapsed:.1f} s):"


def test_sigquit_prints_the_explanation_while_the_command_runs(tmp_path: Path) -> None:
    text = """
        import itertools, os
        from flowchan import Graph

        def hold(item):
            print("holding", flush=True)
            os.read(os.pipe()[0], 1)

        graph = Graph("asked")
        graph.source(itertools.count, name="numbers", capacity=1).sink(hold, name="holder", on="process")
    """
    with start(
        "-c", "from flowchan.cli.commands import main; main()", "run", script(tmp_path, text)
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "holding" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGQUIT)
        found = ""
        while "'holder'" not in found:
            line = process.stderr.readline()
            assert line, found
            found += line
        assert "graph 'asked' (running for" in found
        os.killpg(process.pid, signal.SIGKILL)


# --- deadlocked runs ---


def stuck_graph(capacity: int, on: Any = "thread") -> Graph:
    """Return a graph that may deadlock: a zip joins the branches of a tee.

    The zip waits for a whole batch from one branch, while the tee waits for room in the other branch.
    """
    graph = Graph("stuck")
    left, right = graph.source(range(12), on=on).tee(2, name="tee", capacity=capacity)
    left.batch(4, name="fours").zip(right, name="pairs").sink(same, on=on)
    return graph


def deadlock_of(run: Run) -> tuple[StageError, Deadlock]:
    with pytest.raises(RunError) as caught:
        run.wait()
    (error,) = caught.value.exceptions
    cause = error.__cause__
    assert isinstance(cause, Deadlock)
    return error, cause


@pytest.mark.usefixtures("checks")
@everywhere
def test_tee_with_branches_that_wait_for_each_other_is_detected(on: Any) -> None:
    error, cause = deadlock_of(stuck_graph(1, on).start())
    text = str(cause)
    assert error.stage == "tee"
    assert "no worker can continue" in str(error)
    assert "every worker is waiting, so no item can move on" in text
    assert "stream.buffer(n)" in text
    assert "'tee' waits to put into 'tee.1' (1 of 1)" in text
    assert "'pairs' waits for an item from 'fours' (0 of 64)" in text


def test_larger_capacity_makes_the_same_graph_run() -> None:
    stuck_graph(12).run()


@pytest.mark.usefixtures("checks")
def test_general_stages_that_wait_for_each_other_are_detected() -> None:
    def read_left_only(left: Out[int], right: Out[int]) -> None:
        for number in itertools.count():
            left.put(number)

    def ask_right_only(left: In[int], right: In[int], out: Out[int]) -> None:
        for number in right:
            out.put(number)

    graph = Graph("stuck")
    left, right = graph.stage(read_left_only, name="giver")
    graph.stage(ask_right_only, left, right, name="asker").sink(same)
    _, cause = deadlock_of(graph.start())
    assert "'asker' waits for an item from 'giver.right'" in str(cause)


@pytest.mark.usefixtures("checks")
def test_awaited_result_does_not_hide_a_deadlock() -> None:
    graph = Graph("stuck")
    left, right = graph.source(range(12)).tee(2, capacity=1)
    left.batch(4).zip(right).collect()
    deadlock_of(graph.start())


def test_deadlock_while_stopping_is_detected(checks: Callable[[], int]) -> None:
    gate = Gate()

    def held() -> Iterator[int]:
        yield from range(6)
        gate.wait()

    graph = Graph("stuck")
    left, right = graph.source(held).tee(2, capacity=1)
    left.batch(4).zip(right).sink(same)
    run = graph.start()
    gate.wait_held()
    run.stop()
    gate.open()
    deadlock_of(run)


async def async_same(item: Any) -> Any:
    return item


@pytest.mark.usefixtures("checks")
@pytest.mark.parametrize("where", ["before", "left", "right", "behind"])
def test_deadlock_is_detected_next_to_async_stages(where: str) -> None:
    graph = Graph("stuck")
    numbers = graph.source(range(12))
    left, right = (numbers.map(async_same, workers=3) if where == "before" else numbers).tee(
        2, name="tee", capacity=1
    )
    fours = (left.map(async_same, name="same") if where == "left" else left).batch(4, name="fours")
    pairs = fours.zip(
        right.map(async_same, capacity=1, workers=2) if where == "right" else right, name="pairs"
    )
    pairs.sink(async_same if where == "behind" else same)
    _, cause = deadlock_of(graph.start())
    assert "'pairs' waits for an item from 'fours' (0 of 64)" in str(cause)
    assert "raise the capacity of a channel with a blocked writer (`stream.buffer(n)`)" in str(cause)


@pytest.mark.usefixtures("checks")
def test_remedy_is_to_put_if_all_workers_wait_to_get() -> None:
    def first(back: In[int], out: Out[int]) -> None:
        for number in back:
            out.put(number)

    _, cause = deadlock_of(feedback(first).start())
    assert (
        "no stage puts an item; one stage in the loop must put an item before it gets one, or return"
        in str(cause)
    )
    assert "stream.buffer" not in str(cause)


def test_explain_reports_how_long_an_async_stage_waits() -> None:
    graph = Graph("waiting")
    numbers = graph.input(name="numbers")
    numbers.map(async_same, name="same").sink(same)
    with graph.start() as run:
        waits(run, "numbers", readers=1)
        # Wait until the statistics show a longer wait.
        wait_until(lambda: run.stats().edges[0].readers_waiting_for > 0.3)
        found = re.search(r"for (\d+\.\d) s", line_of(run, "same"))
        assert found is not None
        # the text is rounded to 0.1 s
        assert 0.3 <= float(found[1]) <= run.stats().elapsed + 0.05

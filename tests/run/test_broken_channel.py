"""Test R3 for broken channels.

If a stage or the program breaks a channel, the run ends with that cause. The run reports one failure, with
the channel and the worker that broke the channel.
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from typing import Any

import pytest
from runs import Gate, everywhere
from support.waiting import wait_until

from flowchan import Broken, Graph, In, Out, RunError, StageError

TIMES = 10
"""Number of repetitions, because ends are reported in random order."""


class Lost(Exception):
    """Exception that a stage uses to break its channel."""


def same(item: Any) -> Any:
    return item


def break_the_output(numbers: In[int], out: Out[int]) -> None:
    out.put(numbers.get())
    out.channel.abort(Lost("the disk is gone"))


def break_the_input(numbers: In[int], out: Out[int]) -> None:
    out.put(numbers.get())
    numbers.channel.abort(Lost("the disk is gone"))


def break_and_go_on(numbers: In[int], out: Out[int]) -> None:
    out.channel.abort(Lost("the disk is gone"))
    for number in numbers:
        out.put(number)


def break_and_raise(numbers: In[int], out: Out[int]) -> None:
    error = Lost("the disk is gone")
    out.channel.abort(error)
    raise error


async def break_awaiting(numbers: In[int], out: Out[int]) -> None:
    await out.aput(await numbers.aget())
    out.channel.abort(Lost("the disk is gone"))


def pass_a_break_on(numbers: In[int], out: Out[int]) -> None:
    try:
        for number in numbers:
            out.put(number)
    except Exception as error:
        out.channel.abort(error)
        raise


def failure_of(graph: Graph) -> StageError:
    with pytest.raises(RunError) as caught:
        graph.run()
    (error,) = caught.value.exceptions
    return error


@pytest.mark.each_value
@everywhere
@pytest.mark.parametrize(
    ("breaker", "channel"),
    [
        (break_the_output, "'guilty' (from 'guilty' to 'after')"),
        (break_the_input, "'before' (from 'before' to 'guilty')"),
        (break_and_go_on, "'guilty' (from 'guilty' to 'after')"),
        (break_and_raise, "'guilty' (from 'guilty' to 'after')"),
    ],
)
@pytest.mark.parametrize("neighbours", ["thread", "process"])
def test_stage_that_breaks_a_channel_fails_the_run(
    breaker: Any, channel: str, neighbours: Any, on: Any
) -> None:
    for _ in range(TIMES if neighbours == on == "thread" else 2):
        graph = Graph("r3")
        numbers = graph.source(itertools.count(), name="numbers").map(same, on=neighbours, name="before")
        graph.stage(breaker, numbers, on=on, name="guilty").map(same, on=neighbours, name="after").sink(same)
        error = failure_of(graph)
        assert type(error.__cause__).__name__ == "Lost"
        assert str(error.__cause__) == "the disk is gone"
        assert (error.stage, error.worker) == ("guilty", "guilty 1")
        assert f"channel {channel} was aborted by worker guilty 1 (pid " in str(error)
        assert "Lost: the disk is gone" in str(error)


def test_cause_between_threads_is_the_same_exception_object() -> None:
    cause = Lost("itself")

    def breaks(out: Out[int]) -> None:
        out.channel.abort(cause)

    graph = Graph("r3")
    graph.stage(breaks).sink(same)
    assert failure_of(graph).__cause__ is cause


def test_async_stage_may_break_its_channel() -> None:
    graph = Graph("r3")
    graph.stage(break_awaiting, graph.source(itertools.count()), name="guilty").sink(same)
    error = failure_of(graph)
    assert (error.stage, str(error.__cause__)) == ("guilty", "the disk is gone")


@everywhere
def test_stage_that_only_forwards_broken_is_not_blamed(on: Any) -> None:
    """If the stage that breaks the channel is a process, the report of the other stage may arrive first."""
    for _ in range(TIMES if on == "thread" else 3):
        graph = Graph("r3")
        numbers = graph.stage(break_the_output, graph.source(itertools.count()), on=on, name="guilty")
        numbers = graph.stage(pass_a_break_on, numbers, name="second")
        graph.stage(pass_a_break_on, numbers, name="third").sink(same)
        assert failure_of(graph).stage == "guilty"


def test_run_fails_with_broken_if_a_channel_aborts_without_cause() -> None:
    def breaks(out: Out[int]) -> None:
        out.channel.abort()

    graph = Graph("r3")
    graph.stage(breaks, name="guilty").sink(same)
    error = failure_of(graph)
    assert isinstance(error.__cause__, Broken)
    assert "channel 'guilty' (from 'guilty' to 'same') was aborted by worker guilty 1" in str(error)


def test_broken_channel_is_noticed_although_no_worker_ends() -> None:
    """The stage that breaks the channel keeps running, and no worker is waiting for the channel."""
    held = threading.Event()

    def breaks(out: Out[int]) -> None:
        out.channel.abort(Lost("early"))
        held.wait()

    def busy(numbers: In[int]) -> None:
        held.wait()

    graph = Graph("r3")
    graph.stage(busy, graph.stage(breaks, name="guilty"))
    run = graph.start()
    wait_until(lambda: run.stats().state == "failed" and run._ports.channels["guilty"].broken)
    held.set()
    with pytest.raises(RunError) as caught:
        run.wait()
    assert [str(error.__cause__) for error in caught.value.exceptions] == ["early"]


@everywhere
def test_channel_broken_by_program_fails_the_run_with_its_cause(on: Any) -> None:
    gate = Gate()
    graph = Graph("r3")
    numbers = graph.input("numbers")
    numbers.map(lambda _: gate.wait(), on=on, name="double").sink(same)
    run = graph.start()
    run[numbers].put(1)
    gate.wait_held()  # no worker ends before the break is reported
    run[numbers].channel.abort(Lost("the program's"))
    wait_until(lambda: run.stats().state == "failed")
    gate.open()
    with pytest.raises(RunError) as caught:
        run.wait()
    (error,) = caught.value.exceptions
    assert error.stage == "numbers"
    assert str(error.__cause__) == "the program's"
    assert "channel 'numbers' (from 'numbers' to 'double') was aborted: Lost: the program's" in str(error)


def test_channel_broken_by_a_thread_of_user_code_is_noticed() -> None:
    def breaks(out: Out[int]) -> None:
        thread = threading.Thread(target=out.channel.abort, args=[Lost("elsewhere")])
        thread.start()
        thread.join()

    graph = Graph("r3")
    graph.stage(breaks, name="guilty").sink(same)
    assert str(failure_of(graph).__cause__) == "elsewhere"


@pytest.mark.parametrize("on", ["thread", "process"])
def test_channel_broken_by_a_forked_child_is_noticed(on: Any) -> None:
    def breaks(out: Out[int]) -> None:
        child = multiprocessing.get_context("fork").Process(
            target=out.channel.abort, args=[Lost("in the child")]
        )
        child.start()
        child.join()

    graph = Graph("r3")
    graph.stage(breaks, on=on, name="guilty").map(same, on="process").sink(same)
    assert str(failure_of(graph).__cause__) == "in the child"


def test_with_block_that_gets_broken_raises_the_cause() -> None:
    graph = Graph("r3")
    numbers = graph.stage(break_the_output, graph.source(itertools.count()), name="guilty").collect()
    with pytest.raises(RunError) as caught, graph.start() as run:
        for _ in run.iter(numbers):
            pass
    (error,) = caught.value.exceptions
    assert (error.stage, str(error.__cause__)) == ("guilty", "the disk is gone")


def test_channel_broken_while_the_run_stops_is_reported() -> None:
    gate = Gate()

    def breaks(numbers: In[int], out: Out[int]) -> None:
        gate.wait()
        out.channel.abort(Lost("while stopping"))

    graph = Graph("r3")
    graph.stage(breaks, graph.source(itertools.count()), name="guilty").sink(same)
    run = graph.start()
    gate.wait_held()
    run.stop()
    gate.open()
    with pytest.raises(RunError) as caught:
        run.wait()
    assert [str(error.__cause__) for error in caught.value.exceptions] == ["while stopping"]


def test_channel_broken_after_an_abort_is_not_a_failure() -> None:
    gate = Gate()
    graph = Graph("r5")
    graph.stage(pass_a_break_on, graph.source(itertools.count()), name="second").sink(lambda _: gate.wait())
    run = graph.start()
    gate.wait_held()
    run.abort()
    gate.open()
    run.wait()
    assert run.stats().state == "aborted"


def test_failure_after_a_channel_broke_is_also_reported() -> None:
    def breaks(out: Out[int]) -> None:
        out.channel.abort(Lost("first"))
        raise KeyError("second")

    for _ in range(TIMES):
        graph = Graph("r3")
        graph.stage(breaks, name="guilty").sink(same)
        with pytest.raises(RunError) as caught:
            graph.run()
        causes = [type(error.__cause__) for error in caught.value.exceptions]
        assert causes == [Lost, KeyError]


def test_abort_accepts_an_exception_or_nothing() -> None:
    def breaks(out: Out[int]) -> None:
        out.channel.abort("gone")  # type: ignore[arg-type]

    graph = Graph("c6")
    graph.stage(breaks, name="guilty").sink(same)
    error = failure_of(graph)
    assert isinstance(error.__cause__, TypeError)
    assert "cause must be an exception or None, got 'gone'" in str(error)

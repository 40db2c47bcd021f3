"""Test R3 and R5 for results: a run that fails or is aborted never presents a partial result as complete.

This must hold for every order of breaking the channels, and for every way of leaving the ports.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from runs import everywhere
from support.waiting import wait_until
from support.worker_latch import Gate

from flowchan import Broken, Channel, Graph, In, Out, Run, RunError
from flowchan.hosts import local
from flowchan.run.crew.run_ports import RunPorts
from flowchan.run.supervisor import Supervisor

WHERE = pytest.mark.parametrize("on", ["thread", "process", local(1)], ids=["thread", "process", "host"])


def let_end(supervisor: Supervisor, *names: str) -> None:
    """Wait until these channels have ended, or a remote worker has ended and its ports can be closed."""
    far = sum(bool(worker.host) for worker in supervisor.plan.workers)
    channels, parts = channels_of(supervisor), supervisor.crew.remote  # type: ignore[attr-defined]

    def ended() -> bool:
        left = sum(len(part._streams) for part in parts)
        return left < far or all(channels[name].drained or channels[name].broken for name in names)

    wait_until(ended)


def channels_of(supervisor: Supervisor) -> Mapping[str, Channel[Any]]:
    assert isinstance(supervisor.channels, RunPorts)
    return supervisor.channels.channels


@pytest.fixture
def before_the_break(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Supervisor], None]], None]:
    """Return a function that sets an action to run just before the supervisor breaks a run's channels."""
    breaking: list[Supervisor] = []

    def plant(first: Callable[[Supervisor], None]) -> None:
        def note(supervisor: Supervisor, cause: BaseException | None) -> None:
            breaking.append(supervisor)
            decided(supervisor, cause)

        def break_all(ports: RunPorts, cause: BaseException | None) -> None:
            first(breaking.pop())
            usual(ports, cause)

        monkeypatch.setattr(Supervisor, "_break", note)
        monkeypatch.setattr(RunPorts, "break_all", break_all)

    decided, usual = Supervisor._break, RunPorts.break_all
    return plant


class Lost(Exception):
    """Exception that stages and programs raise, or that breaks channels."""


def same(item: Any) -> Any:
    return item


def endless(gate: Gate) -> Iterator[int]:
    yield from range(3)
    gate.wait()


# --- the run is aborted, and its channels break one at a time ---


@WHERE
@pytest.mark.parametrize("first", ["numbers", "one", "two"])
def test_stages_after_an_aborted_stage_see_a_broken_channel(
    first: str, on: Any, before_the_break: Any
) -> None:
    gate = Gate()
    graph = Graph("r5")
    numbers = graph.source(endless, gate, name="numbers")
    result = numbers.map(same, on=on, name="one").map(same, on=on, name="two").collect()
    behind = [name for name in ("one", "two") if name >= first or first == "numbers"]

    def break_one(supervisor: Supervisor) -> None:
        channels_of(supervisor)[first].abort()
        let_end(supervisor, *behind)
        gate.open()

    before_the_break(break_one)
    run = graph.start()
    gather(run, result, 3)
    run.abort()
    assert result not in run.wait()


def gather(run: Run, result: Any, number: int) -> None:
    """Let the run collect its results, and wait until it has ``number`` items of ``result``."""
    run._gathering.begin()
    (name,) = [edge.name for edge in run._plan.edges if edge.reader == result.stage]
    wait_until(lambda: run._ports.channels[name].stats().items_out >= number)


def round_and_round(again: In[int], work: Out[int], done: Out[int]) -> None:
    work.put(0)
    for number in again:
        if number < 3:
            done.put(number)
        work.put(number + 1)


@WHERE
@pytest.mark.parametrize("first", ["step", "round_and_round.work"])
def test_reader_of_a_loop_does_not_see_a_clean_end(first: str, on: Any, before_the_break: Any) -> None:
    graph = Graph("loop")
    again = graph.feedback("again")
    work, done = graph.stage(round_and_round, again, on=on)
    again.feed(work.map(same, on=on, name="step"))
    result = done.map(same, name="last").collect()

    def break_one(supervisor: Supervisor) -> None:
        channels_of(supervisor)[first].abort()
        let_end(supervisor, "round_and_round.done", "last")

    before_the_break(break_one)
    run = graph.start()
    gather(run, result, 3)
    run.abort()
    assert result not in run.wait()


def both(left: Out[int], right: Out[int]) -> None:
    for number in range(3):
        right.put(number)
    for number in itertools.count():
        left.put(number)


@everywhere
def test_abort_in_one_branch_does_not_cleanly_end_another_branch(on: Any, before_the_break: Any) -> None:
    """The stage before both branches learns only that its left output has lost its readers."""
    gate = Gate()
    graph = Graph("branches")
    left, right = graph.stage(both, on=on)
    left.map(gate.wait, on=on, name="hold").map(same, name="end").sink(same)
    result = right.collect()

    def break_one(supervisor: Supervisor) -> None:
        channels_of(supervisor)["hold"].abort()
        gate.open()
        let_end(supervisor, "both.right")

    before_the_break(break_one)
    run = graph.start()
    gather(run, result, 3)
    gate.wait_held()
    run.abort()
    assert result not in run.wait()


@everywhere
def test_exception_in_the_with_block_ends_no_branch_cleanly(on: Any, before_the_break: Any) -> None:
    seen: list[Any] = []
    graph = Graph("branches")
    left, right = graph.stage(both, on=on)
    items = left.collect()
    right.collect(name="all").sink(seen.append)
    before_the_break(lambda supervisor: let_end(supervisor, "both.right", "all"))
    run = graph.start()
    wait_until(lambda: run._ports.channels["both.right"].stats().items_out == 3)
    read = run.iter(items)
    with pytest.raises(Lost), run:
        raise Lost(next(read))
    assert seen == []
    assert run.state == "aborted"


# --- a stage breaks its own channel or fails ---


def break_the_input(numbers: In[int], out: Out[int]) -> None:
    for _ in range(3):
        out.put(numbers.get())
    numbers.channel.abort(Lost())


def break_the_input_and_close(numbers: In[int], out: Out[int]) -> None:
    try:
        break_the_input(numbers, out)
    finally:
        out.close()


def meet_a_break_in_a_block(numbers: In[int], out: Out[int]) -> None:
    with numbers, out:
        for _ in range(3):
            out.put(numbers.get())
        numbers.channel.abort(Lost())
        numbers.get()


def meet_a_break_and_say_nothing(numbers: In[int], out: Out[int]) -> None:
    with out:
        try:
            break_the_input(numbers, out)
            numbers.get()
        except Broken:
            pass


def fail_in_a_block(numbers: In[int], out: Out[int]) -> None:
    with numbers, out:
        for _ in range(3):
            out.put(numbers.get())
        raise Lost


def fail(numbers: In[int], out: Out[int]) -> None:
    for _ in range(3):
        out.put(numbers.get())
    raise Lost


@pytest.mark.each_value
@pytest.mark.parametrize(
    "harm",
    [
        break_the_input, break_the_input_and_close, meet_a_break_in_a_block, meet_a_break_and_say_nothing,
        fail_in_a_block, fail,
    ],
)  # fmt: skip
@WHERE
def test_stages_after_a_failing_stage_get_no_partial_results(
    harm: Any, on: Any, before_the_break: Any
) -> None:
    seen: list[Any] = []
    early: list[bool] = []
    graph = Graph("r3")
    guilty = graph.stage(harm, graph.source(itertools.count), on=on, name="guilty")
    guilty.map(same, on=on, name="between").collect(name="all").sink(seen.append)

    def let_all_end(supervisor: Supervisor) -> None:
        if "fail" in harm.__name__:  # the stage is waiting for the supervisor
            early.append(channels_of(supervisor)["guilty"].closed)
        else:
            let_end(supervisor, "guilty", "between", "all")

    before_the_break(let_all_end)
    with pytest.raises(RunError) as caught:
        graph.run()
    (error,) = caught.value.exceptions
    assert (error.stage, type(error.__cause__).__name__) == ("guilty", "Lost")
    assert seen == []
    assert not any(early)


@pytest.mark.each_value
@pytest.mark.usefixtures("_method")
@pytest.mark.parametrize("pooled", [False, True])
def test_exit_of_a_failed_process_does_not_close_its_channels(pooled: bool, before_the_break: Any) -> None:
    seen: list[Any] = []
    early: list[bool] = []
    graph = Graph("r3")
    guilty = graph.stage(fail, graph.source(itertools.count), on="process", name="guilty")
    guilty.collect(name="all").sink(seen.append)

    def let_it_end(supervisor: Supervisor) -> None:
        processes = supervisor.crew.local.processes  # type: ignore[attr-defined]
        wait_until(lambda: all(process.ended() for process in processes.values()))
        early.append(channels_of(supervisor)["guilty"].closed)

    before_the_break(let_it_end)
    with contextlib.ExitStack() as stack, pytest.raises(RunError):
        (stack.enter_context(graph.pool()) if pooled else graph).run()
    assert seen == []
    assert early == [False]

"""Test R3 and R5 for channel errors in stages.

If a stage's own channel closes or breaks, the stage has not failed. An exception that the user's code raises
is a failure, even if it has the same class.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Gate, everywhere, script, start
from support.waiting import wait_blocked

from flowchan import Broken, Channel, ChannelError, Closed, Graph, In, Out, RunError, Stream

TIMES = 5, 50
"""Normal and long numbers of repetitions, because the worker that encounters the break first is random."""


def same(item: Any) -> Any:
    return item


def endless(item: int) -> Iterator[int]:
    return itertools.repeat(item)


async def endless_async(item: int) -> AsyncIterator[int]:
    while True:
        yield item


async def together(numbers: In[int], out: Out[int]) -> None:
    async def pass_on() -> None:
        async for number in numbers:
            await out.aput(number)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pass_on())
        tasks.create_task(pass_on())


async def same_async(item: int) -> int:
    return item


OPERATORS: dict[str, Callable[[Graph, Stream], Stream]] = {
    "map": lambda _, numbers: numbers.map(same, capacity=1),
    "map in processes": lambda _, numbers: numbers.map(same, on="process", capacity=1),
    "async map": lambda _, numbers: numbers.map(same_async, capacity=1),
    "filter": lambda _, numbers: numbers.filter(lambda _: True, capacity=1),
    "flat_map": lambda _, numbers: numbers.flat_map(endless, capacity=1),
    "flat_map with retries": lambda _, numbers: numbers.flat_map(endless, retries=2, capacity=1),
    "flat_map of several workers": lambda _, numbers: numbers.flat_map(endless, workers=3, capacity=1),
    "flat_map in processes": lambda _, numbers: numbers.flat_map(
        endless, on="process", workers=2, capacity=1
    ),
    "async flat_map": lambda _, numbers: numbers.flat_map(endless_async, capacity=1),
    "unbatch": lambda _, numbers: numbers.map(endless).unbatch(capacity=1),
    "batch": lambda _, numbers: numbers.batch(2, capacity=1),
    "tee": lambda graph, numbers: graph.merge(*numbers.tee(2, capacity=1), capacity=1),
    "partition": lambda graph, numbers: graph.merge(*numbers.partition(same, 2, capacity=1), capacity=1),
    "zip": lambda _, numbers: numbers.zip(capacity=1),
    "allreduce": lambda _, numbers: numbers.allreduce(capacity=1),
    "stage of tasks": lambda graph, numbers: graph.stage(together, numbers, capacity=1),
}
busy = pytest.mark.parametrize("operator", OPERATORS)


@busy
def test_writer_blocked_during_an_abort_is_not_a_failure(operator: str) -> None:
    gate = Gate()
    graph = Graph("r5")
    OPERATORS[operator](graph, graph.source(itertools.count(1), name="numbers")).sink(
        lambda _: gate.wait(), name="end"
    )
    run = graph.start()
    gate.wait_held()
    (full,) = (edge.name for edge in graph.edges if edge.reader == "end")
    wait_blocked(run._ports.channels[full], writers=1)
    run.abort()
    gate.open()
    run.wait()
    assert run.stats().state == "aborted"


@busy
def test_run_error_names_only_the_failing_stage(operator: str, long_walk: bool) -> None:
    def fail_at_three(item: Any) -> None:
        seen.append(item)
        if len(seen) == 3:
            raise ValueError("guilty")

    for _ in range(TIMES[long_walk]):
        seen: list[Any] = []
        graph = Graph("r3")
        OPERATORS[operator](graph, graph.source(itertools.count(1))).sink(fail_at_three)
        with pytest.raises(RunError) as caught:
            graph.run()
        assert [error.stage for error in caught.value.exceptions] == ["fail_at_three"]


@everywhere
def test_early_end_does_not_fail_items_of_flat_map(on: Any) -> None:
    graph = Graph("r2")
    numbers = graph.source(itertools.count()).flat_map(endless, on=on, retries=1)
    failed = numbers.errors.collect()
    taken = numbers.take(3).collect()
    results = graph.run()
    assert (results[taken], results[failed]) == ([0, 0, 0], [])


def test_early_end_does_not_fail_items_of_async_flat_map() -> None:
    graph = Graph("r2")
    numbers = graph.source(itertools.count()).flat_map(endless_async, retries=1)
    failed = numbers.errors.collect()
    taken = numbers.take(3).collect()
    results = graph.run()
    assert (results[taken], results[failed]) == ([0, 0, 0], [])


def test_async_generator_is_cleaned_up_before_its_worker_ends() -> None:
    cleaned = []

    async def numbers(item: int) -> AsyncIterator[int]:
        try:
            while True:
                yield item
        finally:
            await asyncio.sleep(0)
            cleaned.append(item)

    graph = Graph("r2")
    taken = graph.source([7]).flat_map(numbers).take(2).collect()
    assert graph.run()[taken] == [7, 7]
    assert cleaned == [7]


def ended(error: type[ChannelError]) -> Channel[int]:
    channel: Channel[int] = Channel()
    if error is Broken:
        channel.abort(ValueError("theirs"))
    channel.close()
    return channel


def from_own_channel(error: type[ChannelError]) -> Callable[[int], Iterator[int]]:
    def function(item: int) -> Iterator[int]:
        yield item
        ended(error).put(item)

    return function


def from_own_channel_async(error: type[ChannelError]) -> Callable[[int], AsyncIterator[int]]:
    async def function(item: int) -> AsyncIterator[int]:
        yield item
        await ended(error).aput(item)

    return function


@pytest.mark.parametrize("error", [Closed, Broken])
@pytest.mark.parametrize("made", [from_own_channel, from_own_channel_async])
def test_end_of_a_user_channel_fails_the_item(made: Any, error: Any) -> None:
    graph = Graph("r3")
    numbers = graph.source([1, 2]).flat_map(made(error))
    failed = numbers.errors.map(lambda failed: (failed.item, type(failed.error))).collect()
    good = numbers.collect()
    results = graph.run()
    assert (results[good], results[failed]) == ([1, 2], [(1, error), (2, error)])


class Unsendable:
    """Item that raises an error of an unrelated channel when it is pickled."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        ended(Closed).put(self.number)


@pytest.mark.parametrize("operator", ["map", "flat_map"])
@pytest.mark.parametrize("awaits", [False, True])
def test_channel_error_while_pickling_fails_the_item(operator: str, awaits: bool) -> None:
    def bad(item: int) -> Any:
        return [Unsendable(item), item][item % 2]

    async def bad_async(item: int) -> Any:
        return bad(item) if operator == "map" else [bad(item)]

    graph = Graph("c13")
    function = bad_async if awaits else bad if operator == "map" else lambda item: [bad(item)]
    numbers = getattr(graph.source(range(4)), operator)(function, name="bad")
    failed = numbers.errors.map(lambda failed: failed.item).collect()
    good = numbers.map(same, on="process").collect()
    results = graph.run()
    assert (results[good], results[failed]) == ([1, 3], [0, 2])


@everywhere
def test_retry_of_flat_map_fails_again_at_an_unpicklable_element(on: Any) -> None:
    """Each retry repeats the element that cannot be sent, so the item fails again."""

    def elements(item: int) -> list[Any]:
        return [item, lambda: (_ for _ in ()), (_ for _ in ())]

    graph = Graph("c13")
    numbers = graph.source([1]).flat_map(elements, on=on, retries=1)
    failed = numbers.errors.map(lambda failed: failed.attempts).collect()
    numbers.map(same, on="process").sink(same)
    assert graph.run()[failed] == [2]


PROGRAM = """
    import itertools, threading
    from flowchan import Graph

    def hold(item):
        print("going", flush=True)
        threading.Event().wait()

    graph = Graph("busy")
    graph.source(itertools.count(1)).VERB(capacity=1).sink(hold, on="process")

    if __name__ == "__main__":
        graph.run()
"""


COMMAND = ("-c", "from flowchan.cli.commands import main; main()", "run")


@pytest.mark.parametrize("operator", ["flat_map(itertools.repeat, ", "map(itertools.repeat).unbatch("])
@pytest.mark.parametrize(("command", "code"), [((), -signal.SIGINT), (COMMAND, 130)])
def test_second_ctrl_c_is_an_interrupt_and_not_a_failure(
    operator: str, command: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    with start(*command, script(tmp_path, PROGRAM.replace("VERB(", operator))) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "going\n", process.communicate()
        process.send_signal(signal.SIGINT)
        while "stopping" not in (line := process.stderr.readline()):
            assert line, "it has ended without a word"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == code, err
    assert "RunError" not in err
    assert "failed" not in err

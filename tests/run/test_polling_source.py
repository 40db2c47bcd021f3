"""Test R2 and R5 for sources that are waiting.

An async generator is cancelled at its ``await``. A stage that only writes can check ``out.closed`` to see
that its readers have left.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import warnings
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from runs import Gate, everywhere
from support.waiting import wait_until

from flowchan import Channel, Graph, Out, RunError
from flowchan.run.worker.async_worker import Tasks


def same(item: Any) -> Any:
    return item


class Log:
    """Source that follows a log file that no longer grows.

    ``cancels`` records each request to cancel a stage's tasks.
    """

    def __init__(self, cancels: list[Tasks]) -> None:
        self.cancels = cancels
        self.cleaned: list[str] = []

    async def tail(self, lines: int) -> AsyncIterator[int]:
        try:
            for line in range(lines):
                yield line
            await asyncio.Event().wait()
        finally:
            # later requests must not cancel the task during its cleanup
            cancelled = len(self.cancels)
            await asyncio.to_thread(wait_until, lambda: len(self.cancels) >= cancelled + 2)
            self.cleaned.append("tail")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    cancels: list[Tasks] = []
    cancel = Tasks.cancel

    def counted(tasks: Tasks) -> None:
        cancels.append(tasks)
        cancel(tasks)

    monkeypatch.setattr(Tasks, "cancel", counted)
    return Log(cancels)


# --- async generators as sources ---


def test_async_generator_is_a_source() -> None:
    async def count(first: int, *, last: int) -> AsyncIterator[int]:
        for number in range(first, last):
            await asyncio.sleep(0)
            yield number

    graph = Graph("polls")
    numbers = graph.source(count, 3, last=6).map(same, on="process").collect()
    assert graph.run()[numbers] == [3, 4, 5]


def test_coroutine_that_returns_an_iterable_is_a_source() -> None:
    async def ask(number: int) -> list[int]:
        await asyncio.sleep(0)
        return [number, number]

    graph = Graph("polls")
    numbers = graph.source(functools.partial(ask, 7)).collect()
    assert graph.run()[numbers] == [7, 7]


def test_stop_cancels_an_async_generator_that_cleans_up(log: Log) -> None:
    graph = Graph("polls")
    lines = graph.source(log.tail, 3).map(same).collect()
    run = graph.start()
    wait_until(lambda: run.stats().stages[0].items_out == 3)
    run.stop()
    assert run.wait()[lines] == [0, 1, 2]
    assert run.stats().state == "stopped"
    assert log.cleaned == ["tail"]


def test_abort_cancels_an_async_generator_that_cleans_up(log: Log) -> None:
    graph = Graph("polls")
    graph.source(log.tail, 0).sink(same)
    run = graph.start()
    run.abort()
    run.wait()
    assert run.stats().state == "aborted"


@pytest.mark.parametrize("lines", [2, 1_000])
def test_early_end_cancels_an_async_generator_that_cleans_up(log: Log, lines: int) -> None:
    graph = Graph("polls")
    taken = graph.source(log.tail, lines).take(2).collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert graph.run()[taken] == [0, 1]
    assert log.cleaned == ["tail"]


def test_early_end_cancels_a_source_while_the_run_continues(log: Log) -> None:
    gate = Gate()
    graph = Graph("polls")
    graph.source(log.tail, 3).take(2).sink(same)
    graph.source([1]).sink(lambda _: gate.wait())
    run = graph.start()
    gate.wait_held()
    wait_until(lambda: log.cleaned == ["tail"])
    gate.open()
    run.wait()


def test_async_generator_that_raises_fails_the_run() -> None:
    async def bad() -> AsyncIterator[int]:
        yield 1
        raise ValueError("no more")

    graph = Graph("polls")
    graph.source(bad).sink(same)
    with pytest.raises(RunError) as caught:
        graph.run()
    (error,) = caught.value.exceptions
    assert (error.stage, str(error.__cause__)) == ("bad", "no more")


@pytest.mark.parametrize("annotation", [AsyncIterator[int], AsyncGenerator[int, None]])
def test_annotation_of_an_async_generator_gives_the_item_type(annotation: Any) -> None:
    async def numbers() -> Any:
        yield 1

    def to_upper(item: str) -> str:
        return item.upper()

    numbers.__annotations__["return"] = annotation
    graph = Graph("polls")
    stream = graph.source(numbers)
    assert stream.item is int
    stream.map(to_upper).sink(same)
    (problem,) = graph.check()
    assert (problem.rule, problem.stage) == ("type", "to_upper")


def test_source_rejects_an_async_generator_that_was_called(log: Log) -> None:
    graph = Graph("polls")
    with pytest.raises(
        TypeError,
        match=(
            r"items must be an iterable or a callable, got .*; pass the async .*graph.source\(tail, path\)"
        ),
    ):
        graph.source(log.tail(1))  # type: ignore[arg-type]


# --- out.closed ---


def poll(out: Out[int], started: Channel[int], ended: Channel[str]) -> None:
    """Put one item, then poll until the port is closed."""
    out.put(0)
    started.close()
    wait_until(lambda: out.closed)
    ended.put("saw it")


class Polls:
    """Stage that polls, on any placement, and reports through two channels."""

    def __init__(self) -> None:
        self.started: Channel[int] = Channel(1, across="processes")
        self.ended: Channel[str] = Channel(1, across="processes")

    def declare(self, graph: Graph, on: Any) -> Any:
        return graph.stage(poll, started=self.started, ended=self.ended, on=on)

    def wait_started(self) -> None:
        wait_until(lambda: self.started.closed)


@everywhere
def test_stage_that_only_writes_sees_a_stop(on: Any) -> None:
    polls = Polls()
    graph = Graph("polls")
    polls.declare(graph, on).sink(same)
    run = graph.start()
    polls.wait_started()
    run.stop()
    run.wait()
    assert polls.ended.get() == "saw it"


@everywhere
def test_stage_that_only_writes_sees_an_abort(on: Any) -> None:
    polls = Polls()
    graph = Graph("polls")
    polls.declare(graph, on).sink(same)
    run = graph.start()
    polls.wait_started()
    run.abort()
    run.wait()
    assert polls.ended.get() == "saw it"


@everywhere
def test_stage_that_only_writes_sees_its_readers_leave(on: Any) -> None:
    polls = Polls()
    graph = Graph("polls")
    items = polls.declare(graph, on).map(same, on=on).collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with graph.start() as run:
            for item in run.iter(items):
                assert item == 0
                break
        run._supervisor._thread.join()  # type: ignore[union-attr]
    assert polls.ended.get() == "saw it"


@pytest.mark.parametrize("across", ["threads", "processes"])
def test_port_counts_as_closed_once_no_item_can_pass_through(across: Any) -> None:
    channel: Channel[int] = Channel(across=across)
    out, items = channel.writer(), channel.reader()
    assert (out.closed, items.closed) == (False, False)
    out.put(1)
    channel.close()
    assert (out.closed, items.closed) == (True, False)
    assert items.get() == 1
    assert not items.closed  # the item was taken but may be given back
    items.close()
    assert items.closed
    broken: Channel[int] = Channel(across=across)
    out, items = broken.writer(), broken.reader()
    broken.abort()
    assert (out.closed, items.closed) == (True, True)
    left: Channel[int] = Channel(across=across)
    out, items = left.writer(), left.reader()
    items.close()
    assert out.closed
    drained: Channel[int] = Channel(across=across)
    out, items = drained.writer(), drained.reader()
    out.close()
    assert (out.closed, items.closed) == (True, True)


# --- sources that end soon ---


def test_abandoned_source_that_ends_soon_causes_no_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flowchan.run.policy.decisions.GRACE", 0.5)
    released = threading.Event()
    ended = threading.Event()

    def camera() -> Any:
        yield 1
        released.wait()
        ended.set()

    graph = Graph("polls")
    items = graph.source(camera).collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with graph.start() as run:
            for _ in run.iter(items):
                break
        assert not ended.is_set()  # the run did not wait for the source
        released.set()
        run._supervisor._thread.join()  # type: ignore[union-attr]
    assert ended.is_set()

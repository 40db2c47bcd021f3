"""Test the writing end of a ``per_worker`` input on channels between threads, without a run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from support.peers import ThreadPeer
from support.waiting import wait_blocked

from flowchan import Channel, Closed, Full
from flowchan.channel.addressed import Addressed, ports_of_end


class Two:
    """Addressed end of two channels, each with a reader; it counts the items that no reader wants."""

    def __init__(self, capacity: int = 4, counts: bool = True) -> None:
        self.channels: list[Channel[Any]] = [Channel(capacity) for _ in range(2)]
        self.readers = [channel.reader() for channel in self.channels]
        self.unwanted = 0
        self.end = Addressed([channel.writer() for channel in self.channels], self._count if counts else None)

    def _count(self) -> None:
        self.unwanted += 1

    def inside(self) -> list[int]:
        return [len(channel) for channel in self.channels]


def put(two: Two, item: Any, how: str) -> None:
    if how == "aput":
        asyncio.run(two.end.aput(item))
    elif how == "put_many":
        two.end.put_many([item])
    else:
        getattr(two.end, how)(item)


HOW = pytest.mark.parametrize("how", ["put", "put_nowait", "put_many", "aput"])


@HOW
def test_item_goes_to_the_worker_that_it_names(how: str) -> None:
    two = Two()
    for worker, item in ((2, "a"), (1, "b"), (2, "c")):
        put(two, (worker, item), how)
    assert [reader.get_many(9) for reader in two.readers] == [["b"], ["a", "c"]]
    assert two.unwanted == 0


@HOW
@pytest.mark.parametrize("worker", [0, -1, 3, 100])
def test_unknown_worker_is_refused(how: str, worker: int) -> None:
    two = Two()
    with pytest.raises(ValueError, match=f"put: worker must be between 1 and 2, got {worker}"):
        put(two, (worker, "a"), how)
    assert two.inside() == [0, 0]


@HOW
@pytest.mark.parametrize(
    "item", ["ab", [1, "a"], (1,), (1, "a", "b"), ("1", "a"), (1.0, "a"), (True, "a"), None]
)
def test_item_that_is_not_a_numbered_pair_is_refused(how: str, item: Any) -> None:
    two = Two()
    with pytest.raises(TypeError, match=r"put: item must be a pair \(worker, item\), got"):
        put(two, item, how)
    assert two.inside() == [0, 0]


@HOW
def test_item_for_an_ended_worker_is_unwanted(how: str) -> None:
    two = Two()
    two.readers[0].close()
    put(two, (1, "a"), how)
    put(two, (2, "b"), how)
    assert (two.unwanted, two.inside()) == (1, [0, 1])


@HOW
def test_item_for_an_ended_worker_raises_without_a_callback(how: str) -> None:
    two = Two(counts=False)
    two.readers[0].close()
    with pytest.raises(Closed):
        put(two, (1, "a"), how)


@HOW
def test_put_raises_once_all_workers_have_ended(how: str) -> None:
    two = Two()
    assert not two.end.closed
    two.readers[0].close()
    assert not two.end.closed
    two.readers[1].close()
    assert two.end.closed
    with pytest.raises(Closed):
        put(two, (1, "a"), how)
    assert two.unwanted == 0


class RaisesClosed:
    def __reduce__(self) -> Any:
        raise Closed("another channel is closed")


def test_item_that_cannot_be_pickled_is_not_unwanted() -> None:
    unwanted: list[None] = []
    channel: Channel[Any] = Channel(4, across="processes")
    with (
        channel.reader(),
        Addressed([channel.writer()], lambda: unwanted.append(None)) as end,
        pytest.raises(TypeError, match="another channel is closed"),
    ):
        end.put((1, RaisesClosed()))
    assert unwanted == []


@HOW
def test_put_through_a_port_that_the_caller_closed_raises(how: str) -> None:
    two = Two()
    with two.channels[0].writer():
        two.end.ports[0].close()
        with pytest.raises(ValueError, match=r"this port of .* was closed"):
            put(two, (1, "a"), how)
    assert (two.unwanted, two.inside()) == (0, [0, 0])


def test_closed_error_of_a_signal_handler_reaches_the_caller() -> None:
    two, other = Two(capacity=1), Channel[int]()
    other.close()
    two.end.put((1, "a"))

    def use_other(number: int, frame: Any) -> None:
        other.put(1)

    before = signal.signal(signal.SIGUSR1, use_other)
    try:
        waiter = ThreadPeer(interrupt_when_blocked, two.channels[0])
        with pytest.raises(Closed, match="Channel"):
            two.end.put((1, "b"))
        waiter.result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (two.unwanted, two.inside()) == (0, [1, 0])


def interrupt_when_blocked(channel: Channel[Any]) -> None:
    wait_blocked(channel, writers=1)
    os.kill(os.getpid(), signal.SIGUSR1)


def test_put_nowait_raises_if_the_channel_is_full() -> None:
    two = Two(capacity=1)
    two.end.put_nowait((1, "a"))
    with pytest.raises(Full):
        two.end.put_nowait((1, "b"))
    with pytest.raises(Full):
        two.end.put((1, "b"), timeout=0.01)
    two.end.put_nowait((2, "c"))


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_error_in_put_many_tells_how_many_items_were_put(timeout: float) -> None:
    two = Two(capacity=2)
    items = [(1, "a"), (2, "b"), (1, "c"), (1, "d"), (2, "e")]
    with pytest.raises(Full) as raised:
        two.end.put_many(items, timeout)
    assert raised.value.items_put == 3
    assert two.inside() == [2, 1]
    with pytest.raises(TypeError) as wrong:
        two.end.put_many([(2, "e"), "wrong"])  # type: ignore[list-item]
    assert wrong.value.items_put == 1  # type: ignore[attr-defined]


def test_error_of_the_iterable_counts_the_items_put_before() -> None:
    def items() -> Iterator[tuple[int, str]]:
        yield 1, "a"
        yield 2, "b"
        raise KeyError("no more")

    two = Two()
    with pytest.raises(KeyError) as raised:
        two.end.put_many(items())
    assert raised.value.items_put == 2  # type: ignore[attr-defined]
    assert two.inside() == [1, 1]


def test_put_many_has_no_limit_by_default() -> None:
    two = Two()
    two.end.put_many((1 + number % 2, number) for number in range(6))
    assert two.inside() == [3, 3]
    two.end.put_many([(1, "a")], timeout=60)
    assert two.inside() == [4, 3]


def test_end_prefers_a_broken_channel_to_an_open_one() -> None:
    two = Two()
    first, second = two.channels
    assert two.end.channel is first
    two.readers[0].close()
    assert two.end.channel is second
    two.readers[1].close()
    assert two.end.channel is first
    two = Two()
    two.channels[1].abort()
    assert two.end.channel is two.channels[1]


@pytest.mark.parametrize("error", [None, KeyError("wrong")])
def test_leaving_the_with_block_closes_all_channels(error: Exception | None) -> None:
    two = Two()
    with contextlib.suppress(KeyError), two.end as end:
        assert end is two.end
        if error is not None:
            raise error
    assert [channel.closed for channel in two.channels] == [True, True]


def test_close_closes_the_port_of_each_worker() -> None:
    two = Two()
    two.end.close()
    assert [channel.closed for channel in two.channels] == [True, True]


def test_ports_of_an_end_are_those_of_all_workers() -> None:
    two = Two()
    assert ports_of_end(two.end) == two.end.ports
    writer = two.channels[0].writer()
    assert ports_of_end(writer) == (writer,)
    writer.close()

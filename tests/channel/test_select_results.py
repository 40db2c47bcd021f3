"""Test what ``select`` returns and raises for mixed operations on channels between threads."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flowchan import Channel, Drained, NothingReady, select


def channels(count: int) -> list[Channel[Any]]:
    return [Channel(1) for _ in range(count)]


def full(count: int) -> list[Channel[Any]]:
    made = channels(count)
    for channel in made:
        channel.put("old")
    return made


@pytest.mark.parametrize("chosen", range(3))
@pytest.mark.parametrize("kind", ["gets", "puts", "ready"])
def test_select_names_the_channel_of_the_only_possible_operation(kind: str, chosen: int) -> None:
    """The numbers of gets, puts and ready channels differ, so that a wrong index is noticed."""
    gets, writing, ready = channels(4), full(3), channels(3)
    puts = [(channel, f"new {place}") for place, channel in enumerate(writing)]
    if kind == "gets":
        gets[chosen].put("item")
        expected: Any = (gets[chosen], "item", False)
    elif kind == "puts":
        writing[chosen].get()
        expected = (writing[chosen], f"new {chosen}", True)
    else:
        ready[chosen].put("item")
        expected = (ready[chosen], None, False)
    done = select(gets, puts, timeout=60, ready=ready)
    assert (done.channel, done.item, done.put) == expected
    counts = {"gets": ([0] * 4, [1] * 3, [0] * 3), "puts": ([0] * 4, [1] * 3, [0] * 3)}
    after = tuple([len(channel) for channel in group] for group in (gets, writing, ready))
    assert after == counts.get(kind, ([0] * 4, [1] * 3, [int(place == chosen) for place in range(3)]))


@pytest.mark.parametrize(("gets", "puts", "ready"), [(1, 2, 3), (2, 0, 0), (0, 3, 0), (0, 0, 1), (5, 3, 2)])
def test_error_counts_the_operations_that_were_not_possible(gets: int, puts: int, ready: int) -> None:
    writing = [(channel, "new") for channel in full(puts)]
    with pytest.raises(NothingReady) as raised:
        select(channels(gets), writing, timeout=0, ready=channels(ready))
    total = gets + puts + ready
    assert str(raised.value) == f"select: none of {total} operations was possible within 0 s"


def test_select_of_drained_channels_raises_at_once() -> None:
    drained = channels(2)
    for channel in drained:
        channel.close()
    with pytest.raises(Drained, match="all channels in gets are drained"):
        select(drained)
    open_channel: Channel[str] = Channel(1)
    assert select(drained, [(open_channel, "a")]).channel is open_channel


@pytest.mark.parametrize("pair", [("channel", "item"), ["channel", "item"]], ids=["tuple", "list"])
def test_pair_may_be_a_tuple_or_a_list(pair: Any) -> None:
    (channel,) = channels(1)
    done = select(puts=[type(pair)([channel, "item"])])
    assert (done.item, done.put, channel.get()) == ("item", True, "item")


class NamedPair(tuple[Any, ...]):
    """A subclass of tuple, like a named tuple."""


def test_pair_may_be_of_a_subclass_of_tuple() -> None:
    (channel,) = channels(1)
    assert select(puts=[NamedPair((channel, "item"))]).channel is channel  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", [(), (1,), (1, 2, 3), [1], [1, 2, 3], "ab", {"a": 1, "b": 2}, None])
def test_put_that_is_not_a_pair_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"select: puts must be pairs \(channel, item\), got "):
        select(puts=[wrong])


def test_channel_or_port_instead_of_a_list_is_refused() -> None:
    (channel,) = full(1)
    with channel.reader() as reader, channel.writer() as writer:
        for gets in (channel, reader):
            with pytest.raises(TypeError, match="gets must be a list of channels and ports"):
                select(gets)  # type: ignore[call-overload]
        for puts in (channel, reader, writer):
            with pytest.raises(TypeError, match="puts must be a list of pairs"):
                select(puts=puts)  # type: ignore[call-overload]
        for ready in (channel, reader, [reader], [channel, writer]):
            with pytest.raises(TypeError, match="ready must be a list of channels"):
                select(ready=ready)  # type: ignore[call-overload]
    assert len(channel) == 1  # no item was taken


def test_result_of_select_cannot_be_changed() -> None:
    (channel,) = full(1)
    done = select([channel])
    with pytest.raises(dataclasses.FrozenInstanceError):
        done.item = "other"  # type: ignore[misc]

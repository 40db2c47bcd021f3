"""Test that inspecting a channel's items takes nothing and changes nothing."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from support.optional_packages import optional
from support.peers import ProcessPeer, ThreadPeer

from flowchan import Channel
from flowchan.items.item_texts import SeenItem

numpy = optional("numpy")

ACROSS = pytest.mark.parametrize("across", ["threads", "processes", "hosts"])
LARGE = 1 << 20


def seen(channel: Channel[Any], first: int = 0, most: int = 100, most_bytes: int = LARGE) -> list[SeenItem]:
    return [SeenItem(*one) for one in channel._peek(first, most, most_bytes)]


def shown(channel: Channel[Any], first: int = 0, most: int = 100) -> list[tuple[int, str]]:
    return [(one.number, one.text()) for one in seen(channel, first, most)]


@ACROSS
def test_look_shows_waiting_items_and_leaves_them(across: Any) -> None:
    channel: Channel[Any] = Channel(8, across=across)
    items = [None, "a", (1, 2.5), b"bytes", {"key": [1]}]
    channel.put_many(items)
    before = channel.stats()
    expected = [*enumerate(["None", "'a'", "(1, 2.5)", "b'bytes'", "{'key': [1]}"])]
    for _ in range(2):
        assert shown(channel) == expected
    assert channel.stats() == before
    assert channel.get_many(9) == items
    assert seen(channel) == []


@ACROSS
def test_number_of_an_item_stays_when_earlier_items_are_taken(across: Any) -> None:
    channel: Channel[Any] = Channel(8, across=across)
    channel.put_many("abcd")
    channel.get()
    assert shown(channel) == [(1, "'b'"), (2, "'c'"), (3, "'d'")]
    assert shown(channel, first=2) == [(2, "'c'"), (3, "'d'")]
    assert shown(channel, first=1, most=1) == [(1, "'b'")]
    assert shown(channel, first=4) == shown(channel, most=0) == []


def test_taken_items_are_seen_until_they_are_finished() -> None:
    channel: Channel[Any] = Channel(8, across="processes")
    channel.put_many("abc")
    first, second = channel.reader(), channel.reader()
    first.get(), second.get()
    assert [(one.number, one.leased) for one in seen(channel)] == [(0, True), (1, True), (2, False)]
    first._give_up()  # the reader's item returns to the channel
    assert [(one.number, one.leased) for one in seen(channel)] == [(0, False), (1, True), (2, False)]
    second.close()
    assert [(one.number, one.leased) for one in seen(channel)] == [(0, False), (2, False)]
    assert channel.get_many(9) == ["a", "c"]


def test_item_beyond_the_limit_is_not_copied() -> None:
    channel: Channel[Any] = Channel(8, across="processes")
    for size in (1000, 100_000, 1000):
        channel.put(bytes(size))
    looks = seen(channel, most_bytes=2000)
    assert [one.payload is None for one in looks] == [False, True, False]
    assert looks[1].text() == "<an item of 100,000 bytes>"
    # this call has no room for a copy of item 2, so it ends before item 2; a later call can copy item 2
    assert [one.number for one in seen(channel, most_bytes=1999)] == [0, 1]
    assert [one.payload is None for one in seen(channel, first=2, most_bytes=1999)] == [False]


def test_item_with_a_channel_is_not_opened() -> None:
    channel: Channel[Any] = Channel(8, across="processes")
    inner: Channel[int] = Channel(1, across="processes")
    channel.put(("answers", inner))
    (one,) = seen(channel)
    assert one.payload is None
    channel.get()[1].put(1)
    assert inner.get() == 1


def test_item_with_a_remote_channel_is_not_counted_as_received() -> None:
    channel: Channel[Any] = Channel(8, across="processes")
    inner: Channel[int] = Channel(1, across="hosts")
    channel.put(("answers", inner))
    for _ in range(3):
        shown(channel)
    channel.get()[1].put(1)
    assert inner.get() == 1


@ACROSS
def test_closed_and_broken_channels_can_be_seen(across: Any) -> None:
    channel: Channel[Any] = Channel(8, across=across)
    channel.put("a")
    channel.close()
    assert shown(channel) == [(0, "'a'")]
    broken: Channel[Any] = Channel(8, across=across)
    broken.put("a")
    broken.abort()
    assert seen(broken) == []


@ACROSS
def test_looks_during_a_transfer_lose_and_repeat_nothing(across: Any) -> None:
    channel: Channel[Any] = Channel(16, across=across)
    count, over = 20_000, threading.Event()

    def look() -> list[tuple[int, str]]:
        looks: list[tuple[int, str]] = []
        while not over.is_set():
            looks += shown(channel, first=looks[-1][0] + 1 if looks else 0)
        return looks

    def write() -> None:
        with channel.writer() as writer:
            for number in range(count):
                writer.put(("item", number))

    looker = ThreadPeer(look)
    writer = ThreadPeer(write) if across == "threads" else ProcessPeer(write)
    received = [number for _, number in channel]
    over.set()
    writer.result()
    looks = looker.result()
    assert received == [*range(count)]
    assert looks == [(number, f"('item', {number})") for number, _ in looks]
    assert [number for number, _ in looks] == sorted({number for number, _ in looks})


def test_channel_works_after_a_process_dies_during_a_look() -> None:
    channel: Channel[Any] = Channel(16, across="processes")
    channel.put_many([bytes(100_000)] * 16)

    def look_forever() -> None:
        started.put(os.getpid())
        while True:
            seen(channel)

    for _ in range(5):
        started: Channel[int] = Channel(1, across="processes")
        looker = ProcessPeer(look_forever)
        started.get(timeout=60)
        seen(channel)
        looker.kill()
        looker.join()
        channel.put(channel.get(timeout=60), timeout=60)
    assert len(channel) == 16


def test_array_in_a_channel_appears_as_its_shape_and_type() -> None:
    channel: Channel[Any] = Channel(8, across="processes")
    channel.put(("picture", numpy.zeros((480, 640, 3), "f4")))
    channel.put(numpy.zeros(2, "?"))
    channel.put({"rows": numpy.zeros((2, 3), [("x", "i4")]), "view": memoryview(b"abc")})
    assert [text for _, text in shown(channel)] == [
        "('picture', <ndarray 480 × 640 × 3 float32>)",
        "<ndarray 2 bool>",
        "{'rows': <ndarray 2 × 3 [('x', '<i4')]>, 'view': <memoryview 3 B>}",
    ]

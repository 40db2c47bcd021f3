"""C1 and C2: items leave in FIFO order, and a channel never exceeds its limits."""

from __future__ import annotations

import os

import pytest
from support.waiting import wait_blocked, wait_stats

from flowchan import Channel, Closed, Empty, Full


def test_one_item_goes_in_and_comes_out(make):
    """C1: afterwards, the channel is empty."""
    ch = make(1)
    ch.put(7)
    assert ch.get() == 7
    with pytest.raises(Empty):
        ch.get_nowait()


def test_items_are_received_in_the_order_of_their_puts(make):
    """Check C1."""
    ch = make(100)
    for i in range(100):
        ch.put(i)
    assert [ch.get() for _ in range(100)] == list(range(100))


def test_mixed_single_and_batch_calls_keep_the_order(make):
    """C1: all methods that put items share one order, and all methods that get items share it."""
    ch = make(16)
    ch.put(0)
    ch.put_many([1, 2, 3])
    ch.put_nowait(4)
    ch.put_many(iter((5, 6, 7)))
    ch.close()
    assert ch.get() == 0
    assert ch.get_many(2) == [1, 2]
    assert ch.get_nowait() == 3
    assert next(ch) == 4
    assert list(ch) == [5, 6, 7]


def test_order_is_kept_while_the_ring_wraps_around(make):
    """C1: the sizes vary, so that items use every part of the channel's memory."""
    ch = make(3)
    sent = [bytes([i % 251]) * (i % 97) for i in range(2_000)]
    received = []
    for i in range(0, 2_000, 2):
        ch.put(sent[i])
        ch.put(sent[i + 1])
        received += [ch.get(), ch.get()]
    assert received == sent


def test_order_is_kept_for_puts_by_a_peer(make, spawn_peer):
    """Check C1."""
    ch = make(8)

    def write():
        for i in range(1_000):
            ch.put(i)
        ch.close()

    peer = spawn_peer(write)
    assert list(ch) == list(range(1_000))
    peer.result()


def test_none_is_an_item_like_any_other(make):
    """Check C1."""
    ch = make()
    ch.put(None)
    ch.put_many([None, None])
    ch.close()
    assert len(ch) == 3
    assert ch.get() is None
    assert ch.get_many(5) == [None, None]
    assert list(ch) == []


def test_falsy_items_arrive(make):
    """Check C1."""
    items = [0, False, "", b"", (), 0.0, None, [], {}]
    ch = make()
    ch.put_many(items)
    ch.close()
    assert list(ch) == items


def test_iteration_that_ends_early_leaves_later_items_in_the_channel(make):
    """C1: no item is lost."""
    ch = make()
    ch.put_many(range(5))
    for item in ch:
        if item == 2:
            break
    assert ch.get() == 3


@pytest.mark.parametrize("capacity", [1, 2, 3, 64, 1_000])
def test_channel_holds_exactly_its_capacity(make, capacity):
    """C2: exactly ``capacity`` items fit, and one more does not."""
    ch = make(capacity)
    assert ch.capacity == capacity
    for i in range(capacity):
        ch.put_nowait(i)
    with pytest.raises(Full):
        ch.put_nowait("too many")
    assert ch.get() == 0
    ch.put_nowait("fits again")
    assert len(ch) == capacity


def test_channel_defaults_to_threads():
    """C2: ``Channel()`` needs no argument."""
    ch = Channel()
    assert (ch.across, ch.max_bytes) == ("threads", None)


@pytest.mark.parametrize("number", range(3))
def test_channel_without_capacity_has_its_transport_default(number):
    """C2: an item in shared memory costs more than a reference, so the default capacity is lower."""
    across, capacity = (("threads", 4096), ("processes", 64), ("hosts", 64))[number]
    ch = Channel(across=across)
    assert ch.capacity == capacity
    for item in range(capacity):
        ch.put_nowait(item)
    with pytest.raises(Full):
        ch.put_nowait("too many")


def test_across_returns_the_transport(make, transport):
    assert make().across == transport.across


def test_put_waits_while_the_channel_is_full(make, spawn_peer):
    """C2: a put into a full channel continues when there is room, and not earlier."""
    ch = make(2)
    ch.put_many([0, 1])
    peer = spawn_peer(ch.put, 2)
    wait_blocked(ch, writers=1)
    assert len(ch) == 2
    assert ch.get() == 0
    peer.result()
    assert ch.get_many(5) == [1, 2]


def test_put_many_beyond_the_capacity_waits_for_room(make, spawn_peer):
    """C2: the channel never has more than ``capacity`` items, and in the end all items were put."""
    ch = make(4)
    peer = spawn_peer(ch.put_many, list(range(100)))
    received = []
    while len(received) < 100:
        assert len(ch) <= 4
        received += ch.get_many(3)
    assert received == list(range(100))
    peer.result()


@pytest.mark.one_machine("a remote program counts in its own copy of the variable")
def test_put_many_draws_no_more_items_than_fit(make, spawn_peer):
    """C2: the iterable may be endless. At most one item is drawn early, and it waits for room."""
    ch = make(3)
    drawn = 0

    def endless():
        nonlocal drawn
        while True:
            drawn += 1
            yield drawn

    def write():
        try:
            ch.put_many(endless())
        except Closed as error:
            return drawn, error.items_put
        return None

    peer = spawn_peer(write)
    wait_blocked(ch, writers=1)
    ch.close()
    assert peer.result() == (4, 3)


def test_get_waits_for_an_item(make, spawn_peer):
    """Check C1."""
    ch = make()
    peer = spawn_peer(ch.get)
    wait_blocked(ch, readers=1)
    ch.put("late")
    assert peer.result() == "late"


def test_get_many_waits_for_one_item_and_takes_available_ones(make, spawn_peer):
    """C1: a call that has one item does not wait for a second item."""
    ch = make()
    ch.put_many(range(3))
    assert ch.get_many(10) == [0, 1, 2]
    peer = spawn_peer(ch.get_many, 10)
    wait_blocked(ch, readers=1)
    ch.put("only one")
    assert peer.result() == ["only one"]


def test_get_many_takes_at_most_max(make):
    """Check C1."""
    ch = make()
    ch.put_many(range(5))
    assert ch.get_many(2) == [0, 1]
    assert ch.get_many(1) == [2]
    assert len(ch) == 2


def test_put_many_of_an_empty_iterable_puts_nothing(make):
    ch = make(1)
    ch.put_many([])
    assert len(ch) == 0


def test_max_bytes_limits_the_bytes_inside_the_channel(make):
    """C2: the channel reaches max_bytes long before its capacity."""
    ch = make(1_000, max_bytes=100_000)
    assert ch.max_bytes == 100_000
    with pytest.raises(Full) as caught:
        ch.put_many([bytes(10_000)] * 50, timeout=0)
    assert 1 <= caught.value.items_put == len(ch) <= 10
    ch.get()
    ch.put_nowait(bytes(10_000))


def test_put_waits_while_the_channel_contains_max_bytes(make, spawn_peer):
    """Check C2."""
    ch = make(1_000, max_bytes=100_000)
    ch.put(bytes(80_000))
    peer = spawn_peer(ch.put, bytes(80_001))
    wait_blocked(ch, writers=1)
    assert len(ch) == 1
    assert len(ch.get()) == 80_000
    peer.result()
    assert len(ch.get()) == 80_001


@pytest.mark.copying
def test_item_much_larger_than_the_other_items_arrives(make, spawn_peer):
    """C2: only ``max_bytes`` limits the size of an item. The memory currently in use does not limit it."""
    ch = make(2)
    large = os.urandom(1 << 20) * 24
    peer = spawn_peer(lambda: [len(item) if len(item) < 10 else item == large for item in ch])
    ch.put_many([b"small", large, large, b"end"])
    ch.close()
    assert peer.result() == [5, True, True, 3]


def test_fast_writer_never_exceeds_the_capacity(make, spawn_peer):
    """C2: the writer is faster than its reader."""
    ch = make(5)

    def write():
        for i in range(500):
            ch.put(i)
        ch.close()

    peer = spawn_peer(write)
    wait_blocked(ch, writers=1)
    wait_stats(ch, items_in=5, inside=5)
    assert sum(1 for _ in ch) == 500
    peer.result()
    stats = ch.stats()
    assert (stats.items_in, stats.items_out, stats.inside) == (500, 500, 0)

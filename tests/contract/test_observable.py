"""C15: any user can inspect a channel at any time, without changing it."""

from __future__ import annotations

import pytest
from support.waiting import wait_blocked, wait_stats

COUNTS = (
    "items_in",
    "items_out",
    "bytes_in",
    "inside",
    "leased",
    "waiting_readers",
    "waiting_writers",
    "writers",
    "readers",
)


def test_counts_of_a_new_channel_are_zero(make):
    """Check C15."""
    stats = make().stats()
    assert {name: getattr(stats, name) for name in COUNTS} == dict.fromkeys(COUNTS, 0)


def test_len_counts_items_from_zero_to_capacity(make):
    """C15: len counts the items in the channel."""
    ch = make(3)
    for count in range(3):
        assert len(ch) == count == ch.stats().inside
        ch.put(count)
    assert len(ch) == 3 == ch.capacity
    for count in range(3, 0, -1):
        assert len(ch) == count == ch.stats().inside
        ch.get()
    assert len(ch) == 0


def test_stats_count_items_in_and_out(make):
    """C15: items that any method has put or got are counted."""
    ch = make()
    ch.put(1)
    ch.put_nowait(2)
    ch.put_many(range(8))
    ch.get()
    ch.get_nowait()
    ch.get_many(3)
    next(ch)
    stats = ch.stats()
    assert (stats.items_in, stats.items_out, stats.inside) == (10, 6, 4)


def test_failed_calls_are_not_counted(make):
    """Check C15."""
    ch = make(1)
    ch.put(1)
    for call in (lambda: ch.put_nowait(2), lambda: ch.put(2, timeout=0), lambda: ch.put_many([2], timeout=0)):
        with pytest.raises(TimeoutError):
            call()
    ch.get()
    with pytest.raises(TimeoutError):
        ch.get_nowait()
    stats = ch.stats()
    assert (stats.items_in, stats.items_out, stats.inside) == (1, 1, 0)


@pytest.mark.copying
def test_stats_count_bytes(make):
    """C15: the count of bytes is at least the size of the items, and never decreases."""
    ch = make()
    ch.put(bytes(5_000))
    first = ch.stats().bytes_in
    assert 5_000 <= first < 6_000
    ch.get()
    ch.put("x" * 7_000)
    assert 12_000 <= ch.stats().bytes_in < 14_000


def test_waiting_readers_and_writers_are_counted(make, spawn_peer):
    """C15: the waiting users may be in any thread or process."""
    ch = make(1)
    readers = [spawn_peer(ch.get) for _ in range(3)]
    wait_blocked(ch, readers=3)
    assert ch.stats().waiting_writers == 0
    ch.put_many(range(3))
    for reader in readers:
        reader.result()
    ch.put("inside")
    writers = [spawn_peer(ch.put, 1) for _ in range(2)]
    wait_blocked(ch, writers=2)
    assert ch.stats().waiting_readers == 0
    assert len(ch.get_many(1) + ch.get_many(1) + ch.get_many(1)) == 3
    for writer in writers:
        writer.result()
    wait_stats(ch, waiting_readers=0, waiting_writers=0)


def test_all_peers_see_the_same_counts(make, spawn_peer):
    """C15: each side counts the calls of the other side as well."""
    ch = make()
    ch.put_many(range(5))

    def look():
        ch.get()
        stats = ch.stats()
        return len(ch), stats.items_in, stats.items_out, ch.closed

    assert spawn_peer(look).result() == (4, 5, 1, False)
    assert (len(ch), ch.stats().items_out) == (4, 1)


def test_stats_can_be_read_while_a_call_waits(make, spawn_peer):
    """C15: a call that waits on the channel does not block a look at its statistics."""
    ch = make(1)
    peer = spawn_peer(ch.get)
    wait_blocked(ch, readers=1)
    assert (len(ch), ch.closed, ch.drained, ch.broken) == (0, False, False, False)
    assert "0" in repr(ch)
    ch.put(1)
    peer.result()


def test_stats_returns_a_frozen_value(make):
    """C15: the statistics cannot be changed, and later changes to the channel do not affect them."""
    ch = make()
    stats = ch.stats()
    ch.put(1)
    assert stats.items_in == 0
    with pytest.raises(AttributeError):
        stats.items_in = 5
    assert "items_in=0" in repr(stats)
    assert stats != ch.stats()
    assert ch.stats() == ch.stats()


@pytest.mark.parametrize("name", ["capacity", "across", "max_bytes", "closed", "drained", "broken"])
def test_properties_cannot_be_set(make, name):
    """Check C15."""
    with pytest.raises(AttributeError):
        setattr(make(), name, 1)


def test_closed_drained_and_broken_describe_the_state(make):
    """C15: a channel is open, closed, drained or broken."""
    ch = make()
    ch.put(1)
    states = [(ch.closed, ch.drained, ch.broken)]
    ch.close()
    states.append((ch.closed, ch.drained, ch.broken))
    ch.get()
    states.append((ch.closed, ch.drained, ch.broken))
    assert states == [(False, False, False), (True, False, False), (True, True, False)]
    broken = make()
    broken.abort()
    assert broken.broken
    assert not broken.drained


@pytest.mark.parametrize("word", ["capacity", "transport", "closed"])
def test_repr_shows_state_and_limits(make, word):
    """C15: the text is used in messages and debuggers."""
    ch = make(7)
    ch.put_many(range(3))
    ch.close()
    text = repr(ch)
    assert "Channel" in text
    assert {"capacity": "7", "transport": ch.across, "closed": "closed"}[word] in text

"""C3 and C4: closing a channel, and draining it."""

from __future__ import annotations

import pytest
from support.waiting import wait_blocked

from flowchan import Closed, Drained, Empty

PUTS = {
    "put": lambda ch: ch.put("late"),
    "put_timeout": lambda ch: ch.put("late", timeout=1_000),
    "put_nowait": lambda ch: ch.put_nowait("late"),
    "put_many": lambda ch: ch.put_many(["late"]),
}
GETS = {
    "get": lambda ch: ch.get(),
    "get_timeout": lambda ch: ch.get(timeout=1_000),
    "get_nowait": lambda ch: ch.get_nowait(),
    "get_many": lambda ch: ch.get_many(3),
}


def test_a_new_channel_is_open(make):
    ch = make()
    assert (ch.closed, ch.drained, ch.broken) == (False, False, False)


def test_close_may_be_called_any_number_of_times(make, spawn_peer):
    """C3: any user may close the channel, and closing never raises."""
    ch = make()
    ch.close()
    ch.close()
    spawn_peer(ch.close).result()
    assert ch.closed
    assert not ch.broken


@pytest.mark.parametrize("put", PUTS)
def test_put_after_close_raises_closed_and_puts_nothing(make, put):
    """C3: writers get plain ``Closed``; only readers get its subclass Drained."""
    ch = make()
    ch.put("before")
    ch.close()
    with pytest.raises(Closed) as caught:
        PUTS[put](ch)
    assert not isinstance(caught.value, Drained)
    assert ch.get() == "before"
    with pytest.raises(Drained):
        ch.get_nowait()


@pytest.mark.parametrize("put", PUTS)
def test_put_into_a_full_closed_channel_raises_closed_not_full(make, put):
    """Check C3."""
    ch = make(1)
    ch.put("before")
    ch.close()
    with pytest.raises(Closed):
        PUTS[put](ch)


def test_close_by_a_peer_is_visible(make, spawn_peer):
    """C3: any process may close the channel."""
    ch = make()
    ch.put(1)
    spawn_peer(ch.close).result()
    assert ch.closed
    assert not ch.drained
    with pytest.raises(Closed):
        ch.put(2)
    assert list(ch) == [1]


def test_a_waiting_put_wakes_and_raises_closed(make, spawn_peer):
    """C3: the waiting put has not put its item."""
    ch = make(1)
    ch.put("before")
    peers = [spawn_peer(ch.put, "waiting") for _ in range(3)]
    wait_blocked(ch, writers=3)
    ch.close()
    for peer in peers:
        with pytest.raises(Closed):
            peer.result()
    assert list(ch) == ["before"]


def test_waiting_put_many_reports_its_count_when_the_channel_closes(make, spawn_peer):
    """C3: the error counts the items that were put, which remain readable."""
    ch = make(2)
    peer = spawn_peer(ch.put_many, list(range(5)))
    wait_blocked(ch, writers=1)
    ch.close()
    with pytest.raises(Closed) as caught:
        peer.result()
    assert caught.value.items_put == 2
    assert list(ch) == [0, 1]


def test_a_waiting_put_many_that_had_put_nothing_raises_closed(make, spawn_peer):
    """Check C3."""
    ch = make(1)
    ch.put("before")
    peer = spawn_peer(ch.put_many, [1, 2])
    wait_blocked(ch, writers=1)
    ch.close()
    with pytest.raises(Closed) as caught:
        peer.result()
    assert caught.value.items_put == 0
    assert list(ch) == ["before"]


def test_items_put_before_the_close_stay_readable(make, spawn_peer):
    """C3: readers in any process can read them."""
    ch = make()
    ch.put_many(range(10))
    ch.close()
    assert ch.closed
    assert not ch.drained
    assert spawn_peer(ch.get_many, 5).result() == [0, 1, 2, 3, 4]
    assert ch.get_many(10) == [5, 6, 7, 8, 9]
    assert ch.drained


@pytest.mark.parametrize("get", sorted(GETS.keys() - {"get_nowait"}))
def test_all_waiting_readers_wake_when_an_empty_channel_closes(make, spawn_peer, get):
    """Check C3."""
    ch = make()
    peers = [spawn_peer(GETS[get], ch) for _ in range(3)]
    wait_blocked(ch, readers=3)
    ch.close()
    for peer in peers:
        with pytest.raises(Drained):
            peer.result()


def test_waiting_iterations_end_when_the_channel_closes(make, spawn_peer):
    """Check C3 and C4."""
    ch = make()
    peers = [spawn_peer(list, ch) for _ in range(3)]
    wait_blocked(ch, readers=3)
    ch.close()
    assert [peer.result() for peer in peers] == [[], [], []]


def test_close_wakes_waiting_readers_and_writers(make, spawn_peer):
    """C3: one close wakes readers of an empty channel and writers of a full channel."""
    empty, full = make(1), make(1)
    full.put(0)
    reader = spawn_peer(empty.get)
    writer = spawn_peer(full.put, 1)
    wait_blocked(empty, readers=1)
    wait_blocked(full, writers=1)

    def close_both():
        empty.close()
        full.close()

    spawn_peer(close_both).result()
    with pytest.raises(Drained):
        reader.result()
    with pytest.raises(Closed):
        writer.result()


@pytest.mark.parametrize("get", GETS)
def test_get_on_a_drained_channel_always_raises_at_once(make, get):
    """C4: the error is Drained, a subclass of Closed, and never Empty."""
    ch = make()
    ch.put(1)
    ch.close()
    assert ch.get() == 1
    for _ in range(3):
        with pytest.raises(Drained) as caught:
            GETS[get](ch)
        assert isinstance(caught.value, Closed)
        assert not isinstance(caught.value, Empty)
    assert ch.drained


def test_reading_the_last_item_succeeds(make):
    """C4: only the read after the last item raises."""
    ch = make()
    ch.put("last")
    ch.close()
    assert not ch.drained
    assert ch.get() == "last"
    assert ch.drained
    with pytest.raises(Drained):
        ch.get()


def test_get_many_returns_the_last_items_before_raising_drained(make):
    """C4: the call raises Drained only when no item is left."""
    ch = make()
    ch.put_many([1, 2])
    ch.close()
    assert ch.get_many(10) == [1, 2]
    with pytest.raises(Drained):
        ch.get_many(10)


def test_iteration_ends_when_drained(make):
    """C4: a second loop over a drained channel ends at once."""
    ch = make()
    ch.put_many(range(4))
    ch.close()
    assert list(ch) == [0, 1, 2, 3]
    assert list(ch) == []
    assert next(iter(ch), "end") == "end"


def test_closing_an_empty_channel_drains_it(make):
    """Check C4."""
    ch = make()
    ch.close()
    assert ch.closed
    assert ch.drained
    with pytest.raises(Drained):
        ch.get()


def test_an_open_empty_channel_is_not_drained(make):
    """Check C4."""
    ch = make()
    ch.put(1)
    ch.get()
    assert not ch.drained


def test_readers_racing_for_the_last_items_get_each_once(make, spawn_peer):
    """C4: all readers end, and together they get each item once."""
    ch = make(4)
    peers = [spawn_peer(list, ch) for _ in range(4)]
    wait_blocked(ch, readers=4)
    for i in range(400):
        ch.put(i)
    ch.close()
    assert sorted(item for peer in peers for item in peer.result()) == list(range(400))

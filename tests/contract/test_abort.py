"""C6: abort breaks a channel, discards its items, and reports the cause to all users."""

from __future__ import annotations

import threading
import weakref

import pytest
from support.waiting import wait_blocked

from flowchan import Broken, Channel, Drained

CALLS = {
    "put": lambda ch: ch.put(1),
    "put_timeout": lambda ch: ch.put(1, timeout=1_000),
    "put_nowait": lambda ch: ch.put_nowait(1),
    "put_many": lambda ch: ch.put_many([1]),
    "get": lambda ch: ch.get(),
    "get_timeout": lambda ch: ch.get(timeout=1_000),
    "get_nowait": lambda ch: ch.get_nowait(),
    "get_many": lambda ch: ch.get_many(2),
    "iteration": lambda ch: next(ch),
}


class TooLate(Exception):
    """An item that supports weak references."""


def cause_seen(call, ch):
    """Return the cause that a peer sees.

    The peer must read the cause, because an exception's ``__cause__`` is not sent to another process.
    """
    try:
        call(ch)
    except Broken as error:
        return type(error.__cause__), str(error.__cause__)
    return None


def beginning_of_cause_seen(ch):
    kind, text = cause_seen(CALLS["get"], ch)
    return kind, text[:60]


@pytest.mark.parametrize("call", CALLS)
def test_every_call_after_abort_raises_broken_from_the_cause(make, call):
    """C6: every call raises the error, not only the first call."""
    ch = make()
    ch.put("discarded")
    ch.abort(ValueError("bad wind"))
    for _ in range(2):
        with pytest.raises(Broken) as caught:
            CALLS[call](ch)
        assert isinstance(caught.value.__cause__, ValueError)
        assert "bad wind" in str(caught.value.__cause__)
    assert ch.broken


@pytest.mark.each_value
@pytest.mark.parametrize("call", CALLS)
def test_peer_gets_the_same_abort_cause(make, spawn_peer, call):
    """C6: the cause reaches users in other processes and threads."""
    ch = make()
    ch.abort(ValueError("bad wind"))
    assert spawn_peer(cause_seen, CALLS[call], ch).result() == (ValueError, "bad wind")


@pytest.mark.parametrize("call", ["get", "get_timeout", "get_many", "iteration"])
def test_every_waiting_reader_raises_broken_from_the_cause(make, spawn_peer, call):
    """Check C6."""
    ch = make()
    peers = [spawn_peer(cause_seen, CALLS[call], ch) for _ in range(3)]
    wait_blocked(ch, readers=3)
    ch.abort(ValueError("bad wind"))
    assert [peer.result() for peer in peers] == [(ValueError, "bad wind")] * 3


@pytest.mark.parametrize("call", ["put", "put_timeout", "put_many"])
def test_every_waiting_writer_raises_broken_from_the_cause(make, spawn_peer, call):
    """Check C6."""
    ch = make(1)
    ch.put(0)
    peers = [spawn_peer(cause_seen, CALLS[call], ch) for _ in range(3)]
    wait_blocked(ch, writers=3)
    ch.abort(ValueError("bad wind"))
    assert [peer.result() for peer in peers] == [(ValueError, "bad wind")] * 3


def test_put_many_interrupted_by_abort_raises_broken(make, spawn_peer):
    """C6: the items of the interrupted call are discarded, so its error does not count them."""
    ch = make(2)
    peer = spawn_peer(cause_seen, lambda ch: ch.put_many(range(5)), ch)
    wait_blocked(ch, writers=1)
    ch.abort(ValueError("bad wind"))
    assert peer.result() == (ValueError, "bad wind")


def test_abort_by_a_peer_breaks_the_channel(make, spawn_peer):
    """Check C6."""
    ch = make()
    ch.put("discarded")
    spawn_peer(lambda: ch.abort(KeyError("from the peer"))).result()
    assert ch.broken
    with pytest.raises(Broken) as caught:
        ch.get()
    assert isinstance(caught.value.__cause__, KeyError)
    assert "from the peer" in str(caught.value.__cause__)


def test_abort_discards_the_items_inside(make):
    """Check C6."""
    ch = make()
    ch.put_many(range(10))
    ch.abort()
    assert len(ch) == 0
    assert ch.stats().inside == 0


def test_abort_without_a_cause_raises_plain_broken(make, spawn_peer):
    """C6: without a cause, the ``Broken`` error also has none."""
    ch = make()
    ch.abort()
    with pytest.raises(Broken) as caught:
        ch.get()
    assert caught.value.__cause__ is None
    assert spawn_peer(cause_seen, CALLS["get"], ch).result() == (type(None), "None")


def test_unpicklable_cause_still_breaks_the_channel(make, spawn_peer):
    """C6: abort never fails. The text of the cause, at least, reaches every user."""
    ch = make()
    ch.abort(ValueError("held a lock", threading.Lock()))

    def words():
        try:
            ch.get()
        except Broken as error:
            return f"{error} {error.__cause__}"
        return "not broken"

    assert "held a lock" in spawn_peer(words).result()


@pytest.mark.each_value
@pytest.mark.parametrize("size", [100, 1 << 20, 17 << 20])
def test_large_cause_arrives_as_exception_or_text(make, spawn_peer, size):
    """C6: a cause that is too large for the channel's memory arrives as text."""
    ch = make(max_bytes=1 << 16)
    peer = spawn_peer(beginning_of_cause_seen, ch)
    wait_blocked(ch, readers=1)
    ch.abort(ValueError("bad wind", bytes(size)))
    kind, text = peer.result()
    assert "bad wind" in text
    assert kind is ValueError or text.startswith("ValueError: ")


def test_the_first_abort_sets_the_cause(make):
    """C6: only the first cause counts, because later aborts are usually its consequences."""
    ch = make()
    ch.abort(ValueError("first"))
    ch.abort(ValueError("second"))
    with pytest.raises(Broken) as caught:
        ch.get()
    assert str(caught.value.__cause__) == "first"


def test_abort_after_close_breaks_a_channel_that_is_not_drained(make):
    """C6: items inside the channel are lost, so the channel must not look cleanly ended."""
    ch = make()
    ch.put_many([1, 2])
    ch.close()
    ch.abort(ValueError("bad wind"))
    assert ch.broken
    assert not ch.drained
    with pytest.raises(Broken):
        ch.get()


def test_abort_of_a_drained_channel_has_no_effect(make):
    """C6: nothing changes a drained channel, so a later cause is ignored."""
    ch = make()
    ch.close()
    assert ch.drained
    causes = [TooLate() for _ in range(2)]
    kept = list(map(weakref.ref, causes))
    for cause in causes:
        ch.abort(cause)
    assert not ch.broken
    with pytest.raises(Drained):
        ch.get()
    del causes, cause
    assert [one() for one in kept] == [None, None]


def test_close_after_abort_has_no_effect(make):
    """Check C3 and C6."""
    ch = make()
    ch.abort(ValueError("bad wind"))
    ch.close()
    with pytest.raises(Broken):
        ch.get()
    with pytest.raises(Broken):
        ch.put(1)


def test_iteration_raises_on_a_broken_channel(make, spawn_peer):
    """C6: a loop ends without an error only if the channel is drained."""
    ch = make()
    peer = spawn_peer(cause_seen, list, ch)
    wait_blocked(ch, readers=1)
    ch.abort(ValueError("bad wind"))
    assert peer.result() == (ValueError, "bad wind")


class Item:
    pass


def test_abort_frees_the_discarded_items():
    """Check C6 and C12."""
    ch = Channel(across="threads")
    item = Item()
    reference = weakref.ref(item)
    ch.put(item)
    del item
    assert reference() is not None
    ch.abort()
    assert reference() is None

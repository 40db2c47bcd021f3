"""C7: only ``*_nowait`` calls and expired timeouts raise Full or Empty."""

from __future__ import annotations

import queue
import time

import pytest
from support.waiting import wait_blocked

from flowchan import Closed, Empty, Full


def test_get_nowait_raises_empty(make):
    """Check C7."""
    with pytest.raises(Empty):
        make().get_nowait()


def test_put_nowait_raises_full_and_puts_nothing(make):
    """Check C7."""
    ch = make(1)
    ch.put_nowait("first")
    with pytest.raises(Full):
        ch.put_nowait("second")
    assert ch.get_many(5) == ["first"]


@pytest.mark.parametrize("standard", [queue.Empty, TimeoutError])
def test_empty_can_be_caught_as_standard_exceptions(make, standard):
    """Check C7."""
    with pytest.raises(standard):
        make().get_nowait()
    with pytest.raises(standard):
        make().get(timeout=0)


@pytest.mark.parametrize("standard", [queue.Full, TimeoutError])
def test_full_can_be_caught_as_standard_exceptions(make, standard):
    """Check C7."""
    ch = make(1)
    ch.put(1)
    with pytest.raises(standard):
        ch.put_nowait(2)
    with pytest.raises(standard):
        ch.put(2, timeout=0)


def test_empty_and_full_are_not_subclasses_of_closed(make):
    """C7: Closed is permanent, while Empty and Full describe only this moment."""
    with pytest.raises(Empty) as caught:
        make().get_nowait()
    assert not isinstance(caught.value, Closed)


@pytest.mark.parametrize("timeout", [0, 0.0, 0.02, 1e-9])
def test_timeout_raises_empty_when_it_expires_and_not_earlier(make, timeout):
    """Check C7."""
    ch = make()
    for call in (ch.get, lambda timeout: ch.get_many(3, timeout=timeout)):
        begin = time.monotonic()
        with pytest.raises(Empty):
            call(timeout=timeout)
        assert time.monotonic() - begin >= timeout


@pytest.mark.parametrize("timeout", [0, 0.0, 0.02, 1e-9])
def test_timeout_raises_full_when_it_expires_and_not_earlier(make, timeout):
    """C7: a put that raises Full has not put its item."""
    ch = make(1)
    ch.put("inside")
    for call in (ch.put, lambda item, timeout: ch.put_many([item], timeout=timeout)):
        begin = time.monotonic()
        with pytest.raises(Full):
            call("outside", timeout=timeout)
        assert time.monotonic() - begin >= timeout
    assert ch.get_many(5) == ["inside"]


def test_put_many_that_times_out_reports_its_count(make):
    """C7: the error counts the items that were put, so the caller can continue after them."""
    ch = make(3)
    for put in (3, 0):
        with pytest.raises(Full) as caught:
            ch.put_many(range(5), timeout=0.01)
        assert caught.value.items_put == put
    assert ch.get_many(9) == [0, 1, 2]


def test_timeout_zero_succeeds_if_no_wait_is_needed(make):
    """Check C7."""
    ch = make(1)
    ch.put(1, timeout=0)
    assert ch.get(timeout=0) == 1
    ch.put_many([2], timeout=0)
    assert ch.get_many(1, timeout=0) == [2]


def test_timeout_none_waits_without_limit(make, spawn_peer):
    """C7: a call with ``timeout=None`` behaves as if it had no timeout."""
    ch = make()
    peer = spawn_peer(lambda: ch.get(timeout=None))
    wait_blocked(ch, readers=1)
    ch.put(5)
    assert peer.result() == 5


@pytest.mark.parametrize("timeout", [1_000_000, 1e12])
def test_a_very_long_timeout_is_accepted(make, spawn_peer, timeout):
    """C7: even a timeout that is too long for the clock is accepted."""
    ch = make(1)
    reader = spawn_peer(lambda: ch.get(timeout=timeout))
    wait_blocked(ch, readers=1)
    ch.put(5)
    assert reader.result() == 5
    ch.put(6)
    writer = spawn_peer(lambda: ch.put(7, timeout=timeout))
    wait_blocked(ch, writers=1)
    assert ch.get() == 6
    writer.result()
    assert ch.get() == 7


def test_item_that_arrives_within_the_timeout_is_returned(make, spawn_peer):
    """Check C7."""
    ch = make()
    peer = spawn_peer(lambda: ch.get(timeout=1_000))
    wait_blocked(ch, readers=1)
    ch.put("in time")
    assert peer.result() == "in time"


def test_expired_timeout_leaves_no_waiter(make, spawn_peer):
    """C7: a call that has timed out takes no wake-up away from another reader."""
    ch = make(1)

    def give_up():
        with pytest.raises(Empty):
            ch.get(timeout=0.01)

    for _ in range(3):
        spawn_peer(give_up).result()
    assert ch.stats().waiting_readers == 0
    peer = spawn_peer(ch.get)
    wait_blocked(ch, readers=1)
    ch.put(1)
    assert peer.result() == 1


def test_reader_that_times_out_takes_no_item(make, spawn_peer):
    """C7, C8: many short timeouts race with puts, and each item still arrives once."""
    ch = make(1)

    def impatient():
        received, end = [], False
        while not end:
            try:
                received.append(ch.get(timeout=1e-5))
            except Empty:
                continue
            except Closed:
                end = True
        return received

    peers = [spawn_peer(impatient) for _ in range(2)]
    for i in range(1_000):
        ch.put(i)
    ch.close()
    assert sorted(item for peer in peers for item in peer.result()) == list(range(1_000))


def test_writer_that_times_out_puts_nothing(make, spawn_peer):
    """C7: many short timeouts race with gets, and Full always means "not put"."""
    ch = make(1)

    def impatient():
        done = 0
        while done < 500:
            try:
                ch.put(done, timeout=1e-5)
            except Full:
                continue
            done += 1

    peers = [spawn_peer(impatient) for _ in range(2)]
    received = [ch.get() for _ in range(1_000)]
    for peer in peers:
        peer.result()
    assert sorted(received) == sorted([*range(500), *range(500)])
    assert len(ch) == 0

"""C5: a channel closes with its last writer or its last reader, however that port is closed.

test_port_deaths.py tests processes that end without closing their ports.
"""

from __future__ import annotations

import itertools

import pytest
from support.waiting import wait_blocked

from flowchan import Broken, Closed, Drained, Empty, Full


def put_until_closed(ch):
    """Put 0, 1, 2, … until a put raises Closed."""
    for i in itertools.count():
        try:
            ch.put(i)
        except Closed:
            return


def test_ports_put_and_get_like_the_channel(make):
    """C5: a port has the methods for its side, with the same errors."""
    ch = make(2)
    out, into = ch.writer(), ch.reader()
    with pytest.raises(Empty):
        into.get_nowait()
    out.put(1)
    out.put_nowait(2)
    with pytest.raises(Full):
        out.put_nowait(3)
    with pytest.raises(Full):
        out.put(3, timeout=0)
    assert into.get() == 1
    out.put_many([4], timeout=5)
    assert into.get_many(5) == [2, 4]
    out.put(None)
    assert into.get_nowait() is None
    out.close()
    assert list(into) == []
    with pytest.raises(Drained):
        into.get()
    into.close()


def test_closing_the_last_writer_closes_the_channel(make):
    """C5: while other writers remain, the channel stays open."""
    ch = make()
    first, second = ch.writer(), ch.writer()
    first.put(1)
    first.close()
    assert not ch.closed
    second.put(2)
    second.close()
    assert ch.closed
    assert list(ch) == [1, 2]


def test_closing_the_last_reader_closes_the_channel(make):
    """C5: puts raise Closed once the last reader has closed. While other readers remain, nothing changes."""
    ch = make()
    first, second = ch.reader(), ch.reader()
    first.close()
    ch.put(1)
    assert second.get() == 1
    second.close()
    for _ in range(2):
        with pytest.raises(Closed):
            ch.put(2)


def test_port_closed_twice_is_counted_once(make):
    """Check C5."""
    ch = make()
    first, second = ch.writer(), ch.writer()
    first.close()
    first.close()
    assert not ch.closed
    second.put("still open")
    second.close()
    assert ch.closed


def test_closed_port_of_an_open_channel_rejects_calls(make):
    """C5: the error is about the misuse of the port, not about the channel's state."""
    ch = make()
    out, other_out, into, other_in = ch.writer(), ch.writer(), ch.reader(), ch.reader()
    ch.put(1)
    out.close()
    into.close()
    with pytest.raises(ValueError, match=r"port .*was closed"):
        out.put(2)
    with pytest.raises(ValueError, match=r"port .*was closed"):
        into.get()
    other_out.put(2)
    assert other_in.get_many(5) == [1, 2]


def test_leaving_the_with_block_closes_the_port(make):
    """C5: the port is closed whether or not the block raises."""
    ch = make()
    with ch.writer() as out, ch.reader() as into:
        out.put(1)
        assert into.get() == 1
    assert ch.closed
    ch = make()

    def leave_by_exception():
        with ch.writer() as out:
            out.put(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave_by_exception()
    assert ch.closed
    assert list(ch) == [1]


def test_dropping_a_port_closes_it(make):
    """C5: dropping a port's last reference closes it."""
    ch = make()
    out = ch.writer()
    out.put(1)
    del out
    assert ch.closed
    assert list(ch) == [1]
    ch = make()
    into = ch.reader()
    del into
    with pytest.raises(Closed):
        ch.put(1)


def test_channel_without_ports_does_not_close(make):
    """C5: plain put and get need no port and never close the channel."""
    ch = make()
    ch.put(1)
    ch.get()
    assert not ch.closed
    assert (ch.stats().writers, ch.stats().readers) == (0, 0)


def test_stats_count_the_ports(make):
    """Check C5 and C15."""
    ch = make()
    outs, ins = [ch.writer() for _ in range(3)], [ch.reader() for _ in range(2)]
    assert (ch.stats().writers, ch.stats().readers) == (3, 2)
    outs.pop().close()
    ins.pop().close()
    assert (ch.stats().writers, ch.stats().readers) == (2, 1)


def test_the_last_writers_exit_wakes_waiting_readers(make, spawn_peer):
    """C5: the waiting readers learn that the channel is closed."""
    ch = make()
    out = ch.writer()
    peers = [spawn_peer(list, ch) for _ in range(2)]
    wait_blocked(ch, readers=2)
    out.close()
    assert [peer.result() for peer in peers] == [[], []]


def test_the_last_readers_exit_wakes_waiting_writers(make, spawn_peer):
    """C5: the waiting writers learn that no reader will get their items."""
    ch = make(1)
    into = ch.reader()
    ch.put("inside")
    peers = [spawn_peer(ch.put, "outside") for _ in range(2)]
    wait_blocked(ch, writers=2)
    into.close()
    for peer in peers:
        with pytest.raises(Closed):
            peer.result()


def test_channel_closes_when_the_last_of_several_writers_exits(make, spawn_peer, make_gate):
    """C5: the writers are in different peers."""
    ch = make()
    gate = make_gate(3)

    def write(number):
        with ch.writer() as out:
            gate.arrive()
            for i in range(100):
                out.put((number, i))

    peers = [spawn_peer(write, number) for number in range(3)]
    gate.open()
    received = list(ch)
    for peer in peers:
        peer.result()
    assert sorted(received) == [(number, i) for number in range(3) for i in range(100)]


@pytest.mark.one_machine("items in transit to a closing reader may return after later items")
def test_writer_stops_when_all_readers_have_closed(make, spawn_peer, make_gate):
    """C5: Closed ends the writer's endless loop."""
    ch = make(4)
    gate = make_gate(2)

    def read():
        with ch.reader() as into:
            gate.arrive()
            return [into.get() for _ in range(10)]

    peers = [spawn_peer(read) for _ in range(2)]
    gate.open()
    put_until_closed(ch)
    received = sorted(item for peer in peers for item in peer.result())
    assert received == list(range(20))


def test_a_port_on_a_broken_channel_raises_broken(make):
    """Check C5 and C6."""
    ch = make()
    out, into = ch.writer(), ch.reader()
    ch.abort(ValueError("bad wind"))
    with pytest.raises(Broken):
        out.put(1)
    with pytest.raises(Broken):
        into.get()
    out.close()
    into.close()


def test_leased_item_keeps_the_channel_from_being_drained(make, spawn_peer):
    """C4: a port leases an item until its next request or its exit, so the item may still return."""
    ch = make()
    ch.put("in hand")
    into = ch.reader()
    assert into.get() == "in hand"
    ch.close()
    assert (len(ch), ch.stats().leased, ch.drained) == (0, 1, False)
    with pytest.raises(Empty, match="closed, but a reader may give back"):
        ch.get_nowait()
    peer = spawn_peer(ch.get)
    wait_blocked(ch, readers=1)
    with pytest.raises(Drained):
        into.get()
    assert (ch.stats().leased, ch.drained) == (0, True)
    with pytest.raises(Drained):
        peer.result()


def test_closing_a_reading_port_finishes_its_item(make):
    """C4: the leased items of a reader that closes its port count as finished."""
    ch = make()
    ch.put_many([1, 2, 3])
    ch.close()
    into = ch.reader()
    assert into.get_many(2) == [1, 2]
    assert ch.stats().leased == 2
    into.close()
    assert ch.stats().leased == 0
    assert list(ch) == [3]


def test_iteration_over_a_reading_port_ends_when_drained(make):
    """C5: a port is iterated like its channel."""
    ch = make()
    ch.put_many(range(5))
    ch.close()
    with ch.reader() as into:
        assert list(into) == [0, 1, 2, 3, 4]


def test_reader_closed_by_an_exception_returns_its_items(make):
    """C4, C5: the reader has not finished its items."""
    ch = make()
    ch.put_many([1, 2, 3])

    def fail():
        with ch.reader() as into:
            into.get_many(2)
            raise ZeroDivisionError

    with ch.reader() as other:
        with pytest.raises(ZeroDivisionError):
            fail()
        assert other.get_many(5) == [1, 2, 3]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_items_returned_by_several_readers_keep_their_order(make, order):
    """C2, C4: the readers may close in any order."""
    ch = make()
    ch.put_many(range(8))
    readers = [ch.reader() for _ in range(3)]
    for reader in readers:
        reader.get_many(2)

    def fail(reader):
        with reader:
            raise ZeroDivisionError

    with ch.reader() as other:
        for number in order:
            with pytest.raises(ZeroDivisionError):
                fail(readers[number])
        assert other.get_many(3) == [0, 1, 2]
        assert (len(ch), ch.stats().leased, ch.stats().items_out) == (5, 3, 3)
        assert other.get_many(8) == [3, 4, 5, 6, 7]

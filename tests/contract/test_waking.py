"""C8: k items wake k waiting readers, no reader sleeps while an item is available, and no reader starves."""

from __future__ import annotations

import pytest
from support.waiting import wait_blocked, wait_stats, wait_until

from flowchan import Closed, Drained

K = 4


def test_each_item_wakes_one_reader(make, spawn_peer):
    """C8: each item wakes one reader, and the other readers keep waiting."""
    ch, done = make(), make()
    peers = [spawn_peer(lambda: done.put(ch.get())) for _ in range(K)]
    wait_blocked(ch, readers=K)
    for i in range(K):
        ch.put(i)
        assert done.get() == i
        wait_stats(ch, waiting_readers=K - 1 - i)
    for peer in peers:
        peer.result()


def test_k_consecutive_puts_wake_k_readers(make, spawn_peer):
    """C8: between these single puts, no reader runs."""
    ch = make()
    peers = [spawn_peer(ch.get) for _ in range(K)]
    wait_blocked(ch, readers=K)
    for i in range(K):
        ch.put(i)
    assert sorted(peer.result() for peer in peers) == list(range(K))


def test_a_batch_of_k_items_wakes_k_readers(make, spawn_peer):
    """C8: one batch wakes as many readers as single puts would."""
    ch = make()
    peers = [spawn_peer(ch.get) for _ in range(K)]
    wait_blocked(ch, readers=K)
    ch.put_many(range(K))
    assert sorted(peer.result() for peer in peers) == list(range(K))


def test_fewer_items_than_readers_leave_other_readers_waiting(make, spawn_peer):
    """C8: exactly k readers wake."""
    ch, done = make(), make()
    peers = [spawn_peer(lambda: done.put(ch.get())) for _ in range(K)]
    wait_blocked(ch, readers=K)
    ch.put_many(range(K - 1))
    assert sorted(done.get() for _ in range(K - 1)) == list(range(K - 1))
    wait_stats(ch, waiting_readers=1, inside=0)
    ch.put("last")
    assert done.get() == "last"
    for peer in peers:
        peer.result()


def test_k_gets_wake_k_writers(make, spawn_peer):
    """C8: each get wakes one writer."""
    ch = make(K)
    ch.put_many(["old"] * K)
    peers = [spawn_peer(ch.put, i) for i in range(K)]
    wait_blocked(ch, writers=K)
    assert [ch.get() for _ in range(K)] == ["old"] * K
    for peer in peers:
        peer.result()
    assert sorted(ch.get_many(K)) == list(range(K))


def test_get_many_of_k_items_wakes_k_writers(make, spawn_peer):
    """C8: one batch wakes as many writers as single gets would."""
    ch = make(K)
    ch.put_many(["old"] * K)
    peers = [spawn_peer(ch.put, i) for i in range(K)]
    wait_blocked(ch, writers=K)
    assert ch.get_many(K) == ["old"] * K
    for peer in peers:
        peer.result()
    assert sorted(ch.get_many(K)) == list(range(K))


def test_get_of_a_large_item_wakes_writers_of_small_items(make, spawn_peer):
    """C8: with ``max_bytes``, one get can make room for many items."""
    ch = make(100, max_bytes=100_000)
    ch.put(bytes(90_000))
    peers = [spawn_peer(ch.put, bytes(20_000)) for _ in range(K)]
    wait_blocked(ch, writers=K)
    assert len(ch.get()) == 90_000
    for peer in peers:
        peer.result()
    assert len(ch) == K


def test_readers_and_writers_alternate_at_capacity_1(make, spawn_peer):
    """C8: every item needs a wake-up on each side, and none is lost."""
    ch = make(1)

    def write():
        for i in range(150):
            ch.put(i)

    readers = [spawn_peer(list, ch) for _ in range(2)]
    writers = [spawn_peer(write) for _ in range(2)]
    for writer in writers:
        writer.result()
    ch.close()
    assert sorted(item for reader in readers for item in reader.result()) == sorted(
        [*range(150), *range(150)]
    )


@pytest.mark.parametrize("batch", [1, 8])
def test_no_reader_starves(make, spawn_peer, batch):
    """C8: each of several readers gets an item, although the other readers keep taking items.

    The test ends when every reader has an item.
    """
    ch, served = make(2), make()

    def read():
        count = 0
        for _ in ch:
            count += 1
            if count == 50:
                served.put("served")
        return count

    readers = [spawn_peer(read) for _ in range(3)]
    total = 0
    while len(served) < 3:
        ch.put_many(range(batch))
        total += batch
    ch.close()
    counts = [reader.result() for reader in readers]
    assert sum(counts) == total
    assert min(counts) >= 50


def test_no_writer_starves(make, spawn_peer):
    """C8: each of several writers puts an item, although the other writers keep putting items.

    The test ends when 50 items of every writer have been read.
    """
    ch = make(2)

    def write(number):
        try:
            while True:
                ch.put(number)
        except Closed:
            return

    writers = [spawn_peer(write, number) for number in range(3)]
    counts = [0, 0, 0]
    while min(counts) < 50:
        counts[ch.get()] += 1
    ch.close()
    for writer in writers:
        writer.result()


def test_get_after_a_users_own_put_never_blocks(make, spawn_peer, make_gate):
    """C1, C8: a peer that has just put an item always finds an item, so it never waits for another peer."""
    peers, rounds = 4, 150
    ch = make(peers)
    gate = make_gate(peers)

    def put_then_get():
        gate.arrive()
        for i in range(rounds):
            ch.put_nowait(i)
            ch.flush()  # wait until the owner of a remote channel has the item
            ch.get_nowait()

    running = [spawn_peer(put_then_get) for _ in range(peers)]
    gate.open()
    for peer in running:
        peer.result()
    assert len(ch) == 0


@pytest.mark.one_machine("the test would start forty programs")
def test_reader_does_not_sleep_while_an_item_is_available(make, spawn_peer, make_gate):
    """C8: a reader gets an item of any writer, in any order of wake-ups."""
    ch = make(1)
    for _ in range(10):
        gate = make_gate(2)
        reader = spawn_peer(lambda gate=gate: (gate.arrive(), ch.get())[1])
        writer = spawn_peer(lambda gate=gate: (gate.arrive(), ch.put("item")))
        gate.open()
        assert reader.result() == "item"
        writer.result()


def test_counts_of_waiting_users_return_to_zero(make, spawn_peer):
    """Check C8 and C15."""
    ch = make(1)
    reader = spawn_peer(ch.get)
    wait_blocked(ch, readers=1)
    ch.close()
    with pytest.raises(Drained):
        reader.result()
    wait_until(lambda: ch.stats().waiting_readers == 0 and ch.stats().waiting_writers == 0)


def test_large_item_waiting_for_room_does_not_delay_small_items(make, spawn_peer):
    """C8: the writer of the large item wakes repeatedly in vain, while small items overtake it."""
    ch = make(100, max_bytes=100_000)
    ch.put_many([bytes(1_000)] * 20)
    large = spawn_peer(ch.put, bytes(90_000))
    wait_blocked(ch, writers=1)
    for _ in range(5_000):
        ch.put(bytes(1_000))
        assert len(ch.get()) == 1_000
    while len(ch):
        ch.get()
    large.result()

"""Test how device tensors travel on a fake device: by handle, in order, and as copies."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import threading
import weakref

import numpy as np
import pytest
from fake_device import FAKE, FakeTensor, kept
from support.waiting import merge_counts, wait_until

from flowchan import Channel, ChannelError, Full, select
from flowchan.transport.device import arenas as pool
from flowchan.transport.device import transfer
from flowchan.transport.device.arenas import Arena

MB = 1 << 20
pytestmark = [pytest.mark.copying, pytest.mark.usefixtures("fake_device")]


# --- Received values ---


ARRAYS = [np.arange(6.0), np.arange(5 * MB, dtype="u1"), np.ones((3, 4), "i2"), np.array(7), np.ones((0, 3))]


@pytest.mark.parametrize("array", ARRAYS)
def test_c13_a_tensor_arrives_equal_on_the_same_device(make, array):
    ch = make(1)
    ch.put(FakeTensor(array, "fake-B"))
    arrived = ch.get()
    assert arrived.device == "fake-B"
    assert arrived.numpy().dtype == array.dtype
    assert np.array_equal(arrived.numpy(), array)
    assert kept() == 0


def _echo(ch: Channel, back: Channel) -> None:
    for item in ch:
        back.put(item)
    back.close()


@pytest.mark.other_process
def test_nested_tensors_from_two_devices_are_transferred(make, spawn_peer):
    ch, back = make(4), make(4)
    peer = spawn_peer(_echo, ch, back)
    one = FakeTensor(np.arange(1000), "fake-A")
    ch.put({"a": [one, one], "b": (FakeTensor(np.ones(3), "fake-B"), np.arange(100_000), "text")})
    arrived = back.get()
    assert arrived["a"][0] is arrived["a"][1]
    assert np.array_equal(arrived["a"][0].numpy(), np.arange(1000))
    tensor, array, text = arrived["b"]
    assert (tensor.device, tensor.numpy().tolist(), array.sum(), text) == (
        "fake-B",
        [1, 1, 1],
        4999950000,
        "text",
    )
    ch.close()
    peer.result()
    assert FAKE.counts["to host"] == FAKE.counts["finish"] == 0


def test_many_tensors_share_one_allocation(make):
    """Send every tensor with the base of its allocation, as torch-ipc did."""
    ch = make(64)
    for number in range(50):
        ch.put(FakeTensor(np.full(10 * number + 1, number, "u1")))
    assert FAKE.counts["allocate"] == 1
    for number in range(50):
        assert (ch.get().numpy() == number).all()


def test_tensor_larger_than_an_arena_gets_a_new_arena(make, monkeypatch):
    monkeypatch.setattr(pool, "ARENA", MB)
    ch = make(4)
    for size in (3 * MB, 100, 5 * MB):
        ch.put(FakeTensor(np.full(size, 7, "u1")))
        arrived = ch.get().numpy()
        assert arrived.shape == (size,)
        assert (arrived == 7).all()


def test_receiver_does_not_see_writes_after_the_put(make):
    ch = make(1)
    tensor = FakeTensor(np.zeros(1000))
    ch.put(tensor)
    tensor.fill(9)
    assert (ch.get().numpy() == 0).all()


def test_c11_sender_does_not_see_writes_by_the_receiver(make):
    """C11: if a leased item was changed and returned, the next reader gets the original data."""
    ch = make(2)
    ch.put(FakeTensor(np.zeros(1000)))
    reader, keeper = ch.reader(), ch.reader()
    first = reader.get()
    first.fill(7)
    reader._give_up()
    assert (keeper.get().numpy() == 0).all()
    assert (first.numpy() == 7).all()
    keeper.close()


# --- Order without waiting ---


def _put_held(ch: Channel, got: Channel) -> None:
    with FAKE.held():
        ch.put(FakeTensor(np.full(1000, 5)))
        got.get()  # the receiver has the item, but the copy is still pending
    assert FAKE.counts["finish"] == 0


@pytest.mark.other_process
def test_receiver_stream_waits_for_the_senders_event(make, spawn_peer):
    """The receiver gets its tensor early, but its work on it waits for the data."""
    ch, got = make(1), make(1)
    peer = spawn_peer(_put_held, ch, got)
    arrived = ch.get()
    later: list[int] = []
    FAKE.stream("fake-A").add(lambda: later.append(int(arrived.array.sum())))
    assert later == []
    assert FAKE.counts["finish"] == 0
    got.put(None)
    assert arrived.numpy().sum() == 5000
    assert later == [5000]
    peer.result()


def _count_sum(ch: Channel, answers: Channel) -> None:
    total = 0
    for item in ch:
        total += int(item.numpy()[0])
        del item
    answers.put((total, dict(FAKE.counts)))


@pytest.mark.other_process
def test_receiver_opens_memory_once_for_many_tensors_without_waiting(make, spawn_peer):
    ch, answers = make(8), make(1)
    peer = spawn_peer(_count_sum, ch, answers)
    for number in range(1000):
        ch.put(FakeTensor(np.full(MB // 8, number)))
    ch.close()
    total, peer_end = answers.get()
    assert total == 999 * 500
    assert peer_end["open"] == 1  # tensors of 1 MB share one arena of 64 MB
    assert peer_end["open event"] <= 4 * transfer.EVERY_FEW
    assert peer_end["copy out"] == 1000
    assert not {"close", "finish", "from host"} & peer_end.keys()
    assert FAKE.counts["copy in"] == 1000
    assert FAKE.counts["allocate"] == peer_end["open"]
    assert FAKE.counts["finish"] == FAKE.counts["to host"] == 0
    peer.result()
    assert kept() == 0


def test_writer_without_free_events_waits_for_the_device(make, monkeypatch):
    monkeypatch.setattr(pool, "EVENTS", 2)
    ch = make(8)
    for number in range(5):
        ch.put(FakeTensor(np.full(10, number)))
    assert FAKE.counts["finish"] == 3
    assert [int(ch.get().numpy()[0]) for _ in range(5)] == list(range(5))


# --- Lifetime of a block ---


def test_blocks_are_reused_once_their_items_are_gone(make):
    ch = make(100)
    for _ in range(40):
        ch.put(FakeTensor(np.ones(10)))
    assert kept() == 40
    for _ in range(15):
        ch.get()
    assert kept() == 25
    reader = ch.reader()
    reader.get()
    assert kept() == 25  # the item is leased, so it may yet return to the channel
    reader.close()
    assert kept() == 24
    for _ in range(24):
        ch.get()
    assert kept() == 0
    transfer._state.pools["fake"]._collect()
    (arena,) = transfer._state.pools["fake"].arenas
    assert arena.free == [(0, arena.size)]


def test_every_put_uses_a_block_and_every_get_releases_it(make):
    ch = make(100)
    out, reader = ch.writer(), ch.reader()
    ch.put(FakeTensor(np.ones(10)))
    ch.put_nowait(FakeTensor(np.ones(10)))
    ch.put_many(FakeTensor(np.ones(10)) for _ in range(3))
    out.put(FakeTensor(np.ones(10)))
    out.put((FakeTensor(np.ones(10)), b"x" * MB))  # too large to be copied under the lock
    select([], puts=[(ch, FakeTensor(np.ones(10)))])
    asyncio.run(ch.aput(FakeTensor(np.ones(10))))
    assert kept() == 9
    ch.get()
    ch.get_nowait()
    ch.get_many(2)
    select([ch])
    asyncio.run(ch.aget())
    assert kept() == 3
    reader.get()
    reader.get_more()
    assert kept() == 3
    reader.get()
    assert kept() == 1
    reader.close()
    out.close()
    assert kept() == 0


def test_failed_put_uses_no_block(make):
    ch = make(1)
    ch.put(FakeTensor(np.ones(10)))
    with pytest.raises(Full):
        ch.put(FakeTensor(np.ones(10)), timeout=0.01)
    with pytest.raises(TypeError, match="can't send"):
        ch.put((FakeTensor(np.ones(10)), threading.Lock()))
    assert kept() == 1
    ch.get()
    assert kept() == 0
    transfer._state.pools["fake"]._collect()
    assert all(arena.free == [(0, arena.size)] for arena in transfer._state.pools["fake"].arenas)


def test_block_is_not_reused_before_its_write_has_finished(make):
    """The item is gone, but the copy into its block is still pending."""
    ch = make(1)
    with FAKE.held():
        with pytest.raises(TypeError, match="can't send"):
            ch.put((FakeTensor(np.zeros(10)), threading.Lock()))
        ch.put(FakeTensor(np.ones(10)))
        pool = transfer._state.pools["fake"]
        assert len(pool._back) >= 2  # put tries pickle first and then cloudpickle
    assert (ch.get().numpy() == 1).all()
    assert kept() == 0
    pool._collect()
    assert len(pool._back) == 0


def test_aborted_channel_releases_its_blocks(make):
    ch = make(4)
    ch.put_many([FakeTensor(np.ones(10)), FakeTensor(np.ones(10))])
    ch.abort(RuntimeError("stop"))
    assert kept() == 0


def test_unreferenced_channel_releases_its_blocks(make):
    ch = make(4)
    ch.put(FakeTensor(np.ones(10)))
    reference = weakref.ref(ch)
    make.forget()
    del ch
    gc.collect()
    assert kept() == 0
    assert reference() is None


@pytest.mark.other_process
def test_second_reader_of_an_item_copies_the_item_at_once(make, spawn_peer):
    """The first reader's copy is still pending, so that reader still holds the item."""
    ch, got = make(1), make(2)
    peer = spawn_peer(_put_held, ch, got)
    first, second = ch.reader(), ch.reader()
    arrived = first.get()
    first._give_up()
    assert len(ch) == 1
    got.put(None)
    again = second.get()
    assert FAKE.counts["finish"] == 1
    assert (again.numpy() == 5).all()
    assert (arrived.numpy() == 5).all()
    second.close()

    def has_ended() -> bool:
        merge_counts()  # the thread that watches copies may drop a copy's last reference
        return not peer.running()

    wait_until(has_ended)
    peer.result()


def _take_and_stay(ch: Channel, taken: Channel, port: bool) -> None:
    source = ch.reader() if port else ch
    item = source.get()
    taken.put(os.getpid())
    Channel(1).get()
    del item


@pytest.mark.other_process
@pytest.mark.parametrize("port", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_c11_item_and_memory_of_a_killed_receiver_are_returned(make, spawn_peer, port, copied):
    """A leased item is delivered again even if its copy was made; the block of an unleased item is free."""
    ch, taken = make(4), make(4)
    with FAKE.held():
        ch.put(FakeTensor(np.full(10, 3)))
        if copied:
            FAKE.stream("fake-A").held = False
        peer = spawn_peer(_take_and_stay, ch, taken, port)
        taken.get()
        if port or not copied:
            assert kept() == 1
        peer.kill()
        peer.join()
    if port:
        ch.close()
        assert [item.numpy()[0] for item in ch] == [3]
    wait_until(lambda: kept() == 0)


# --- Host memory ---


def test_tensors_go_through_host_memory_when_ipc_is_off(make, monkeypatch):
    monkeypatch.setenv("FLOWCHAN_CUDA_IPC", "0")
    ch = make(1)
    ch.put(FakeTensor(np.arange(100_000), "fake-B"))
    assert kept() == 0
    arrived = ch.get()
    assert arrived.device == "fake-B"
    assert np.array_equal(arrived.numpy(), np.arange(100_000))
    assert (FAKE.counts["to host"], FAKE.counts["from host"], FAKE.counts["allocate"]) == (1, 1, 0)


def test_tensor_without_shared_memory_goes_through_host_memory(make):
    ch = make(1)
    FAKE.full = True
    ch.put(FakeTensor(np.arange(10)))
    assert np.array_equal(ch.get().numpy(), np.arange(10))
    assert (FAKE.counts["to host"], FAKE.counts["from host"]) == (1, 1)
    FAKE.full = False
    ch.put(FakeTensor(np.arange(10)))
    assert np.array_equal(ch.get().numpy(), np.arange(10))
    assert FAKE.counts["to host"] == 1


@pytest.mark.parametrize("switch", ["1", "0"])
def test_error_names_a_device_that_the_receiver_cannot_see(make, monkeypatch, switch):
    monkeypatch.setenv("FLOWCHAN_CUDA_IPC", switch)
    ch = make(1)
    ch.put(FakeTensor(np.arange(10), "fake-A"))
    FAKE.seen = ["fake-B"]
    message = (
        rf"fake device fake-A of process {os.getpid()}.*can use only: fake-B"
        rf".*CUDA_VISIBLE_DEVICES.*tensor\.cpu\(\)"
    )
    with pytest.raises(ChannelError, match=message):
        ch.get()
    assert kept() == 0


# --- Arithmetic ---


@pytest.mark.parametrize("seed", range(20))
def test_an_arena_never_lends_a_byte_twice_and_loses_none(seed):
    random.seed(seed)
    arena, lent = Arena(0, "fake-A", 1000, None, b""), {}
    for _ in range(500):
        if lent and random.random() < 0.5:
            offset = random.choice(list(lent))
            arena.give(offset, lent.pop(offset))
        elif (offset := arena.take(size := random.randint(1, 200))) is not None:
            lent[offset] = size
        pieces = sorted([*lent.items(), *arena.free])
        assert sum(size for _, size in pieces) == 1000
        assert all(a + size == b for (a, size), (b, _) in itertools.pairwise(pieces))
        assert all(a + size < b for (a, size), (b, _) in itertools.pairwise(arena.free))
    for offset, size in lent.items():
        arena.give(offset, size)
    assert arena.free == [(0, 1000)]

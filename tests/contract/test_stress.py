"""C1, C3, C4, C5, C8, C14: many users start at a barrier, and their totals must be exact."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from support.waiting import wait_until

from flowchan import Closed, Drained

SHAPES = {"spsc": (1, 1), "mpsc": (4, 1), "spmc": (1, 4), "mpmc": (4, 4)}
ITEMS, FEWER = 8_000, 1_600  # items of all writers together, with --long and without


def write(ch, gate, number, count, how):
    """Put (number, 0), (number, 1), … through a port. All writers open their ports before the gate opens."""
    with ch.writer() as out:
        gate.arrive()
        if how == "many":
            for begin in range(0, count, 50):
                out.put_many((number, i) for i in range(begin, begin + 50))
        else:
            for i in range(count):
                out.put((number, i))


def read(ch, gate, how, in_order=True):
    """Take all items. Return the number of items per writer, and the sum of all items.

    Unless ``in_order`` is false, check the order of each writer's items.
    """
    last: Counter[int] = Counter()
    counts: Counter[int] = Counter()
    total = 0
    with ch.reader() as into:
        gate.arrive()
        batches = into_batches(into) if how == "many" else ([item] for item in into)
        for batch in batches:
            for number, i in batch:
                assert i >= last[number] or not in_order, (
                    f"item {i} of writer {number} came after {last[number]}"
                )
                last[number] = i
                counts[number] += 1
                total += i
    return counts, total


def into_batches(into):
    while True:
        try:
            yield into.get_many(30)
        except Drained:
            return


@pytest.mark.each_pair
@pytest.mark.parametrize("how", ["single", "many"])
@pytest.mark.parametrize("capacity", [1, 3, 1_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_item_is_received_once_in_its_writers_order(
    make, spawn_peer, make_gate, peer_kind, shape, capacity, how, long_walk
):
    """C1, C4, C5, C8: with capacity 1, every item wakes a user; with a large capacity, few items do.

    If several remote readers share the channel, an item recalled from one of these readers may arrive after
    later items.
    """
    writers, readers = SHAPES[shape]
    items = ITEMS if long_walk else FEWER
    each = items // writers // (4 if capacity == 1 else 1)
    each -= each % 50
    ch = make(capacity)
    gate = make_gate(writers + readers)
    in_order = readers == 1 or peer_kind != "host"
    reading = [spawn_peer(read, ch, gate, how, in_order) for _ in range(readers)]
    writing = [spawn_peer(write, ch, gate, number, each, how) for number in range(writers)]
    gate.open()
    for peer in writing:
        peer.result()
    counts: Counter[int] = Counter()
    total = 0
    for peer in reading:
        counted, summed = peer.result()
        counts += counted
        total += summed
    assert counts == dict.fromkeys(range(writers), each)
    assert total == writers * sum(range(each))
    stats = ch.stats()
    assert (stats.items_in, stats.items_out, stats.inside) == (writers * each, writers * each, 0)
    assert ch.drained


@pytest.mark.copying
def test_items_of_every_size_keep_their_content(make, spawn_peer, make_gate):
    """C1: several writers put items of 0 bytes up to many times the channel's memory."""
    ch = make(16)
    gate = make_gate(3)
    sizes = [0, 1, 100, 4_096, 70_000, 3, 1_000_000, 17, 65_536]

    def send(number):
        with ch.writer() as out:
            gate.arrive()
            for i in range(60):
                out.put((number, i, bytes([(number * 60 + i) % 256]) * sizes[i % len(sizes)]))

    peers = [spawn_peer(send, number) for number in range(3)]
    gate.open()
    seen: Counter[int] = Counter()
    for number, i, content in ch:
        assert i == seen[number]
        seen[number] += 1
        assert len(content) == sizes[i % len(sizes)]
        assert content.count((number * 60 + i) % 256) == len(content)
    for peer in peers:
        peer.result()
    assert seen == {0: 60, 1: 60, 2: 60}


def test_many_channels_pass_through_channels(make, spawn_peer, make_gate, transport):
    """C14: different users keep making, sending, filling, closing and draining channels."""
    rounds, items = 20, 25
    requests = make(4)
    gate = make_gate(3)

    def serve():
        gate.arrive()
        served = 0
        for start, reply in requests:
            with reply.writer() as out:
                for i in range(items):
                    out.put(start + i)
            served += 1
        return served

    servers = [spawn_peer(serve) for _ in range(3)]
    gate.open()
    for number in range(rounds):
        reply = transport.make(3)
        requests.put((number, reply))
        assert list(reply) == list(range(number, number + items))
    requests.close()
    assert sum(server.result() for server in servers) == rounds


def test_chain_of_channels_drains_after_its_first_channel_closes(make, spawn_peer):
    """C1, C4, C5: items pass through a chain of small channels, and each end is passed on."""
    stages, items = 5, 400
    chain = [make(2) for _ in range(stages + 1)]

    def pass_on(source, target):
        with source.reader() as into, target.writer() as out:
            for item in into:
                out.put(item + 1)

    peers = [spawn_peer(pass_on, source, target) for source, target in pairwise(chain)]
    feeder = spawn_peer(lambda: (chain[0].put_many(range(items)), chain[0].close()))
    assert list(chain[-1]) == list(range(stages, items + stages))
    for peer in [*peers, feeder]:
        peer.result()


def test_close_during_puts_and_gets_loses_no_item(make, spawn_peer, make_gate, long_walk):
    """C3, C4: readers get all items that were put before the close, and all later puts raise Closed."""
    for _ in range(10 if long_walk else 2):
        ch = make(4)
        gate = make_gate(4)

        def put_until_closed(ch=ch, gate=gate):
            gate.arrive()
            done = 0
            try:
                while True:
                    ch.put(1)
                    ch.flush()
                    done += 1
            except Closed:
                return done

        def take_all(ch=ch, gate=gate):
            gate.arrive()
            return sum(ch)

        writers = [spawn_peer(put_until_closed) for _ in range(2)]
        readers = [spawn_peer(take_all) for _ in range(2)]
        gate.open()
        wait_until(lambda ch=ch: ch.stats().items_out >= 50)
        ch.close()
        assert sum(writer.result() for writer in writers) == sum(reader.result() for reader in readers)

"""C14: a channel inside a ``processes`` channel outlives its sender."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import pickle
import resource
import signal
import socket
import struct

import numpy as np
import pytest
from support.waiting import wait_stats

from flowchan import Channel, ChannelError, pack, unpack

pytestmark = pytest.mark.copying


def put_new(carrier, make, *more):
    """Put a new channel with an item inside, and drop all references to the new channel in this process."""
    sent = make(4)
    sent.put_many(["inside", 2])
    carrier.put((sent, *more) if more else sent)


def test_a_channel_dropped_by_its_sender_is_received(make, transport):
    """C14: the sender may also be the receiver."""
    carrier = make()
    put_new(carrier, transport.make)
    gc.collect()
    arrived = carrier.get()
    assert arrived.get_many(4) == ["inside", 2]
    arrived.put("again")
    assert arrived.get() == "again"


@pytest.mark.parametrize("size", [0, 50_000])
@pytest.mark.other_process
@pytest.mark.not_hosts("a channel ends with its owner, the process that made it")
def test_a_channel_is_received_after_its_sender_was_killed(make, spawn_peer, transport, size):
    """C14: the item contains the channel and some small or large data."""
    carrier = make()

    def send_and_stay():
        put_new(carrier, transport.make, b"x" * size, np.zeros(size))
        carrier.put("next")
        signal.pause()

    peer = spawn_peer(send_and_stay)
    wait_stats(carrier, items_in=2)
    peer.kill()
    peer.join()
    arrived, *rest = carrier.get()
    assert [len(part) for part in rest] == [size, size]
    assert arrived.get_many(4) == ["inside", 2]
    assert carrier.get() == "next"


@pytest.mark.other_process
def test_channel_in_an_item_reaches_receivers_after_the_first_died(make, spawn_peer, transport):
    """C14: the first receiver dies with the item on lease. The second port was open before the put."""
    dies_with_it_in_hand(make, spawn_peer, transport, keeps=True)


@pytest.mark.other_process
@pytest.mark.not_hosts("the owner knows that the channel has arrived, but not whether its item is finished")
def test_later_receiver_gets_the_item_that_the_first_receiver_dropped(make, spawn_peer, transport):
    """C14: the first receiver has not finished the item."""
    dies_with_it_in_hand(make, spawn_peer, transport, keeps=False)


def dies_with_it_in_hand(make, spawn_peer, transport, keeps):
    carrier, answers = make(), make()

    def take_and_stay():
        port = carrier.reader()
        kept = port.get()
        assert kept.capacity == 4
        if not keeps:
            del kept
        signal.pause()
        port.close()

    def answer():
        for channel in carrier:
            answers.put(channel.get_many(4))

    put_new(carrier, transport.make)
    stays = carrier.reader()  # keeps the carrier open after the other reader's death
    first = spawn_peer(take_and_stay)
    wait_stats(carrier, leased=1)
    second = spawn_peer(answer)
    first.kill()
    assert answers.get() == ["inside", 2]
    put_new(carrier, transport.make)
    assert answers.get() == ["inside", 2]
    carrier.close()
    first.join()
    second.result()
    stays.close()


@pytest.mark.other_process
def test_nested_channels_pass_through_several_receivers(make, spawn_peer, transport):
    """C14: each receiver can pass on the channel, even through that same channel."""
    hops = [make() for _ in range(3)]
    outer = transport.make(2)
    put_new(outer, transport.make)
    hops[0].put(outer)
    del outer
    for source, target in itertools.pairwise(hops):
        spawn_peer(lambda source=source, target=target: target.put(source.get())).result()
    assert hops[-1].get().get().get_many(4) == ["inside", 2]


@pytest.mark.not_hosts("an item carries addresses instead of descriptors")
def test_item_with_many_channels_arrives(make, transport):
    """C14: a kernel message carries a limited number of channels. The error for a larger item names the
    limit."""
    carrier = make()
    carrier.put([transport.make(2) for _ in range(126)])
    many = carrier.get()
    many[0].put("first")
    many[125].put("last")
    assert (many[0].get(), many[125].get()) == ("first", "last")
    many.append(transport.make(2))
    with pytest.raises(ChannelError, match="can carry at most 126"):
        carrier.put(many)
    assert len(carrier) == 0


@pytest.mark.not_hosts("an item carries addresses instead of descriptors")
def test_put_of_channels_beyond_the_kernel_limit_raises(make, transport):
    """C14: the kernel keeps a limited number of descriptors. After the error, the channel still works."""
    carrier, sent = make(100_000), transport.make(2)
    with pytest.raises(ChannelError, match="receive some items first") as caught:
        carrier.put_many(itertools.repeat(sent))
    count = caught.value.items_put
    assert len(carrier) == count > 100
    for _ in range(3):
        assert carrier.get() is sent
        carrier.put(sent)
    assert all(item is sent for item in carrier.get_many(count))
    assert len(carrier) == 0


def parcels(channel):
    """Return whether the kernel's queue for the channel contains descriptors."""
    with socket.socket(fileno=os.dup(channel._socket)) as queue:
        try:
            return bool(queue.recv(16, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False


@pytest.mark.parametrize("port", [False, True])
@pytest.mark.not_hosts("no descriptors are sent")
def test_kernel_releases_descriptors_with_the_received_item(make, transport, port):
    """C12: the kernel drops its copies of the descriptors once the item is received.

    A port keeps the descriptors of its last item until it gets its next item.
    """
    carrier = make()
    for _ in range(3):
        put_new(carrier, transport.make)
    assert parcels(carrier)
    if port:
        with carrier.reader() as end, carrier.reader():
            assert [channel.capacity for channel in (end.get(), end.get(), end.get())] == [4, 4, 4]
        carrier = make()
        put_new(carrier, transport.make)
    else:
        assert [carrier.get().capacity for _ in range(2)] == [4, 4]
    assert parcels(carrier)
    assert carrier.get().capacity == 4
    assert not parcels(carrier)


@pytest.mark.not_hosts("an item carries addresses instead of descriptors")
def test_descriptors_from_an_unfinished_put_are_released(make, transport):
    """C12: the descriptors were sent for a put that was not completed, so no item has them."""
    carrier = make()
    with socket.socket(fileno=os.dup(carrier._socket)) as queue:
        socket.send_fds(queue, [struct.pack("QQ", 12345, 2)], [carrier._fd, carrier._socket])
    assert parcels(carrier)
    put_new(carrier, transport.make)
    assert carrier.get().get() == "inside"
    assert not parcels(carrier)


def test_stage_port_receives_channels(make, transport):
    """C14: a port gets its leased items singly or as a batch."""
    carrier = make()
    for _ in range(4):
        put_new(carrier, transport.make)
    carrier.close()
    with carrier.reader() as port:
        assert port.get().get_many(4) == ["inside", 2]
        assert [channel.get() for channel in port.get_many(3)] == ["inside"] * 3


def test_receiver_without_free_descriptors_leaves_the_item_in_the_channel(make, transport):
    """C14: the receiver gets the item once it has free descriptors."""
    carrier = make()
    put_new(carrier, transport.make)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 1
    holes = [os.open("/dev/null", os.O_RDONLY)]
    while holes[-1] < used + 8:
        holes.append(os.open("/dev/null", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (holes[-1] + 1, hard))
    try:
        with pytest.raises(OSError, match="ulimit -n") as caught:
            carrier.get()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in holes:
            os.close(fd)
    assert caught.value.errno == errno.EMFILE
    assert carrier.get().get_many(4) == ["inside", 2]


def test_channels_in_packed_bytes_arrive_while_the_sender_keeps_them(make, transport):
    """C14: bytes carry no descriptors, so the sender must keep the channels."""
    carrier, sent = make(), transport.make(2)
    carrier.put([pack(sent), pickle.dumps(sent)])
    packed, pickled = carrier.get()
    assert unpack(packed) is sent
    assert pickle.loads(pickled) is sent


@pytest.mark.other_process
@pytest.mark.not_hosts("a channel's address is sent instead of a descriptor")
def test_put_of_a_channel_reports_why_a_socket_is_unavailable(make, spawn_peer):
    """C14: everything else works on a system that cannot create sockets for descriptors."""
    carrier = make()

    def child():
        from flowchan import _core

        own = Channel.__new__(Channel)
        _core.Channel.__init__(own, fd=os.dup(carrier._fd), socket=-1, name="")
        own.put("plain")
        with pytest.raises(ChannelError, match="socket"):
            own.put(carrier)

    spawn_peer(child).result()
    assert carrier.get_many(3) == ["plain"]

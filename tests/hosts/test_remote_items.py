"""Test items of channels across hosts, including items that contain channels (C13, C14)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
from support.peers import HostPeer, ProcessPeer, child_of_multiprocessing
from support.waiting import wait_stats, wait_until

from flowchan import Broken, Channel, ChannelError, pack, select, unpack
from flowchan.hosts import open_channel
from flowchan.remote import channel_server as server_module
from flowchan.remote import remote_channel, serving
from flowchan.remote.connection import Connection
from flowchan.remote.pending_calls import PendingCall

pytestmark = pytest.mark.usefixtures("impatient")


def make(capacity=64, **options):
    return Channel(capacity, across="hosts", **options)


def test_owner_passes_on_items_without_unpickling_them():
    """Only remote programs know the item's class."""
    channel = make()

    def put():
        class Mine:
            def __init__(self, array):
                self.array = array

            def __setstate__(self, state):
                if os.getpid() == owner:
                    raise AssertionError("unpickled at the owner")
                self.__dict__.update(state)

        channel.put(Mine(np.arange(100_000)))

    owner = os.getpid()
    HostPeer(put).result()
    assert HostPeer(lambda: int(channel.get().array.sum())).result() == sum(range(100_000))


def test_channel_can_be_sent_through_another_channel():
    """C14: a reply through the sent channel reaches this program."""
    carrier, reply = make(), make()

    def answer():
        carrier.get()["reply"].put("heard")

    peer = HostPeer(answer)
    carrier.put({"reply": reply})
    assert reply.get() == "heard"
    peer.result()


def test_channel_received_from_its_owner_can_be_forwarded(monkeypatch):
    carrier = make()

    def offer():
        own = make(2)
        carrier.put(own)
        return [own.get(), own.get()]

    peer = HostPeer(offer)
    arrived = carrier.get()
    arrived.put("from here")
    HostPeer(arrived.put, "from a third program").result()
    assert peer.result() == ["from here", "from a third program"]
    with pytest.raises(Broken, match=r"127\.0\.0\.1:\d+"):
        arrived.put("nobody is there any more")
    monkeypatch.setattr(remote_channel, "PEER_TIMEOUT_S", 0.1)
    carrier.put([arrived])  # the receiver gets the error
    with pytest.raises(Broken, match="can't be received"):
        carrier.get()


def test_opening_a_channel_twice_returns_the_same_object():
    channel = make()

    def look():
        first = open_channel(channel.address, channel.secret)
        return first is channel and first is open_channel(channel.address, channel.secret)

    assert HostPeer(look).result()


def test_owner_has_one_object_for_a_channel_only_in_transit(monkeypatch):
    """C13: the owner has only one object even if two threads look for the channel at once."""
    carrier, sent = make(), make()
    carrier.put(sent)
    server, number = sent._reached.server, sent._reached.number
    del sent
    gc.collect()
    found, twin = [], server_module._twin

    def find_first(channel, fd):
        monkeypatch.setattr(server_module, "_twin", twin)
        found.append(server.find(number))
        return twin(channel, fd)

    monkeypatch.setattr(server_module, "_twin", find_first)
    assert server.find(number) is found[0]
    assert carrier.get() is found[0]


def test_threads_that_open_the_same_channel_get_the_same_object():
    """If there were two objects, releasing the first would make the program leave the channel."""
    channel = make()
    at = channel.address, channel.secret

    def look():
        known = []

        def opened(_):
            meet.wait()
            return open_channel(*at)

        meet = threading.Barrier(2)
        with ThreadPoolExecutor(2) as threads:
            for _ in range(30):
                one, other = threads.map(opened, range(2))
                known.append(one is other)
                del one
                other.stats()
                del other
        return known

    assert HostPeer(look).result() == [True] * 30


@pytest.mark.parametrize("local", ["processes", "threads"])
def test_put_of_a_channel_that_cannot_leave_its_machine_raises(local):
    """C13: the owner and remote programs get the error, and the channel stays unchanged."""
    channel = make()
    with pytest.raises(TypeError, match=r"hosts|processes"):
        channel.put({"inner": Channel(across=local)})

    def put(how):
        with pytest.raises(TypeError, match=r"hosts|processes"):
            how({"inner": Channel(across=local)})

    def put_in_all_ways():
        put(channel.put)
        put(channel.put_nowait)
        with channel.writer() as writer:
            put(writer.put)

    HostPeer(put_in_all_ways).result()
    assert channel.stats().items_in == 0


def test_ports_cannot_be_sent_to_other_hosts():
    """Instead, the channel can be sent and its ports opened on the other host."""
    channel = make()

    def put_ports():
        for port in (channel.reader(), channel.writer(), Channel(across="processes").writer()):
            with pytest.raises(TypeError, match="channel"):
                channel.put(port)

    put_ports()
    assert channel.stats().items_in == 0
    spare = make()
    channel = spare
    HostPeer(put_ports).result()


def test_channel_survives_until_the_next_receiver_gets_its_item():
    """C14: the first receiver drops the channel, and is killed before it has finished the item."""
    carrier, ready = make(), make()

    def receive_and_drop():
        reader = carrier.reader()
        reader.get().put("from the first")
        for _ in range(20):  # after these round trips, the owner knows that the channel was dropped
            len(ready)
        ready.put("dropped")
        signal.pause()

    peer = HostPeer(receive_and_drop)
    carrier.put(make())
    assert ready.get() == "dropped"
    peer.kill()
    peer.join()
    with carrier.reader() as successor:
        assert successor.get().get() == "from the first"


def test_channel_survives_until_the_last_item_containing_it_is_finished():
    """C12, C14: other users drop the channel or open it by its address."""
    carrier, inner = make(), make()
    (server,) = serving._servers
    carrier.put_many([inner, inner])
    told = inner.address, inner.secret

    def open_and_receive():
        open_channel(*told).put("by address")
        carrier.get().put("by item")

    HostPeer(open_and_receive).result()
    del inner
    (received,) = carrier.get_many(5)
    assert received.get_many(5) == ["by address", "by item"]
    number = int(received.address.rpartition("/")[2])
    del received

    def has_ended():
        with contextlib.suppress(ChannelError):
            return server.find(number) is None
        return True

    wait_until(has_ended)


def test_packed_item_keeps_its_channels_alive():
    """C14: the item can be unpickled repeatedly, without any other reference to its channel."""
    carrier = make()

    def use():
        packed = pack({"inner": make(2)})
        for number in range(2):
            unpack(packed)["inner"].put(number)
        carrier.put(packed)
        assert unpack(carrier.get())["inner"].get_many(5) == [0, 1]

    use()
    HostPeer(use).result()


@pytest.mark.parametrize("place", [child_of_multiprocessing, lambda function: HostPeer(function).result()])
def test_channel_survives_in_an_item_that_is_put_again(place):
    """C12, C14: a forked child or a remote program puts the item. Afterwards, the channel is released."""
    carrier = make()
    (server,) = serving._servers
    carrier.put(make())

    def put_again():
        for _ in range(3):
            carrier.put(carrier.get())

    place(put_again)
    received = carrier.get()
    received.put("still there")
    assert received.get() == "still there"
    number = int(received.address.rpartition("/")[2])
    assert server.is_here(number)
    del received
    wait_until(lambda: number not in server._channels and number not in server._sent)


def interrupt(which, call, *arguments):
    """Raise Ctrl-C immediately after the reply to request number ``which`` of the call has arrived."""
    wait, questions = PendingCall.wait, []

    def interrupted(asked, within):
        wait(asked, within)
        questions.append(asked)
        if len(questions) == which:
            signal.raise_signal(signal.SIGINT)

    PendingCall.wait = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            call(*arguments)
    finally:
        PendingCall.wait = wait


def test_interrupted_call_keeps_no_channel_alive():
    """C12: the interrupted call opens or makes a channel, or puts a channel into an item."""
    inner, other, over = make(), make(), make()
    (server,) = serving._servers
    told = inner.address, inner.secret

    def use():
        interrupt(1, open_channel, *told)
        interrupt(1, other.put, [open_channel(*told)])
        interrupt(2, other._another, 1)
        with (
            pytest.raises(KeyboardInterrupt),
            mock.patch.object(Connection, "open", side_effect=KeyboardInterrupt),
        ):
            other._another(1)
        other.put("used")
        over.get()

    peer = HostPeer(use)
    assert other.get() == "used"
    del inner
    wait_until(lambda: len(server._channels) == 2 and not server._sent)
    over.put(None)
    peer.result()


def test_abandoned_put_keeps_no_channel_alive():
    """C9, C12: the put is cancelled, interrupted by Ctrl-C, or not chosen by a select."""
    inner, full, over = make(), make(1), make()
    (server,) = serving._servers
    full.put("full")

    def give_up():
        async def cancel(given_up):
            putting = asyncio.create_task(given_up)
            while full.stats().waiting_writers == 0:
                await asyncio.sleep(0)
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting

        mine = open_channel(inner.address, inner.secret)
        asyncio.run(cancel(full.aput(mine)))
        interrupt(2, full.put_nowait, mine)
        interrupt(2, functools.partial(select, timeout=0), (), [(full, mine)])
        over.get()

    peer = HostPeer(give_up)
    number = int(inner.address.rpartition("/")[2])
    wait_until(lambda: over.stats().waiting_readers == 1)
    wait_until(lambda: number not in server._sent)
    over.put(None)
    peer.result()


def test_port_is_not_counted_if_ctrl_c_ends_its_opening():
    """C5, C9: Ctrl-C interrupts the call that opens the port."""
    channel, over = make(), make()

    def open_ends():
        for end in (channel.writer, channel.reader):
            for _ in range(20):
                interrupt(1, end)
        over.get()

    peer = HostPeer(open_ends)
    wait_until(lambda: over.stats().waiting_readers == 1)
    wait_stats(channel, readers=0, writers=0)
    over.put(None)
    peer.result()


def test_channel_cannot_be_sent_after_its_last_item_is_finished():
    """C14: the channel would be gone before the receiver could open it."""
    spare = make()  # keeps the server alive
    (server,) = serving._servers
    inner = make()
    number = int(inner.address.rpartition("/")[2])
    server.send(number)
    del inner
    counting = server._counting

    @contextlib.contextmanager
    def after_the_item():
        server._counting = counting
        server.item_done(number)
        with counting:
            yield

    server._counting = after_the_item()
    assert not server.send(number)
    assert not server._under_way
    del spare


@pytest.mark.parametrize("aborted", [False, True])
def test_channels_in_unread_items_are_released_with_their_carrier(aborted):
    """C12: channels in the items of those channels are also released."""
    kept, carrier, other, inner = make(), make(), make(), make()
    (server,) = serving._servers
    other.put(inner)
    carrier.put_many([other, inner, 1])
    carrier.put([other] * 2)
    del other, inner
    assert server._under_way.total() == 4
    if aborted:
        carrier.abort(ValueError("enough"))
    del carrier
    wait_until(lambda: not server._under_way, what=lambda: server._under_way)
    assert kept.address.startswith(server.address)  # the server must not have ended


def test_channels_in_items_survive_while_a_child_has_outer_channel():
    carrier, inner, go, kept = make(), make(), make(), make()
    (server,) = serving._servers
    carrier.put(inner)

    def take(carrier):
        go.get()
        received = carrier.get()
        received.put(7)
        return received.get()

    peer = ProcessPeer(take, carrier)
    del carrier, inner
    wait_until(lambda: len(server._dropped) > 0)
    go.put(None)
    assert peer.result() == 7
    wait_until(lambda: not server._under_way and not server._dropped, what=lambda: server._under_way)
    assert not len(kept)


def test_channel_received_by_a_forked_child_can_be_forwarded():
    """C12, C14: the child needs no other reference, even after it has finished the item."""
    carrier, target, go = make(), make(), make()
    (server,) = serving._servers
    carrier.put(make())

    def pass_on():
        inner = carrier.get()
        go.get()
        inner.put("inside")
        target.put(inner)

    peer = ProcessPeer(pass_on)
    wait_until(lambda: not server._under_way)
    go.put(None)
    peer.result()
    received = target.get()
    assert received.get() == "inside"
    number = int(received.address.rpartition("/")[2])
    del received
    wait_until(lambda: number not in server._channels and number not in server._sent)

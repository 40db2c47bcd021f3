"""What travels in channels across hosts, other channels among it (C13, C14)."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest
from peers import HostPeer
from waiting import wait_until

from flowchan import Broken, Channel, ChannelError
from flowchan.hosts import hosting, open_channel

pytestmark = pytest.mark.usefixtures("impatient")


def make(capacity=64, **options):
    return Channel(capacity, across="hosts", **options)


def test_what_home_does_not_know_passes_through_unseen():
    """Items of a class that only the programs elsewhere have."""
    channel = make()

    def put():
        class Mine:
            def __init__(self, array):
                self.array = array

            def __setstate__(self, state):
                if os.getpid() == home:
                    raise AssertionError("unpickled at home")
                self.__dict__.update(state)

        channel.put(Mine(np.arange(100_000)))

    home = os.getpid()
    HostPeer(put).result()
    assert HostPeer(lambda: int(channel.get().array.sum())).result() == sum(range(100_000))


def test_a_channel_is_sent_through_another_one():
    """C14: and answers through it come here."""
    carrier, reply = make(), make()

    def answer():
        carrier.get()["reply"].put("heard")

    peer = HostPeer(answer)
    carrier.put({"reply": reply})
    assert reply.get() == "heard"
    peer.result()


def test_a_channel_that_was_made_elsewhere_comes_here_and_goes_on():
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


def test_the_same_channel_is_one_object():
    channel = make()

    def look():
        first = open_channel(channel.address, channel.secret)
        return first is channel and first is open_channel(channel.address, channel.secret)

    assert HostPeer(look).result()


@pytest.mark.parametrize("local", ["processes", "threads"])
def test_what_can_not_leave_the_machine_raises_where_it_is_put(local):
    """C13: at home and elsewhere, and the channel stays as it was."""
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


def test_ports_do_not_move_to_other_hosts():
    """The channel does, and ports are opened there."""
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


def test_a_channel_is_there_for_who_takes_its_item_up():
    """C14: though the first to receive it dropped it, and was killed before its item was finished."""
    carrier, ready = make(), make()

    def receive_and_drop():
        reader = carrier.reader()
        reader.get().put("from the first")
        for _ in range(20):  # round trips, so home would have heard that it was dropped
            len(ready)
        ready.put("dropped")
        ready.reader().get()

    peer = HostPeer(receive_and_drop)
    carrier.put(make())
    assert ready.get() == "dropped"
    peer.kill()
    peer.join()
    with carrier.reader() as successor:
        assert successor.get().get() == "from the first"


def test_a_channel_lasts_until_the_last_item_that_has_it_is_finished():
    """C14: others have dropped it before, or opened it by its address. C12: then it goes."""
    carrier, inner = make(), make()
    (home,) = hosting._homes
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

    def is_gone():
        with contextlib.suppress(ChannelError):
            return home.find(number) is None
        return True

    wait_until(is_gone)

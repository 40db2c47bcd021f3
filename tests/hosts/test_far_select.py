"""Test ``select`` in a program that has opened channels of other programs (C10).

tests/contract/test_select.py shows that ``select`` takes one item, fairly, and loses none. These tests show
what happens when owners and users come, leave and die during a ``select``.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from support.peers import HostPeer, ThreadPeer
from support.waiting import wait_blocked, wait_stats, wait_until

from benchmarks.far import cut
from flowchan import Broken, Channel, Closed, Drained, HostError, NothingReady, Selected, select
from flowchan.hosts import serve
from flowchan.remote import remote_select, serving

pytestmark = pytest.mark.usefixtures("impatient")


def make(capacity=64):
    return Channel(capacity, across="hosts")


def hold(told, over):
    """Own a channel in another program until ``over`` has an item."""
    serve(peer_timeout=2)
    mine = make()
    told.put(mine)
    over.get()


def test_remote_channel_is_ready_when_get_would_not_block():
    """C10: a channel in ``ready`` loses no item."""
    work, stop = make(), make(1)

    def look():
        with pytest.raises(NothingReady):
            select([work], ready=[stop], timeout=0)
        return [
            select([work], ready=[stop]).item,
            select([work], ready=[stop]) == Selected(stop, None, put=False),
        ]

    peer = HostPeer(look)
    wait_blocked(stop, readers=1)
    work.put("item")
    wait_until(lambda: not len(work))
    stop.close()
    assert peer.result() == ["item", True]


def test_remote_select_takes_1_to_128_operations():
    """C10: the limit holds for remote channels."""
    channels = [make(1) for _ in range(128)]

    def look():
        with pytest.raises(NothingReady):
            select(channels, timeout=0.01)
        with pytest.raises(ValueError, match="1 to 128 operations, got 129"):
            select([*channels, channels[0]], timeout=0)
        channels[77].put("there")
        return select(channels).item

    assert HostPeer(look).result() == "there"


def test_select_waits_for_two_owners_and_a_local_channel():
    """C10: the first ready channel is taken, and no wait remains afterwards."""
    told, over, ours = make(), make(), make()
    home = HostPeer(hold, told, over)
    theirs = told.get()

    def choose():
        local = Channel()
        found = [select([ours, theirs, local]).item for _ in range(2)]
        local.put("here")
        return [*found, select([ours, theirs, local]).item, theirs.stats().selecting, ours.stats().selecting]

    peer = HostPeer(choose)
    wait_blocked(theirs, readers=1)
    theirs.put("theirs")
    wait_until(lambda: not len(theirs))
    wait_blocked(ours, readers=1)
    ours.put("ours")
    assert peer.result() == ["theirs", "ours", "here", 0, 0]
    over.put(None)
    home.result()


def test_select_ends_when_one_of_its_owners_is_killed():
    """C6, C11: the killed owner breaks its channel."""
    told, over, ours = make(), make(), make()
    home = HostPeer(hold, told, over)
    theirs = told.get()

    def choose():
        with pytest.raises(Broken) as caught:
            select([ours, theirs])
        assert isinstance(caught.value.__cause__, HostError)

    waiting = [ThreadPeer(choose), HostPeer(choose)]
    wait_blocked(theirs, readers=2)
    home.kill()
    home.join()
    for peer in waiting:
        peer.result()


@pytest.mark.parametrize("far_first", [True, False])
def test_select_ends_once_both_channels_are_drained(far_first):
    """C4, C10: the local or the remote channel may be the last."""
    far = make()

    def choose():
        local = Channel()
        channels = [far, local] if far_first else [local, far]
        waiting = ThreadPeer(select, [far, local])
        wait_blocked(local, readers=1)
        wait_blocked(far, readers=1)
        channels[0].close()
        wait_until(lambda: not far.drained or far.stats().waiting_readers == 0)
        channels[1].close()
        with pytest.raises(Drained):
            waiting.result()

    HostPeer(choose).result()


@pytest.mark.parametrize("alone", [True, False])
def test_program_killed_during_select_is_forgotten(alone):
    """C10, C11: the select runs at one owner, or also over a local channel."""
    one, two = make(), make()

    def choose():
        return select([one, two] if alone else [one, two, Channel()])

    peer = HostPeer(choose)
    wait_blocked(one, readers=1)
    peer.kill()
    peer.join()
    wait_stats(one, waiting_readers=0, selecting=0)
    one.put("item")
    assert one.get() == "item"


WAITS = {
    "get": lambda one: one.get(),
    "select": lambda one: select([one]),
    "select among others": lambda one: select([one, Channel()]),
}


@pytest.mark.parametrize("how", WAITS)
def test_ctrl_c_ends_a_remote_wait_and_loses_no_item(how):
    """C9, C10: the item that arrives after the interrupt goes to the next call."""
    one, ready, wait_for = make(), make(), WAITS[how]

    def wait():
        with pytest.raises(KeyboardInterrupt):
            wait_for(one)
        ready.put("interrupted")
        return one.get()

    peer = HostPeer(wait)
    wait_blocked(one, readers=1)
    os.kill(peer.pid(), signal.SIGINT)
    ready.get()
    one.put("there")
    assert peer.result() == "there"


def test_select_over_a_broken_connection_takes_each_item_once():
    """C10: two programs take items with ``select`` and put them with ``select``."""
    left, right, back = make(2), make(2), make(1)
    each = 150

    def move():
        local = Channel()
        while True:
            try:
                item = select([left, right]).item
            except Closed:
                return
            done = select([local], puts=[(back, item)])
            assert done.put

    peers = [HostPeer(move) for _ in range(2)]
    feeding = [ThreadPeer(channel.put_many, range(n, each + n)) for channel, n in ((left, 0), (right, each))]
    found = Counter()
    for number in range(2 * each):
        found[back.get()] += 1
        if number % 25 == 0:
            cut()
    for feeder in feeding:
        feeder.result()
    left.close()
    right.close()
    for peer in peers:
        peer.result()
    assert found == Counter(range(2 * each))


def test_channel_in_an_item_that_was_not_put_is_released():
    """C12: a select or a put times out or is refused."""
    full = make(1)
    full.put("old")
    (home,) = serving._homes

    def offer(inner):
        with pytest.raises(NothingReady):
            select(puts=[(full, [inner])], timeout=0.01)
        with pytest.raises(NothingReady):
            select([Channel()], puts=[(full, [inner])], timeout=0)
        with pytest.raises(TypeError):
            select(puts=[(full, [inner]), ("no channel", 1)])
        with pytest.raises(TypeError, match="across='hosts'"):
            select(puts=[(full, [inner]), (full, Channel(across="processes"))])
        with pytest.raises(TimeoutError):
            full.put([inner], timeout=0)
        with pytest.raises(ValueError, match="timeout"):
            full.put([inner], timeout=-1)
        with pytest.raises(TypeError, match="across='hosts'"):
            full.put([inner, Channel(across="processes")])

    HostPeer(offer, spare := make()).result()
    number = int(spare.address.rpartition("/")[2])
    del spare
    wait_until(lambda: number not in home._channels and number not in home._sent)


def test_a_select_that_does_not_wait_ends_though_something_moves_all_the_time():
    """C10: who asks several homes would find something moved in every round."""

    class Busy:
        places = (0,)
        moves = 0

        def try_now(self):
            self.moves += 1
            assert self.moves < 10_000
            return remote_select.NOT_NOW, None

    assert remote_select._try_at_one_moment([Busy()]) == (remote_select.NOT_NOW, None)

"""Test ``select`` in a program that has opened channels of other programs (C10).

tests/contract/test_select.py shows that ``select`` takes exactly one item and chooses fairly, and that no
item is lost.
These tests add owners and users that start, leave and die during a ``select``.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
from support.peers import HostPeer, ThreadPeer
from support.waiting import wait_blocked, wait_stats, wait_until

from benchmarks.slow_connections import cut
from flowchan import Broken, Channel, Closed, Drained, HostError, NothingReady, Selected, select
from flowchan.hosts import serve
from flowchan.remote import serving

pytestmark = pytest.mark.usefixtures("impatient")


def make(capacity=64):
    return Channel(capacity, across="hosts")


def hold(handover, over):
    """Own a channel in another program until ``over`` contains an item."""
    serve(peer_timeout=2)
    owned = make()
    handover.put(owned)
    over.get()


def test_remote_channel_is_ready_when_get_would_not_block():
    """C10: waiting with ``ready`` takes no item from the channel."""
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
    wait_stats(work, items_out=1, leased=0)  # two channels have no common order, so the item goes first
    stop.close()
    assert peer.result() == ["item", True]


def test_remote_select_accepts_1_to_128_operations():
    """C10: the limit of 128 operations applies to remote channels as well."""
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
    """C10: select takes an item from the first ready channel, and ends the waits for all other channels."""
    handover, over, own = make(), make(), make()
    owner = HostPeer(hold, handover, over)
    remote = handover.get()

    def choose():
        local = Channel()
        found = [select([own, remote, local]).item for _ in range(2)]
        local.put("here")
        return [*found, select([own, remote, local]).item, remote.stats().selecting, own.stats().selecting]

    peer = HostPeer(choose)
    wait_blocked(remote, readers=1)
    remote.put("theirs")
    wait_until(lambda: not len(remote))
    wait_blocked(own, readers=1)
    own.put("ours")
    assert peer.result() == ["theirs", "ours", "here", 0, 0]
    over.put(None)
    owner.result()


def test_select_raises_broken_when_an_owner_is_killed():
    """C6, C11: the owner's death breaks its channel."""
    handover, over, own = make(), make(), make()
    owner = HostPeer(hold, handover, over)
    remote = handover.get()

    def choose():
        with pytest.raises(Broken) as caught:
            select([own, remote])
        assert isinstance(caught.value.__cause__, HostError)

    waiting = [ThreadPeer(choose), HostPeer(choose)]
    wait_blocked(remote, readers=2)
    owner.kill()
    owner.join()
    for peer in waiting:
        peer.result()


@pytest.mark.parametrize("remote_first", [True, False])
def test_select_ends_once_both_channels_are_drained(remote_first):
    """C4, C10: the last channel to be drained may be local or remote."""
    remote = make()

    def choose():
        local = Channel()
        channels = [remote, local] if remote_first else [local, remote]
        waiting = ThreadPeer(select, [remote, local])
        wait_blocked(local, readers=1)
        wait_blocked(remote, readers=1)
        channels[0].close()
        assert waiting.running()
        channels[1].close()
        with pytest.raises(Drained):
            waiting.result()

    HostPeer(choose).result()


@pytest.mark.parametrize("alone", [True, False])
def test_owner_does_not_count_a_program_killed_during_select(alone):
    """C10, C11: all channels have the same remote owner, or one channel is local."""
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
    """C9, C10: an item that arrives after the interrupt goes to the next call."""
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
    """C10: two programs take and put items with ``select``."""
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


def test_channel_in_an_item_is_released_if_the_put_fails():
    """C12: the put or the select times out or raises an error."""
    full = make(1)
    full.put("old")
    (server,) = serving._servers

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
    wait_until(lambda: number not in server._channels and number not in server._sent)

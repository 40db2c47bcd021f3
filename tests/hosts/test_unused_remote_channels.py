"""Test that remote channels free their rings after programs have dropped them (C12, C16)."""

from __future__ import annotations

import gc

import pytest
from support.peers import HostPeer, ProcessPeer
from support.waiting import wait_stats, wait_until
from test_remote_ports import make, put_beyond_room

from flowchan import Broken, Full, select
from flowchan.hosts import open_channel
from flowchan.remote import serving

pytestmark = pytest.mark.usefixtures("impatient")


def rings_here():
    """Return how many rings this process has mapped."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:flowchan" in line for line in maps)


def test_dropped_channel_frees_its_rings_without_garbage_collection():
    channel = make()

    def use_and_drop():
        kept = channel
        kept.stats()
        gc.collect()
        gc.disable()
        before = rings_here()
        for _ in range(10):
            other = kept._another(4)
            other.put_many([1, 2, 3])
            other.get()
            select([other], puts=[(other, 4)])
            with pytest.raises(Full):
                other.put_many(range(5), timeout=0)
            other.abort(RuntimeError("over"))
            with pytest.raises(Broken):
                select([other])
            assert rings_here() > before
            del other
            wait_until(lambda: rings_here() == before)
        return True

    assert HostPeer(use_and_drop).result()


@pytest.mark.parametrize("counted", [False, True])
def test_unused_channel_frees_rings_of_items_that_wait(counted):
    """C12, C16: all programs have dropped the channel, so its items can no longer be read."""
    channel = make()

    def put_and_drop():
        kept = channel
        kept.stats()
        gc.collect()
        before = rings_here()
        for _ in range(3):
            other = kept._another(1)
            if counted:
                writer = other.writer()
                writer.put_many(range(5))
                del writer
            else:
                other.put(1)
                other.flush()
                put_beyond_room(other, 2)
            assert rings_here() > before
            del other
        wait_until(
            lambda: rings_here() == before,
            8,
            lambda: (
                before,
                rings_here(),
                kept._connection._streams,
                gc.collect(),
                rings_here(),
                kept._connection.link.state(),
            ),
        )

    (server,) = serving._servers
    HostPeer(put_and_drop).result()
    wait_until(lambda: not server._entrances and not server._dropped)


def test_items_in_transit_reach_a_child_after_others_left():
    """C16: the channel still has a user, the forked child."""
    kept, numbers, go, done = make(), make(1), make(), make()
    (server,) = serving._servers

    def read(numbers):
        go.get()
        return [numbers.get() for _ in range(3)]

    def put_and_drop(address, secret):
        open_channel(address, secret).writer().put_many(range(3))
        done.get()

    reader, writer = ProcessPeer(read, numbers), HostPeer(put_and_drop, numbers.address, numbers.secret)
    number = int(numbers.address.rpartition("/")[2])
    wait_stats(numbers, inside=1)
    del numbers
    wait_until(lambda: number not in server._channels and number not in server._sent)
    go.put(None)
    assert reader.result() == [0, 1, 2]
    done.put(None)
    writer.result()
    assert not len(kept)

"""Test C16: ``put`` and ``get`` on a remote channel use a port of their process.

These tests count items and requests to the owner; they do not measure time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest
from support.peers import HostPeer, ThreadPeer
from support.waiting import wait_blocked, wait_stats, wait_until

from flowchan import Broken, Channel, Closed, Drained, Empty, Full, NothingReady, select
from flowchan.remote.pending_calls import Calls

pytestmark = pytest.mark.usefixtures("impatient")


def make(capacity=64, **options):
    return Channel(capacity, across="hosts", **options)


def requests_of(call):
    """Return the requests that ``call`` sends to the owner."""
    sent, send = [], Calls._send

    def count(calls, call, channel, what, arguments):
        sent.append(what)
        send(calls, call, channel, what, arguments)

    Calls._send = count
    try:
        call()
    finally:
        Calls._send = send
    return sent


def put_beyond_room(channel, item):
    """Put an item as if the owner had granted room and then given that room to another process."""
    ring = channel._ports[False]._stream.ring
    while True:
        ring._allow(ring.stats().items_in + 1)
        with contextlib.suppress(Full):  # the owner has just reported its own limit again
            return ring.put_nowait(item)


# number of requests


def test_thousand_puts_need_only_one_request():
    channel = make(10_000)

    def put_all():
        for number in range(1_000):
            channel.put(number)
        channel.flush()

    assert HostPeer(lambda: requests_of(put_all)).result() == ["writer"]
    assert channel.get_many(1_000) == list(range(1_000))


def test_thousand_gets_need_only_one_request():
    channel = make(10_000)
    channel.put_many(range(1_000))

    def take():
        found = []
        return requests_of(lambda: found.extend(channel.get() for _ in range(1_000))), found

    assert HostPeer(take).result() == (["reader"], list(range(1_000)))


def test_repeated_selects_open_each_channel_only_once():
    one, two = make(), make()

    def choose():
        return requests_of(lambda: [select([one, two]) for _ in range(100)])

    peer = HostPeer(choose)
    for number in range(50):
        one.put(number)
        two.put(number)
    assert peer.result().count("reader") == 2


# items at the owner


def test_items_have_arrived_when_flush_returns():
    channel = make()

    def put():
        channel.put_many(range(10))
        channel.flush()
        os._exit(0)

    HostPeer(put).join()
    assert [channel.get_nowait() for _ in range(10)] == list(range(10))


def test_items_have_arrived_when_close_returns():
    channel = make()

    def put():
        channel.put_many(range(10))
        channel.close()
        os._exit(0)

    HostPeer(put).join()
    assert list(channel) == list(range(10))


def test_items_have_arrived_when_the_ports_with_block_ends():
    channel = make()

    def put():
        with channel.writer() as writer:
            writer.put_many(range(10))
            writer.flush()
            before = len(channel)
        return before, len(channel)

    assert HostPeer(put).result() == (10, 10)


def test_program_sends_its_items_before_it_exits():
    channel = make()
    HostPeer(channel.put_many, range(50)).result()
    assert [channel.get(timeout=60) for _ in range(50)] == list(range(50))


def test_flush_without_items_in_transit_returns_on_every_transport():
    for across in ("threads", "processes", "hosts"):
        channel = Channel(across=across)
        channel.put(1)
        channel.flush()
        with channel.writer() as writer:
            writer.put(2)
            writer.flush(timeout=0)
        assert len(channel) == 2


def test_flush_raises_if_the_channel_closes_before_items_arrive():
    """C16: while the items were in transit, the owner gave their room to another process."""
    channel, ready, go_on = make(1), make(), make()

    def put():
        channel.put("first")
        channel.flush()
        put_beyond_room(channel, "second")
        with pytest.raises(Full):
            channel.flush(timeout=0.05)
        ready.put(None)
        go_on.get()
        with pytest.raises(Closed):
            channel.flush()

    peer = HostPeer(put)
    ready.get()
    channel.close()
    go_on.put(None)
    peer.result()
    assert list(channel) == ["first"]


def test_put_after_close_in_the_same_process_raises():
    channel = make()

    def use():
        channel.put(1)
        channel.close()
        with pytest.raises(Closed):
            channel.put(2)
        with pytest.raises(Closed):
            channel.put_nowait(2)

    HostPeer(use).result()
    assert list(channel) == [1]


def test_first_put_into_a_closed_channel_raises():
    channel = make()
    channel.close()

    def use():
        for call in (channel.put, channel.put_nowait):
            with pytest.raises(Closed):
                call(1)
        with pytest.raises(Drained):
            channel.get()

    HostPeer(use).result()


# capacity


def test_put_waits_while_the_owner_has_no_room():
    """C2: a put from another process waits like a local put."""
    channel = make(3)

    def put():
        for number in range(10):
            channel.put(number)
        channel.flush()

    peer = HostPeer(put)
    wait_blocked(channel, writers=1)
    assert len(channel) == 3
    assert [channel.get() for _ in range(10)] == list(range(10))
    peer.result()
    assert channel.stats().waiting_writers == 0


def test_prefetched_items_count_against_the_capacity():
    """C2: items that the owner has sent to this process still occupy room."""
    channel = make(2)

    def use():
        channel.put_many([1, 2])
        with pytest.raises(NothingReady):
            select(puts=[(channel, 3)], timeout=0)
        assert channel.get() == 1
        channel.put_nowait(3)
        return channel.get_many(5)

    assert HostPeer(use).result() == [2, 3]


def test_put_nowait_uses_room_that_was_freed_at_the_owner():
    """C7: before ``put_nowait`` fails, it asks the owner."""
    channel, go_on, ready = make(1), make(), make()

    def use():
        channel.put(1)
        with pytest.raises(Full):
            channel.put_nowait(2)
        ready.put(None)
        go_on.get()
        channel.put_nowait(2)
        channel.flush()

    peer = HostPeer(use)
    ready.get()
    assert channel.get() == 1
    go_on.put(None)
    peer.result()
    assert channel.get() == 2


# deaths


def test_killed_program_loses_only_unflushed_items():
    channel, ready = make(10_000), make()

    def put():
        channel.put_many(range(100))
        channel.flush()
        ready.put(None)
        channel.put_many(range(100, 5_000))
        signal.pause()

    peer = HostPeer(put)
    ready.get()
    peer.kill()
    peer.join()
    wait_until(lambda: not channel._reached.server.sessions())
    found = channel.get_many(10_000)
    assert found == list(range(len(found)))
    assert len(found) >= 100
    channel.put("open")  # A program without a counted writer does not break the channel when it dies.
    assert channel.get() == "open"


def test_prefetched_items_are_returned_when_their_reader_is_killed():
    channel, ready = make(), make()

    def take():
        got = channel.get()
        channel._offer(5)  # the owner sends five items, as to a fast reader
        ring = channel._ports[True]._stream.ring
        wait_until(lambda: len(ring) == 5)
        ready.put(got)
        ready.flush()
        os.kill(os.getpid(), signal.SIGSTOP)

    peer = HostPeer(take)
    channel.put_many(range(10))
    assert ready.get() == 0
    peer.kill()
    peer.join()
    # the owner notices the death only later
    assert sorted(channel.get(timeout=60) for _ in range(9)) == list(range(1, 10))


def test_prefetched_items_of_an_idle_reader_return():
    """C8: the items return even if no other reader is waiting for them."""
    channel, ready, over = make(), make(), make()

    def take():
        got = channel.get()
        channel._offer(5)
        ready.put(got)
        over.get()

    peer = HostPeer(take)
    channel.put_many(range(10))
    assert ready.get() == 0
    wait_stats(channel, leased=0, inside=9)
    assert [channel.get_nowait() for _ in range(9)] == list(range(1, 10))
    over.put(None)
    peer.result()


def test_calls_raise_broken_when_the_owner_is_killed():
    handover = make()

    def own():
        owned = make()
        handover.put(owned)
        handover.flush()
        handover.put(owned.get())
        handover.flush()
        signal.pause()

    owner = HostPeer(own)
    channel = handover.get()
    channel.put("seen")
    assert handover.get() == "seen"  # otherwise, the thread below might take the item
    getting = ThreadPeer(channel.get)
    wait_blocked(channel, readers=1)
    owner.kill()
    owner.join()
    with pytest.raises(Broken):
        getting.result()
    with pytest.raises(Broken):
        channel.put(1)
    with pytest.raises(Broken):
        channel.flush()


# several channels, timeouts, Ctrl-C


def test_select_over_two_remote_channels_takes_one_item():
    """C10: each select takes an item from only one of the two channels."""
    one, two = make(), make()
    one.put_many(range(5))
    two.put_many(range(5))

    def choose():
        counts = []
        for _ in range(10):
            select([one, two])
            counts.append(one.stats().items_out + two.stats().items_out)
        return counts

    assert HostPeer(choose).result() == list(range(1, 11))
    assert (len(one), len(two)) == (0, 0)


def test_timed_out_calls_have_no_effect():
    """C7: afterwards, the channel contains the same items as before."""
    channel = make(1)

    def use():
        with pytest.raises(Empty):
            channel.get(timeout=0.01)
        channel.put(1)
        with pytest.raises(Full):
            channel.put(2, timeout=0.01)
        with pytest.raises(NothingReady):
            select(puts=[(channel, 3)], timeout=0.01)
        return len(channel)

    assert HostPeer(use).result() == 1
    assert channel.get() == 1


def test_ctrl_c_ends_a_waiting_put():
    """C9: the item of the interrupted put does not arrive."""
    channel = make(1)

    def put():
        channel.put(1)
        with pytest.raises(KeyboardInterrupt):
            channel.put(2)
        return channel.get_many(5)

    peer = HostPeer(put)
    wait_blocked(channel, writers=1)
    os.kill(peer.pid(), signal.SIGINT)
    assert peer.result() == [1]


def test_ctrl_c_ends_a_flush():
    """C9: the interrupt reaches the caller, although the owner has no room."""
    channel = make(1)

    def put():
        channel.put(1)
        channel.flush()
        channel._ports[False]._stream.ring._allow(5)  # one more than the owner has room for
        channel.put(2)
        connection, begun = channel._connection, threading.Event()
        await_used = connection.await_used

        def noted(*arguments):
            begun.set()
            return await_used(*arguments)

        def interrupt():
            begun.wait()
            os.kill(os.getpid(), signal.SIGINT)

        connection.await_used = noted
        interrupting = ThreadPeer(interrupt)
        with pytest.raises(KeyboardInterrupt):
            channel.flush()
        interrupting.result()

    peer = HostPeer(put)
    wait_blocked(channel, writers=1)
    peer.result()
    assert channel.get() == 1


def test_exiting_program_reports_its_lost_items():
    """C16: the report goes to stderr."""
    channel = make(1)
    program = """
import sys
from flowchan.hosts import open_channel

address, secret = sys.stdin.read().split()
channel = open_channel(address, bytes.fromhex(secret))
channel.put(1)
channel._ports[False]._stream.ring._allow(2)  # one more than the owner has room for
channel.put(2)
"""
    key = f"{channel.address} {channel.secret.hex()}"
    ended = subprocess.run([sys.executable, "-c", program], input=key, text=True, capture_output=True)
    assert "and 1 of its items is lost, because the channels at" in ended.stderr
    assert channel.get_many(5) == [1]


def test_exiting_program_reports_items_for_an_unreachable_owner():
    """C16: the program ends before the connection counts as lost."""
    handover = make()

    def own():
        owned = make()
        handover.put(owned)
        handover.flush()
        signal.pause()

    owner = HostPeer(own)
    channel = handover.get()
    program = """
import os, sys
from flowchan.hosts import open_channel

address, secret = sys.stdin.readline().split()
channel = open_channel(address, bytes.fromhex(secret))
channel.put("arrives")
channel.flush()
print("ready", flush=True)
sys.stdin.readline()
while channel._connection.link.state()["connected"]:
    os.sched_yield()
channel.put("lost")
"""
    command = [sys.executable, "-c", program]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, text=True, bufsize=1) as started:
        started.stdin.write(f"{channel.address} {channel.secret.hex()}\n")
        assert started.stdout.readline() == "ready\n"
        owner.kill()
        owner.join()
        _, errors = started.communicate("owner killed\n")
    assert "and 1 of its items is lost, because the owner of the channels at" in errors

"""Test channels between programs that are opened by address and secret, or received in an item."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import pytest
from support.peers import HostPeer, ThreadPeer
from support.waiting import wait_blocked, wait_until

from flowchan import (
    Channel,
    ChannelError,
    Closed,
    Drained,
    Empty,
    Full,
    HostError,
    select,
)
from flowchan.hosts import open_channel, serve

pytestmark = pytest.mark.usefixtures("impatient")


def make(capacity=64, **options):
    return Channel(capacity, across="hosts", **options)


def test_separate_program_opens_a_channel_by_address_and_secret():
    there, back = make(), make()
    addresses = (there.address, there.secret), (back.address, back.secret)

    def double(there, back):
        numbers, doubles = open_channel(*there), open_channel(*back)
        for number in numbers:
            doubles.put(2 * number)
        doubles.close()

    peer = HostPeer(double, *addresses)
    there.put_many(range(10))
    there.close()
    assert list(back) == [2 * number for number in range(10)]
    peer.result()


def test_ports_of_remote_channels_transfer_many_items():
    there, back = make(), make()

    def double():
        with there.reader() as numbers, back.writer() as doubles:
            for number in numbers:
                doubles.put(2 * number)

    def feed():
        with there.writer() as writer:
            writer.put_many(range(20_000))

    peer, feeding = HostPeer(double), ThreadPeer(feed)
    assert list(back) == [2 * number for number in range(20_000)]
    peer.result()
    feeding.result()


def test_open_channel_rejects_a_wrong_secret():
    channel = make()
    with pytest.raises(HostError, match="secret"):
        open_channel(channel.address, secrets.token_bytes(32), timeout=1.5)


def test_open_channel_errors_name_a_remedy():
    channel = make()
    with pytest.raises(ValueError, match=r"channel\.address"):
        open_channel("127.0.0.1:1", channel.secret)
    with pytest.raises(TypeError, match=r"channel\.secret"):
        open_channel(channel.address, channel.secret.hex())
    with pytest.raises(HostError, match="channel 99 does not exist"):
        open_channel(channel.address.partition("/")[0] + "/99", channel.secret)
    expected = r"^can't open a channel at .*: .* refused at 127\.0\.0\.1:1 for 0\.2 s; check that the owner"
    with pytest.raises(HostError, match=expected):
        open_channel("127.0.0.1:1/1", channel.secret, timeout=0.2)


def test_only_channels_across_hosts_have_an_address():
    with pytest.raises(ChannelError, match="across='hosts'"):
        _ = Channel(across="processes").address


def test_open_channel_and_serve_reject_invalid_keywords():
    with pytest.raises(TypeError, match="open_channel: tls must be True or False, got 'x'"):
        open_channel("127.0.0.1:1/1", bytes(32), tls="x")
    with pytest.raises(TypeError, match="serve: tls must be True or False, got 1"):
        serve(tls=1)
    with pytest.raises(ValueError, match="serve: peer_timeout must be greater than 0 seconds, got -1"):
        serve(peer_timeout=-1)


def test_repr_of_a_channel_hides_its_secret():
    channel = make()
    assert channel.secret.hex() not in repr(channel) + repr(vars(channel))
    assert HostPeer(lambda: repr(channel.secret) not in repr(channel)).result()


def test_remote_calls_return_and_raise_like_local_calls():
    channel = make(1)

    def use():
        with pytest.raises(Empty):
            channel.get_nowait()
        with pytest.raises(Empty):
            channel.get(timeout=0.01)
        channel.put_nowait(1)
        with pytest.raises(Full):
            channel.put_nowait(2)
        with pytest.raises(Full):
            channel.put(2, timeout=0.01)
        with pytest.raises(Full) as caught:
            channel.put_many([2, 3], timeout=0.01)
        assert caught.value.items_put == 0
        assert (len(channel), channel.closed, channel.drained, channel.broken) == (1, False, False, False)
        channel.close()
        with pytest.raises(Closed):
            channel.put(2)
        assert channel.get_many(5) == [1]
        with pytest.raises(Drained):
            channel.get()
        assert (channel.closed, channel.drained) == (True, True)

    HostPeer(use).result()
    assert channel.drained


def test_idle_remote_reader_keeps_no_items_from_other_readers():
    """C8: other readers get the items that this reader has not taken."""
    channel, ready, go_on = make(), make(), make()

    def idle():
        with channel.reader() as reader:
            ready.put("ready")
            go_on.get()
            return list(reader)

    peer = HostPeer(idle)
    ready.get()
    channel.put_many(range(5))
    assert [channel.get_nowait() for _ in range(4)] == [0, 1, 2, 3]
    go_on.put(None)
    channel.close()
    assert peer.result() == [4]


def test_polling_a_remote_port_gets_items_and_then_drained():
    """A poll shorter than a round trip may find no item, but a later poll finds the item."""
    numbers = make()
    numbers.put_many(range(9))
    numbers.close()

    def poll(numbers):
        def found(call):
            while True:
                with contextlib.suppress(Empty):
                    return call()

        with numbers.reader() as reader:
            got = [found(lambda: reader.get(timeout=0)), found(lambda: reader.get(0.0001))]
            while len(got) < 9:
                got += found(lambda: reader.get_many(3, timeout=0))
            with pytest.raises(Drained):
                found(lambda: reader.get(0))
        return got

    assert HostPeer(poll, numbers).result() == list(range(9))


def test_coroutines_can_wait_for_items_of_a_remote_channel():
    """C9: a cancelled ``aget`` has taken nothing."""
    channel, ready = make(), make()

    async def take():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.aget(), 0.05)
        await ready.aput("cancelled")
        return [item async for item in channel]

    peer = HostPeer(lambda: asyncio.run(take()))
    ready.get()
    channel.put_many(range(3))
    channel.close()
    assert peer.result() == [0, 1, 2]


def test_select_accepts_ports_of_remote_channels():
    """C10: ports of two remote channels are selected like local ports."""
    one, two = make(), make()

    def choose():
        with one.reader() as left, two.reader() as right:
            return sorted(select([left, right]).item for _ in range(2))

    peer = HostPeer(choose)
    one.put("one")
    two.put("two")
    assert peer.result() == ["one", "two"]


def test_channel_in_an_item_keeps_its_tls_setting():
    pytest.importorskip("cryptography")
    serve(peer_timeout=2, tls=True)
    channel = make()
    HostPeer(channel.put, "encrypted").result()
    assert channel.get() == "encrypted"
    with pytest.raises(HostError, match="TLS"):
        HostPeer(open_channel, channel.address, channel.secret).result()


def test_waiting_remote_get_counts_as_one_waiting_reader():
    """C15: the owner counts the reader until the call has ended."""
    channel = make()
    peer = HostPeer(channel.get)
    wait_blocked(channel, readers=1)
    channel.put("here")
    assert peer.result() == "here"
    wait_until(lambda: channel.stats().waiting_readers == 0)


def test_every_cancelled_remote_call_gets_a_reply():
    """C12: even a call that the owner has not started gets a reply. The client forgets all these calls."""
    channel = make()

    async def cancel():
        calls = [asyncio.ensure_future(channel.aget()) for _ in range(5)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    def use():
        for _ in range(20):
            asyncio.run(cancel())
        wait_until(lambda: not channel._link._pending)

    HostPeer(use).result()
    wait_blocked(channel)

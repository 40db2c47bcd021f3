"""Channels across hosts between programs that were started apart: opened by address and secret, or sent."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import secrets
import signal
import threading
import weakref

import numpy as np
import pytest
from peers import HostPeer, ProcessPeer, ThreadPeer
from waiting import wait_blocked, wait_stats, wait_until

from benchmarks.far import cut
from flowchan import (
    Broken,
    Channel,
    ChannelError,
    Closed,
    Drained,
    Empty,
    Full,
    HostError,
    WorkerDied,
    select,
)
from flowchan.hosts import hosting, open_channel, serve


@pytest.fixture(autouse=True)
def impatient():
    serve(patience=2)
    yield
    serve()


def make(capacity=64, **options):
    return Channel(capacity, across="hosts", **options)


def test_a_program_apart_opens_a_channel_by_address_and_secret():
    there, back = make(), make()
    told = (there.address, there.secret), (back.address, back.secret)

    def double(there, back):
        numbers, doubles = open_channel(*there), open_channel(*back)
        for number in numbers:
            doubles.put(2 * number)
        doubles.close()

    peer = HostPeer(double, *told)
    there.put_many(range(10))
    there.close()
    assert list(back) == [2 * number for number in range(10)]
    peer.result()


def test_many_items_are_under_way_through_ports():
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


def test_a_wrong_secret_opens_nothing():
    channel = make()
    with pytest.raises(HostError, match="secret"):
        open_channel(channel.address, secrets.token_bytes(32), timeout=1.5)


def test_wrong_addresses_say_what_is_right():
    channel = make()
    with pytest.raises(ValueError, match=r"channel\.address"):
        open_channel("127.0.0.1:1", channel.secret)
    with pytest.raises(TypeError, match=r"channel\.secret"):
        open_channel(channel.address, channel.secret.hex())
    with pytest.raises(HostError, match="no channel 99"):
        open_channel(channel.address.partition("/")[0] + "/99", channel.secret)
    with pytest.raises(HostError, match=r"127\.0\.0\.1:1 for 0\.2 s"):
        open_channel("127.0.0.1:1/1", channel.secret, timeout=0.2)


def test_only_channels_across_hosts_have_an_address():
    with pytest.raises(ChannelError, match="across='hosts'"):
        _ = Channel(across="processes").address


def test_no_secret_is_shown():
    channel = make()
    assert channel.secret.hex() not in repr(channel) + repr(vars(channel))
    assert HostPeer(lambda: repr(channel.secret) not in repr(channel)).result()


def test_calls_elsewhere_end_as_they_do_here():
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


def test_a_reader_elsewhere_holds_nothing_that_others_could_get():
    """C8."""
    channel, ready = make(), make()

    def idle():
        with channel.reader() as reader:
            ready.put("I have a port")
            ready.get()
            return list(reader)

    peer = HostPeer(idle)
    ready.get()
    channel.put_many(range(5))
    assert [channel.get_nowait() for _ in range(4)] == [0, 1, 2, 3]
    ready.put("go on")
    channel.close()
    assert peer.result() == [4]


def test_coroutines_wait_elsewhere():
    """C9: and one that is cancelled has taken nothing."""
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


def test_select_takes_ports_of_channels_elsewhere():
    """C10."""
    one, two = make(), make()

    def choose():
        with pytest.raises(TypeError, match="ports"):
            select([one])
        with one.reader() as left, two.reader() as right:
            return sorted(select([left, right]).item for _ in range(2))

    peer = HostPeer(choose)
    one.put("one")
    two.put("two")
    assert peer.result() == ["one", "two"]


def test_ctrl_c_ends_a_get_that_waits_elsewhere():
    """C9: and what comes then is not lost."""
    channel, ready = make(), make()

    def wait():
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            channel.get()
        ready.put("interrupted")
        return channel.get()

    peer = HostPeer(wait)
    ready.get()
    channel.put("there")
    assert peer.result() == "there"


def test_tls_goes_along_with_the_channel():
    pytest.importorskip("cryptography")
    serve(patience=2, tls=True)
    channel = make()
    HostPeer(channel.put, "encrypted").result()
    assert channel.get() == "encrypted"
    with pytest.raises(HostError, match="TLS"):
        HostPeer(open_channel, channel.address, channel.secret).result()


def wait_for_guests(channel):
    """Those who have it open elsewhere."""
    wait_stats(channel, readers=1)
    return channel._reached.home.guests()


def test_nothing_is_lost_or_repeated_when_the_connection_breaks():
    """Through ports, and by calls."""
    there, back, calls = make(), make(), make(100_000)

    def work():
        with there.reader() as numbers, back.writer() as doubles:
            for number in numbers:
                doubles.put(2 * number)
                if number % 50 == 0:
                    calls.put(number)

    def feed():
        with there.writer() as writer:
            writer.put_many(range(5_000))

    peer, feeding = HostPeer(work), ThreadPeer(feed)
    (guest,), found = wait_for_guests(there), []
    for number in back:
        found.append(number)
        if len(found) % 500 == 0:
            cut()
    breaks = guest.link.state()["breaks"]
    peer.result()
    feeding.result()
    assert breaks > 0
    assert found == [2 * number for number in range(5_000)]
    assert calls.get_many(1_000) == list(range(0, 5_000, 50))


# --- deaths ---


def test_a_counted_writer_that_is_killed_elsewhere_makes_no_clean_end():
    """C5."""
    channel, ready = make(), make()

    def write():
        writer = channel.writer()
        writer.put(1)
        ready.put(os.getpid())
        ready.reader().get()

    peer = HostPeer(write)
    pid = ready.get()
    wait_stats(channel, items_in=1)
    peer.kill()
    peer.join()
    assert channel.get() == 1
    with pytest.raises(Broken) as caught:
        channel.get()
    assert isinstance(caught.value.__cause__, WorkerDied)
    assert caught.value.__cause__.pid == pid


def test_a_program_that_ends_without_closing_its_writer_makes_no_clean_end():
    """C5."""
    channel = make()

    def write():
        builtins.kept = channel.writer()  # the collector does not find it
        builtins.kept.put(1)

    HostPeer(write).result()
    with pytest.raises(Broken):
        list(channel)


def test_a_process_of_this_machine_that_is_killed_is_known_to_have_ended():
    """C11: whatever the patience is. What it had in hand comes back."""
    serve(patience=3600)
    channel, ready = make(), make()

    def read():
        reader = channel.reader()
        ready.put(reader.get())
        ready.reader().get()

    spare = channel.reader()
    channel.put_many(range(3))
    peer = HostPeer(read)
    assert ready.get() == 0
    peer.kill()
    peer.join()
    wait_stats(channel, readers=1)
    assert [spare.get(), spare.get(), spare.get()] == [0, 1, 2]
    spare.close()


def test_waiting_calls_elsewhere_are_broken_when_home_is_killed():
    told, answers = make(), make()

    def hold():
        mine = make()
        told.put(mine)
        mine.reader().get()

    def wait():
        channel = told.get()
        answers.put("waiting")
        with pytest.raises(Broken) as caught:
            channel.get()
        assert isinstance(caught.value.__cause__, HostError)
        with pytest.raises(Broken):
            channel.put(1)
        assert channel.broken

    home = HostPeer(hold)
    peer = HostPeer(wait)
    answers.get()
    home.kill()
    home.join()
    peer.result()


def test_who_waits_here_is_told_when_home_ends():
    told = make()

    def hold():
        mine = make()
        told.put(mine)
        mine.get()

    home = HostPeer(hold)
    channel = told.get()
    writer = channel.writer()
    channel.put("end")
    home.result()
    with pytest.raises(Broken):
        channel.get()
    with pytest.raises(Broken):
        writer.put(1)


def test_a_forked_child_uses_what_its_parent_has_open():
    """It has a connection of its own, and may drop it."""
    channel = make()

    def fork():
        channel.put("parent")
        ProcessPeer(channel.put, "child").result()
        channel.put("parent again")

    HostPeer(fork).result()
    assert channel.get_many(5) == ["parent", "child", "parent again"]


def test_nothing_is_left_when_the_last_handle_goes():
    """C12: the fixture of all tests looks for threads, descriptors and memory here; and there."""
    channel = make()

    def come_and_go():
        address, secret = channel.address, channel.secret
        count = len(os.listdir("/proc/self/fd"))
        with channel.writer() as writer:
            writer.put(1)
        return address, secret, count, threading.active_count()

    HostPeer(come_and_go).result()
    assert channel.closed


def test_a_home_is_over_as_soon_as_its_last_channel_goes():
    """Its thread hears of that, and may look before anything else does."""
    channel, found = make(), []
    (home,) = hosting._homes
    weakref.finalize(channel, lambda: found.append(home.is_over()))
    del channel
    assert found == [True]


def test_a_waiting_get_elsewhere_counts_as_one_reader_that_waits():
    """C15."""
    channel = make()
    peer = HostPeer(channel.get)
    wait_blocked(channel, readers=1)
    channel.put("here")
    assert peer.result() == "here"
    wait_until(lambda: channel.stats().waiting_readers == 0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_port_that_is_left_by_an_exception_gives_back_what_it_has_in_hand(fails):
    """C6: as at home."""
    channel = make()
    channel.put_many(range(3))

    def leave():
        with contextlib.suppress(KeyError), channel.reader() as reader:
            assert reader.get() == 0
            if fails:
                raise KeyError

    spare = channel.reader()
    HostPeer(leave).result()
    channel.close()
    assert list(spare) == list(range(0 if fails else 1, 3))

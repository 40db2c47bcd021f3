"""Test that no remote item is lost, even if it can't be received or its caller has given up (C1, C9)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from pathlib import Path

import pytest
from support.peers import HostPeer, ThreadPeer
from support.waiting import WAIT_LIMIT_S, wait_blocked, wait_until

from flowchan import Channel, Drained, Empty, HostError, NothingReady, select
from flowchan.channel.channel import LARGEST
from flowchan.hosts import open_channel, serve
from flowchan.remote import connection, pending_calls, remote_channel, session
from flowchan.remote.messages import Reply

pytestmark = pytest.mark.usefixtures("impatient")


def make(capacity=64, **options):
    return Channel(capacity, across="hosts", **options)


class Arrives:
    """An item that raises the next of ``errors`` whenever it is unpickled, until none is left."""

    errors: list[BaseException] = []

    def __reduce__(self):
        return arrive, ()


def arrive():
    if Arrives.errors:
        raise Arrives.errors.pop(0)
    return "whole"


TAKES = {
    "get": lambda one: one.get(),
    "get_many": lambda one: one.get_many(1)[0],
    "aget": lambda one: asyncio.run(one.aget()),
    "select": lambda one: select([one]).item,
    "select among others": lambda one: select([one, Channel()]).item,
}


@pytest.mark.parametrize("how", ["get", "aget", "get_nowait"])
def test_index_error_raised_by_an_item_reaches_the_caller(how):
    """C1: the caller also gets the error of an item that ``get_many`` has left for the next call."""
    channel, take = make(), {**TAKES, "get_nowait": lambda one: one.get_nowait()}[how]

    def use():
        Arrives.errors = [IndexError("its own"), IndexError("its own")]
        channel.put_many(["good", Arrives(), "after"])
        assert channel.get_many(2) == ["good"]  # the next call raises the second error
        with pytest.raises(IndexError, match="its own"):
            take(channel)
        return take(channel)

    assert HostPeer(use).result() == "after"


ERRORS = [(MemoryError,), (KeyboardInterrupt,), (OSError, errno.EMFILE, ""), (OSError, errno.ENOMEM, "")]


@pytest.mark.parametrize("how", TAKES)
@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_next_call_gets_an_item_that_could_not_be_received(error, how):
    """C9: each call gets the item again, whatever errors it raises. Later items keep their order."""
    channel, take = make(), TAKES[how]

    def use():
        kind, *arguments = error
        Arrives.errors = [kind(*arguments) for _ in range(2)]
        channel.put_many([Arrives(), "behind"])
        for _ in range(2):
            with pytest.raises(kind):
                take(channel)
        return [take(channel), take(channel)]

    assert HostPeer(use).result() == ["whole", "behind"]


def raise_timeout(*_):
    raise TimeoutError("the handler's")


class Slow:
    """An item whose unpickling is interrupted by a signal ``times`` times."""

    times = 0

    def __reduce__(self):
        return arrive_slowly, ()


def arrive_slowly():
    if Slow.times:
        Slow.times -= 1
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(1000):  # lets Python run the handler
            pass
    return "whole"


def receive_into(found, channel):
    """Append items until a call raises; they may arrive one by one."""
    while True:
        found += channel.get_many(8)


@pytest.mark.parametrize("how", TAKES)
def test_timeout_error_from_a_signal_handler_loses_no_item(how):
    """C9: an exception from a signal handler has the same effect as Ctrl-C."""
    channel, take = make(), TAKES[how]

    def use():
        signal.signal(signal.SIGUSR1, raise_timeout)
        channel.put_many([Slow(), "behind", 1, Slow(), 3])
        Slow.times = 2
        for _ in range(2):
            with pytest.raises(TimeoutError, match="the handler's"):
                take(channel)
        found = [take(channel), take(channel)]
        Slow.times = 1
        with pytest.raises(TimeoutError, match="the handler's") as caught:
            receive_into(found, channel)
        found += getattr(caught.value, "items_got", [])
        while len(found) < 5:
            found += channel.get_many(8)
        return found

    assert HostPeer(use).result() == ["whole", "behind", 1, "whole", 3]


def test_remote_get_many_leaves_items_that_it_cannot_receive():
    """C9: the call returns the items before the item that it cannot receive.

    After Ctrl-C, these items are in ``items_got`` of the error.
    """
    channel = make()

    def use():
        channel.put_many([1, Arrives(), 3])
        Arrives.errors = [MemoryError()]
        assert [channel.get_many(8), channel.get_many(8)] == [[1], ["whole", 3]]
        for _ in range(2):
            channel.put_many([1, Arrives(), 3])
            Arrives.errors = [KeyboardInterrupt(), KeyboardInterrupt()]
            for got in ([1], []):
                with pytest.raises(KeyboardInterrupt) as caught:
                    channel.get_many(8)
                assert getattr(caught.value, "items_got", []) == got
            rest = channel.get_many(8)
            while len(rest) < 2:  # after a pause, the owner may have taken back the last item
                rest += channel.get_many(8)
            assert rest == ["whole", 3]

    HostPeer(use).result()


WAITS = {
    "get": lambda one: one.get(),
    "get with a time": lambda one: one.get(timeout=1000),
    "get_many": lambda one: one.get_many(5)[0],
    "aget": lambda one: asyncio.run(one.aget()),
    "select": lambda one: select([one]).item,
    "select with a put": lambda one: select([one], puts=[(full, 1)]).item,
    "select among others": lambda one: select([one, Channel()]).item,
    "ready": lambda one: (select([Channel()], ready=[one]), one.get())[1],
}
full = None


@pytest.mark.parametrize("how", WAITS)
def test_item_of_a_cancelled_get_goes_to_a_waiting_reader(how):
    """C8: the waiting reader is another thread of the same process."""
    channel, back, filled = make(), make(), make(1)
    filled.put(0)

    def use():
        global full
        full = filled
        loop = asyncio.new_event_loop()
        first = loop.create_task(channel.aget())

        async def wait_for_readers(count):
            while channel.stats().waiting_readers < count:
                await asyncio.sleep(0)  # a reader that was woken but gets no item waits again

        loop.run_until_complete(wait_for_readers(1))
        waiting = ThreadPeer(WAITS[how], channel)
        loop.run_until_complete(wait_for_readers(2))
        back.put("both wait")
        ring = channel._ports[True]._stream.ring
        wait_until(lambda: ring.stats().items_in > 0)  # the item has woken one of the two readers
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(first)
        loop.close()
        return waiting.result()

    peer = HostPeer(use)
    assert back.get(timeout=WAIT_LIMIT_S) == "both wait"
    channel.put("the item")
    assert peer.result() == "the item"


def test_remote_calls_time_out_even_if_the_owner_is_stopped(monkeypatch):
    """C9: an item that the owner sends after a call has timed out goes to the next call."""
    monkeypatch.setattr(connection, "REPLY_TIMEOUT_S", 0.01)
    serve()  # the default peer_timeout: the owner must count as slow, not as lost
    handover = make()
    owner = HostPeer(own_a_channel, handover)
    remote = handover.get()
    late = ThreadPeer(remote.get_many, 1)
    wait_blocked(remote, readers=1)
    os.kill(owner.pid(), signal.SIGSTOP)
    try:
        for call in (remote.get, remote.get_nowait, lambda timeout=0: remote.get_many(2, timeout)):
            with pytest.raises(Empty):
                call(*([0.05] if call == remote.get else []))
        with pytest.raises(NothingReady):
            select([remote], timeout=0)
    finally:
        os.kill(owner.pid(), signal.SIGCONT)
    remote.put("one")
    assert late.result() == ["one"]
    remote.put("two")
    assert remote.get(timeout=20) == "two"
    remote.close()
    with pytest.raises(Drained):
        remote.get(timeout=20)
    handover.close()
    owner.result()


def has_stopped(pid):
    """Return whether all threads of the process have stopped, some time after the signal."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(thread.read_text().rpartition(") ")[2].startswith("T") for thread in threads)


def test_opening_a_channel_times_out_while_its_owner_is_stopped():
    """C9: if the owner continues later, it does not count the channel as opened."""
    serve()
    handover = make()
    owner = HostPeer(own_a_channel, handover)
    remote = handover.get()
    other = remote._another(8)
    address, secret = other.address, other.secret
    keep = make()
    keep.put(other)  # so that the owner keeps the channel
    del other
    wait_until(lambda: remote._connection.user(remote_channel.number_in(address)) is None)
    os.kill(owner.pid(), signal.SIGSTOP)
    wait_until(lambda: has_stopped(owner.pid()))  # before that, it may still reply
    try:
        with pytest.raises(HostError, match="its owner has not answered for"):
            open_channel(address, secret, timeout=0.05)
    finally:
        os.kill(owner.pid(), signal.SIGCONT)
    assert open_channel(address, secret, timeout=20).capacity == 8
    keep.get()
    handover.close()
    owner.result()


def own_a_channel(handover):
    serve()
    owned = make()
    handover.put(owned)
    wait_until(lambda: handover.closed)


def test_late_reply_is_delivered_once():
    """C1: a reply is delivered only once even if the owner is lost while the caller gives up."""

    class LostCalls(pending_calls.Calls):
        def __init__(self):
            super().__init__("127.0.0.1:1")
            self._requests = Channel().writer()

    for _ in range(300):
        received, calls = [], LostCalls()
        call = pending_calls.PendingCall(received.append)
        calls._send(call, 1, "get", ())
        threads = [ThreadPeer(calls.abandon, call), ThreadPeer(calls._fail_all)]
        for thread in threads:
            thread.result()
        assert len(received) == 1


class Scarce(Channel):
    """A ring for replies that raises MemoryError once per value in ``lacking``."""

    lacking: list[object] = []

    async def aput(self, item):
        if isinstance(item, Reply) and item.error is None:
            value = item.value[1] if isinstance(item.value, tuple) and len(item.value) == 3 else item.value
            first = value[0] if isinstance(value, list) else value
            if first in self.lacking:
                self.lacking.remove(first)
                raise MemoryError
        await super().aput(item)


@pytest.fixture
def scarce(monkeypatch):
    monkeypatch.setattr(session, "control_ring", lambda: Scarce(1024, across="processes", max_bytes=LARGEST))
    monkeypatch.setattr(Scarce, "lacking", ["first", "second"])


def test_reply_is_sent_again_after_a_lack_of_memory(scarce, monkeypatch):
    """C9: the call succeeds, although the first attempts to send its reply fail."""
    monkeypatch.setattr(Scarce, "lacking", [None, None])
    channel = make()

    def use():
        channel.put(1)
        return channel.get()

    assert HostPeer(use).result() == 1
    assert not Scarce.lacking


def test_items_with_channels_are_returned_when_their_receiver_dies():
    """C11, C12: the channels live until the items that contain them are gone."""
    channel, inner, received = make(), make(), make()
    server = channel._reached.server
    channel.put_many([(Arrives(), inner), (inner, inner), inner])

    def use():
        Arrives.errors = [MemoryError()]
        with pytest.raises(MemoryError):
            channel.get_many(3)
        received.put(channel.address)
        received.flush()
        os._exit(0)

    peer = HostPeer(use)
    received.get()
    peer.join()
    wait_until(lambda: not channel.stats().leased, what=channel.stats)
    assert [channel.get() for _ in range(3)] == [("whole", inner), (inner, inner), inner]
    wait_until(lambda: not server._under_way, what=lambda: server._under_way)

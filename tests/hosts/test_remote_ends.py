"""Test channels across hosts when their connection breaks, or when their users or owners end or are
killed."""

from __future__ import annotations

import asyncio
import atexit
import builtins
import contextlib
import gc
import os
import signal
import socket
import threading
import weakref

import pytest
from support.peers import HostPeer, ProcessPeer, ThreadPeer, child_of_multiprocessing
from support.waiting import wait_stats, wait_until

from benchmarks.slow_connections import cut
from flowchan import Broken, Channel, Closed, HostError, WorkerDied
from flowchan.hosts import open_channel, serve
from flowchan.pipelines import Server
from flowchan.remote import connection, serving
from flowchan.remote.channel_server import ChannelServer
from flowchan.remote.session import ClientSession
from flowchan.transport.local_peers import LocalPeer

pytestmark = pytest.mark.usefixtures("impatient")


def make(capacity=64, **options):
    return Channel(capacity, across="hosts", **options)


def wait_for_sessions(channel):
    """Wait for one reader, and return the sessions of the channel's remote users."""
    wait_stats(channel, readers=1)
    return channel._reached.server.sessions()


def test_broken_connection_neither_loses_nor_repeats_items():
    """The items are put and got through ports and in single calls."""
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
    (session,), found = wait_for_sessions(there), []
    for number in back:
        found.append(number)
        if len(found) % 500 == 0:
            cut()
    breaks = session.link.state()["breaks"]
    peer.result()
    feeding.result()
    assert breaks > 0
    assert found == [2 * number for number in range(5_000)]
    assert calls.get_many(1_000) == list(range(0, 5_000, 50))


def test_killed_remote_writer_breaks_the_channel():
    """C5: a writer's death is not a clean end, so it does not count as a close."""
    channel, ready = make(), make()

    def write():
        writer = channel.writer()
        writer.put(1)
        ready.put(os.getpid())
        signal.pause()

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


def test_program_that_exits_with_an_open_writer_breaks_the_channel():
    """C5: a program that exits without ``close()`` has not closed the channel."""
    channel = make()

    def write():
        builtins.kept = channel.writer()  # so that the garbage collector does not close the port
        builtins.kept.put(1)

    HostPeer(write).result()
    with pytest.raises(Broken):
        list(channel)


def test_exiting_program_first_sends_items_beyond_the_capacity():
    """C5: when the program begins to exit, the channel has no room for these items."""
    ch, told, kept = make(1), make(), []

    def write():
        kept.append(ch.writer())
        kept[0].put_many(range(1000))
        atexit.register(told.put, "ending")  # ``atexit`` calls the function registered last first

    peer, found = HostPeer(write), []
    told.get()
    with contextlib.suppress(Broken):  # the program has not closed its writer
        for number in ch:
            found.append(number)
    peer.result()
    assert found == list(range(1000))


def test_exiting_forked_child_first_sends_its_items():
    """C1: a child of ``multiprocessing`` does not run ``atexit`` functions."""
    channel = make(10_000)

    def put_all():
        out = channel.writer()
        for number in range(1000):
            out.put(bytes([number % 251]) * 20_000)

    HostPeer(child_of_multiprocessing, put_all).result()
    assert [channel.get(timeout=60)[0] for _ in range(1000)] == [n % 251 for n in range(1000)]


@pytest.mark.parametrize("broken", [False, True])
def test_program_reports_finished_items_before_it_leaves_an_owner(broken, monkeypatch):
    """C12: otherwise the owner would keep the channel that the item contained."""
    channel, done = make(), threading.Event()
    server, look, post = (
        channel._reached.server,
        connection.Connection._leave_if_unused,
        connection.Connection.post,
    )
    sent = []

    def look_late(self):
        done.wait()
        look(self)

    def post_and_say(self, number, what, *arguments, **options):
        sent.append(what)
        post(self, number, what, *arguments, **options)

    def use():
        inner = channel._another(1)
        channel.put(inner)
        monkeypatch.setattr(connection.Connection, "_leave_if_unused", look_late)
        monkeypatch.setattr(connection.Connection, "post", post_and_say)
        (one,) = connection._connections.values()
        one.notify("used", 0)
        if broken:
            cut()
        assert channel.get() is inner
        del inner
        done.set()
        wait_until(lambda: not connection._connections)
        assert sent[-1] == "leave"

    child_of_multiprocessing(use)
    wait_until(lambda: not server._under_way, what=lambda: server._under_way)


@pytest.mark.parametrize("cause", [None, ValueError("why")])
def test_writer_raises_at_once_if_its_channel_has_ended(cause):
    """C5, C7: the end may arrive before the owner's reply to the opening."""
    channel = make()
    if cause is None:
        channel.close()
    else:
        channel.abort(cause)

    def write():
        for _ in range(300):
            with channel.writer() as writer, pytest.raises(Closed if cause is None else Broken) as caught:
                writer.put_many(range(2000))  # more items than can be in transit
            assert repr(caught.value.__cause__) == repr(cause)

    HostPeer(write).result()


def test_death_of_a_local_process_is_noticed_before_any_timeout():
    """C11: the owner notices the death, however long ``peer_timeout`` is, and the unfinished item returns."""
    serve(peer_timeout=3600)
    channel, ready = make(), make()

    def read():
        reader = channel.reader()
        ready.put(reader.get())
        signal.pause()

    spare = channel.reader()
    channel.put_many(range(3))
    peer = HostPeer(read)
    assert ready.get() == 0
    peer.kill()
    peer.join()
    wait_stats(channel, readers=1)
    assert [spare.get(), spare.get(), spare.get()] == [0, 1, 2]
    spare.close()


def test_waiting_remote_calls_raise_broken_when_the_owner_is_killed():
    told, answers = make(), make()

    def hold():
        serve(peer_timeout=2)
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

    owner = HostPeer(hold)
    peer = HostPeer(wait)
    answers.get()
    owner.kill()
    owner.join()
    peer.result()


def test_calls_raise_broken_after_the_owner_has_exited():
    told = make()

    def hold():
        mine = make()
        told.put(mine)
        mine.get()

    owner = HostPeer(hold)
    channel = told.get()
    writer = channel.writer()
    channel.put("end")
    owner.result()
    with pytest.raises(Broken):
        channel.get()
    with pytest.raises(Broken):
        writer.put(1)


def test_forked_child_can_use_its_parents_remote_channels():
    """The child has its own connection. A break of that connection does not affect the parent."""
    channel = make()

    def fork():
        channel.put("parent")
        ProcessPeer(channel.put, "child").result()
        channel.put("parent again")

    HostPeer(fork).result()
    assert channel.get_many(5) == ["parent", "child", "parent again"]


def test_releasing_the_last_handle_leaves_no_resources_behind():
    """C12: the leak fixture checks threads, descriptors and memory on both sides."""
    channel = make()

    def come_and_go():
        address, secret = channel.address, channel.secret
        count = len(os.listdir("/proc/self/fd"))
        with channel.writer() as writer:
            writer.put(1)
        return address, secret, count, threading.active_count()

    HostPeer(come_and_go).result()
    assert channel.closed


def test_aborted_channel_releases_its_clients_without_garbage_collection():
    """C12: a link must not hold descriptors until the collector runs, because some programs seldom run it."""
    channel, ready = make(), make()
    (server,) = serving._servers

    def write():
        writer = channel.writer()
        ready.put(None)
        with contextlib.suppress(Broken):
            while True:
                writer.put(1)

    gc.disable()
    try:
        peer = HostPeer(write)
        ready.get()
        found = [weakref.ref(session) for session in server.sessions()]
        channel.abort(ValueError("why"))
        peer.result()
        wait_until(lambda: not any(session() for session in found))
    finally:
        gc.enable()


def test_server_may_end_once_its_last_channel_is_released():
    """The server's thread may check whether to end before any other code runs after the release."""
    channel, found = make(), []
    (server,) = serving._servers
    weakref.finalize(channel, lambda: found.append(server.is_over()))
    del channel
    assert found == [True]


@pytest.mark.parametrize("fails", [False, True])
def test_remote_port_returns_its_current_item_after_an_exception(fails):
    """C6: a remote port behaves like a port at the owner."""
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


def test_busy_server_does_not_give_up_a_live_client(monkeypatch):
    """C11: before it accepts the connection, the server has checked the client's process twice."""
    looks, has_ended, attach = [], LocalPeer.has_ended, ClientSession.attach

    def look(process):
        looks.append(process)
        return has_ended(process)

    def attach_late(session, sock):
        wait_until(lambda: len(looks) > 1 or not session._watching.is_alive())
        attach(session, sock)

    monkeypatch.setattr(LocalPeer, "has_ended", look)
    monkeypatch.setattr(ClientSession, "attach", attach_late)
    channel = make()
    HostPeer(channel.put, "item").result()
    assert channel.get() == "item"


def test_unresponsive_owner_does_not_block_use_of_other_owners():
    """C12: while the program connects to one owner, ports of other owners can be closed.

    Channels of those owners can also be opened.
    """
    one, other = make(), make()

    def use():
        silent = socket.create_server(("127.0.0.1", 0))
        channel = open_channel(one.address, one.secret)
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        dialling = ThreadPeer(lambda: open_channel(f"{place}/1", bytes(32), timeout=1000))
        kept, _ = silent.accept()
        with channel.writer() as writer:
            writer.put("sent")
        return open_channel(other.address, other.secret).capacity, dialling.running(), kept.close()

    peer = HostPeer(use)
    assert one.get() == "sent"
    assert peer.result() == (other.capacity, True, None)


def test_server_says_goodbye_to_all_clients_concurrently():
    """A client that never gets the goodbye does not delay the other clients."""
    server, sent = ChannelServer(kept=True), []

    class Deaf:
        def __init__(self):
            self.told = asyncio.Event()

        async def notify_and_end(self, why):
            self.told.set()
            async with asyncio.timeout(20):
                await sessions[1 - sessions.index(self)].told.wait()
            sent.append(why)

    sessions = [Deaf(), Deaf()]
    server._sessions.update(enumerate(sessions))
    server.close()
    assert len(sent) == 2


WRONG = [
    ({"secret": "x" * 40}, TypeError, "serve: secret must be a bytes object of length 16 or more, got str"),
    ({"secret": b"x"}, ValueError, "serve: secret must have at least 16 bytes, got 1"),
    ({"peer_timeout": 0}, ValueError, "serve: peer_timeout must be greater than 0"),
    ({"peer_timeout": "3"}, TypeError, "serve: peer_timeout must be a number of seconds"),
    ({"peer_timeout": None}, TypeError, "serve: peer_timeout must be a number of seconds, got None"),
    ({"tls": "no"}, TypeError, "serve: tls must be True or False, got 'no'"),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_serve_refuses_invalid_options(options, error, message):
    with pytest.raises(error, match=message):
        serve(**options)
    assert make().capacity == 64  # the settings have not changed


def test_errors_for_invalid_secrets_name_the_function():
    with pytest.raises(ValueError, match="open_channel: secret must have at least 16 bytes, got 3"):
        open_channel("127.0.0.1:1/1", b"abc")
    with pytest.raises(TypeError, match="Server: secret must be a bytes object"):
        Server(secret="x" * 40)

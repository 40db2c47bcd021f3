"""Check what an idle link costs, and how a link ends, including in a forked child."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from typing import Any

import psutil
import pytest

from flowchan import Broken, Channel, _core
from flowchan.transport.link_events import ItemTooLarge, LinkBroken, LinkClosed, next_event
from tests.link.linked import Linked, RemoteWorker
from tests.support.peers import ProcessPeer
from tests.support.waiting import WAIT_LIMIT_S, wait_until


def channel(max_bytes: int = 1 << 26) -> Channel[Any]:
    return Channel(100, across="processes", max_bytes=max_bytes)


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def seconds(*numbers: str) -> float:
    """Return the CPU seconds of all given threads that are still running."""
    ticks = 0
    for number in numbers:
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{number}/stat") as file:
            ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def test_idle_link_uses_no_cpu() -> None:
    """Two streams of the link are waiting for items from the same channel."""
    before = threads()
    with Linked() as linked:
        own = threads() - before
        source, results = channel(), channel()
        remote = [RemoteWorker(linked, number, source, results) for number in (1, 2)]
        wait_until(lambda: source.stats().waiting_readers > 0)
        spent = seconds(*own)
        pings = linked.worker_side.state()["bytes_in"] + 40 * 10
        passed = -os.times().elapsed
        wait_until(lambda: linked.worker_side.state()["bytes_in"] > pings)
        passed += os.times().elapsed
        assert seconds(*own) - spent < 0.1 * passed
        del remote


def test_link_without_a_connection_sleeps() -> None:
    """The worker gets an item, but the link cannot report this until it has a new connection."""
    before = threads()
    with Linked() as linked:
        own = threads() - before
        source, results = channel(), channel()
        remote = RemoteWorker(linked, 1, source, results)
        source.put("item")
        wait_until(lambda: remote.into.stats().inside == 1)
        linked.owner_side.close()
        assert isinstance(next_event(linked.worker_side), LinkBroken)
        assert remote.inside.get() == "item"
        spent, passed = seconds(*own), -os.times().elapsed
        with Linked() as clock:  # wait for about four of its pings
            wait_until(lambda: clock.worker_side.state()["bytes_in"] > 40 * 4)
        passed += os.times().elapsed
        assert seconds(*own) - spent < 0.1 * passed
        assert remote.into.stats().items_out == 1


def switches(*numbers: str) -> int:
    """Return how often the given threads that are still running have gone to sleep."""
    times = 0
    for number in numbers:
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{number}/status") as file:
            times += int(file.read().partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return times


def test_link_with_many_workers_sleeps_while_idle() -> None:
    """The link has more rings than one thread can sleep on, so it uses extra threads.

    An item from any worker wakes the link.
    """
    before = threads()
    with Linked() as linked:
        remote = []
        for number in range(100):
            channels = [Channel[int](4, across="processes", max_bytes=1 << 12) for _ in range(4)]
            source, into, out, results = channels
            users = source.writer(), into.reader(), out.writer(), results.reader()
            ports = source.reader(), results.writer(), into.writer(), out.reader()
            linked.owner_side.open_stream(number, [ports[0]], [ports[1]])
            linked.worker_side.open_stream(number, [ports[2]], [ports[3]])
            remote.append((users, channels, ports))
        # in the first round, the extra threads start and go to sleep
        for may_sleep_less in (True, False):
            own, began = threads() - before, time.monotonic()
            slept = switches(*own)
            while time.monotonic() - began < 1:
                heard = linked.worker_side.state()["bytes_in"]
                # wait for the next ping
                wait_until(lambda heard=heard: linked.worker_side.state()["bytes_in"] > heard)
            rate = (switches(*own) - slept) / (time.monotonic() - began)
            assert may_sleep_less or rate < 150  # switches per second
        for number, ((feed, worker_in, worker_out, outcome), *_) in enumerate(remote):
            feed.put(number)
            worker_out.put(worker_in.get(timeout=WAIT_LIMIT_S) + 1)
            assert outcome.get(timeout=WAIT_LIMIT_S) == number + 1
        child = os.fork()
        if child == 0:
            linked.owner_side.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert threads() <= before


def test_process_that_was_stopped_does_not_consider_its_peer_silent() -> None:
    """R11: a program that continues after a stop handles received frames before it judges its peer."""
    own_end, silent = socket.socketpair()
    reported = Channel[float](10_000, across="processes")

    def wait() -> None:
        link = _core.Link(False)
        link.attach(own_end.detach())
        while not link.wait(0.1):
            reported.put(link.state()["heard_ago"])

    began = time.monotonic()
    waiting = ProcessPeer(wait)
    reported.get()
    number = waiting.pid()
    assert number is not None
    wait_until(lambda: psutil.Process(number).status() == psutil.STATUS_SLEEPING)
    os.kill(number, signal.SIGSTOP)
    stopped = -time.monotonic()
    wait_until(lambda: stopped + time.monotonic() > 2)
    while len(reported):
        reported.get()
    stopped += time.monotonic()
    os.kill(number, signal.SIGCONT)
    heard_ago = reported.get()
    assert heard_ago < time.monotonic() - began - 0.9 * stopped
    waiting.kill()
    waiting.join()
    own_end.close()
    silent.close()


def test_two_threads_can_close_a_link_at_once() -> None:
    """Both calls return when the link is closed."""
    for _ in range(50):
        with Linked() as linked:
            both = threading.Barrier(2)

            def close(linked: Linked = linked, both: threading.Barrier = both) -> None:
                both.wait()
                linked.owner_side.close()

            closing = threading.Thread(target=close)
            closing.start()
            both.wait()
            linked.owner_side.close()
            ended = LinkBroken("the other side closed the connection")
            assert next_event(linked.owner_side, WAIT_LIMIT_S) in {LinkClosed(), ended}
            closing.join()


def test_forked_child_has_no_copy_of_the_connection() -> None:
    """If the child kept a copy, the other side would not notice the end of this process.

    The child may drop or close the link while items are in transit, and the parent's link continues.
    """
    before = _sockets()
    with Linked() as linked:
        sockets = _sockets() - before
        assert len(sockets) == 2
        source, results = channel(), channel()
        remote = RemoteWorker(linked, 1, source, results)
        working = remote.start(lambda item: [(0, item)])
        writer = source.writer()
        for number in range(20):
            for item in range(100):
                writer.put(item)
            child = os.fork()
            if not child:
                has = sockets & _sockets()
                if number % 2:
                    linked.owner_side.close()
                else:
                    linked.__dict__.clear()
                os._exit(len(has))
            assert [results.get(timeout=WAIT_LIMIT_S) for _ in range(100)] == list(range(100))
            assert os.waitpid(child, 0)[1] == 0
        writer.close()
        working.join(WAIT_LIMIT_S)


def test_forked_child_drops_a_link_closed_by_its_parent() -> None:
    link = _core.Link(True)
    link.close()
    child = os.fork()
    if not child:
        del link
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("size", [0, 64 << 20], ids=["same stacks", "large stacks"])
def test_forked_child_drops_a_link_after_starting_own_threads(size: int) -> None:
    """The C library reuses or unmaps the stacks of the link's threads for the child's threads."""
    link = _core.Link(True)
    child = os.fork()
    if not child:
        threading.stack_size(size)
        gate = threading.Event()
        own = [threading.Thread(target=gate.wait) for _ in range(4)]
        for thread in own:
            thread.start()
        if size:
            gate.set()
            for thread in own:
                thread.join()
        del link
        gate.set()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    link.close()


def _sockets() -> set[str]:
    """Return the open sockets of this process."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor used by ``listdir`` itself
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {name for name in found if name.startswith("socket:")}


@pytest.mark.parametrize("size", [10_000, 1_000_000], ids=["in a frame", "into the ring"])
def test_oversized_item_is_reported_and_stops_puts(size: int) -> None:
    with Linked() as linked:
        source, into = channel(), channel(max_bytes=5_000)
        reader, feed, worker = source.reader(), into.writer(), into.reader()
        linked.owner_side.open_stream(1, [reader], [])
        linked.worker_side.open_stream(1, [feed], [])
        got: list[bytes] = []

        def work() -> None:
            with contextlib.suppress(Broken):
                got.extend(worker)

        working = threading.Thread(target=work)
        working.start()
        for item in (b"fits", bytes(size), b"fits, too"):
            source.put(item)
        event = next_event(linked.worker_side, WAIT_LIMIT_S)
        assert isinstance(event, ItemTooLarge)
        assert (event.stream, event.port) == (1, 0)
        assert event.size >= size
        heard = linked.worker_side.state()["bytes_in"]
        wait_until(lambda: linked.worker_side.state()["bytes_in"] > heard)
        into.abort(None)
        working.join(WAIT_LIMIT_S)
        assert got == [b"fits"]
        del reader, feed

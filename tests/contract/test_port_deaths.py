"""C5: when a process ends without closing its port, the port counts as closed.

If the port was a writer, the end of the channel is not clean. Even users that only poll notice the death.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal

import pytest
from support.waiting import wait_blocked, wait_stats, wait_until

from flowchan import Broken, Channel, Closed, Empty, NothingReady, WorkerDied, select


def put_until_closed(ch):
    """Put 0, 1, 2, … until a put raises Closed."""
    for i in itertools.count():
        try:
            ch.put(i)
        except Closed:
            return


def read_to_the_end(ch):
    """Return all items, and the error that ended the reading."""
    items = []
    try:
        while True:
            items.append(ch.get())
    except (Broken, Closed) as error:
        return items, error


def cut_off_by(error, pid):
    """Return whether this is the error for the death of a writer's process."""
    return type(error) is Broken and type(error.__cause__) is WorkerDied and error.__cause__.pid == pid


def open_writer_and_stay(ch):
    """Open a writer, and keep it open until this process is killed."""
    out = ch.writer()
    out.put_many([1, 2, 3])
    signal.pause()
    out.close()


def open_reader_and_stay(ch):
    into = ch.reader()
    signal.pause()
    into.close()


# --- Writers: a death is not a clean end ---


@pytest.mark.other_process
def test_process_exit_with_an_open_writer_breaks_the_channel(make, spawn_peer):
    """C5: the writer's process exits normally, and the items that it has put stay readable."""
    ch = make()
    kept = []

    def write():
        kept.append(ch.writer())
        kept[0].put(1)
        return os.getpid()

    pid = spawn_peer(write).result()
    items, end = read_to_the_end(ch)
    assert items == [1]
    assert cut_off_by(end, pid)
    assert str(end.__cause__).startswith(
        f"process {pid} ended without closing its counted writer of Channel(64, "
    )


@pytest.mark.other_process
@pytest.mark.one_machine("items in transit are lost with the process")
def test_os_exit_with_an_open_writer_breaks_the_channel(make, spawn_peer):
    """C5: ``os._exit`` runs no cleanup."""
    ch = make()

    def write():
        out = ch.writer()
        out.put(1)
        os._exit(3)

    peer = spawn_peer(write)
    wait_stats(ch, items_in=1)
    items, end = read_to_the_end(ch)
    assert items == [1]
    assert type(end) is Broken
    peer.join()


@pytest.mark.other_process
def test_killing_the_last_writer_breaks_the_channel(make, spawn_peer):
    """C5: the killed process is not yet reaped. Every later call raises the same error."""
    ch = make()
    peer = spawn_peer(open_writer_and_stay, ch)
    wait_stats(ch, items_in=3)
    pid = peer.pid()
    peer.kill()
    items, end = read_to_the_end(ch)
    assert items == [1, 2, 3]
    assert cut_off_by(end, pid)
    assert (ch.closed, ch.drained, ch.broken) == (True, False, True)
    assert "broken, 0 inside" in repr(ch)
    for call in (
        ch.get,
        ch.get_nowait,
        lambda: next(ch),
        lambda: ch.get_many(2),
        lambda: ch.put(4),
        lambda: select([ch]),
    ):
        with pytest.raises(Broken) as caught:
            call()
        assert cut_off_by(caught.value, pid)
    peer.join()


@pytest.mark.other_process
def test_killing_the_last_writer_wakes_waiting_readers(make, spawn_peer):
    """C5: the reader is already waiting when the writer dies."""
    ch = make()
    writer = spawn_peer(open_writer_and_stay, ch)
    wait_stats(ch, items_in=3)
    assert ch.get_many(3) == [1, 2, 3]
    reader = spawn_peer(ch.get)
    wait_blocked(ch, readers=1)
    writer.kill()
    with pytest.raises(Broken):
        reader.result()
    writer.join()


@pytest.mark.other_process
def test_other_writers_continue_after_one_writer_dies(make, spawn_peer):
    """C5: the writer count stays correct, all items can be read, and the last error reports the death."""
    ch = make()
    out = ch.writer()
    peer = spawn_peer(open_writer_and_stay, ch)
    wait_stats(ch, items_in=3, writers=2)
    pid = peer.pid()
    peer.kill()
    peer.join()
    assert ch.get_many(3) == [1, 2, 3]
    out.put("still open")
    assert ch.get() == "still open"
    assert (ch.closed, ch.broken) == (False, False)
    out.put("and this")
    out.close()
    items, end = read_to_the_end(ch)
    assert items == ["and this"]
    assert cut_off_by(end, pid)


@pytest.mark.other_process
@pytest.mark.one_machine("the death is not detected until the peer timeout expires")
def test_channel_closed_after_a_writers_death_still_ends_broken(make, spawn_peer):
    """C5: the channel is closed before any call has noticed the death."""
    ch = make()
    peer = spawn_peer(open_writer_and_stay, ch)
    wait_stats(ch, items_in=3)
    peer.kill()
    peer.join()
    ch.close()
    items, end = read_to_the_end(ch)
    assert items == [1, 2, 3]
    assert type(end) is Broken


@pytest.mark.other_process
def test_writer_that_dies_after_close_does_not_break_the_channel(make, spawn_peer):
    """C4, C5: nothing is lost, because the writer could not have put any more items."""
    ch = make()
    peer = spawn_peer(open_writer_and_stay, ch)
    wait_stats(ch, items_in=3)
    ch.close()
    peer.kill()
    peer.join()
    assert list(ch) == [1, 2, 3]
    wait_until(lambda: ch.closed and ch.stats().writers == 0)
    assert (ch.drained, ch.broken) == (True, False)


@pytest.mark.other_process
def test_abort_after_a_writers_death_keeps_the_first_cause(make, spawn_peer):
    """C6: the first failure is final."""
    ch = make()
    peer = spawn_peer(open_writer_and_stay, ch)
    wait_stats(ch, items_in=3)
    pid = peer.pid()
    peer.kill()
    peer.join()
    assert cut_off_by(read_to_the_end(ch)[1], pid)
    ch.abort(ValueError("too late"))
    assert cut_off_by(read_to_the_end(ch)[1], pid)


@pytest.mark.other_process
@pytest.mark.one_machine("a port can be passed only to processes on its machine")
def test_port_used_in_a_child_belongs_to_the_child(make, spawn_peer):
    """C5: the port is still one port, and only the child can close it."""
    ch = make()
    out = ch.writer()

    def write():
        out.put("from the child")
        out.close()

    spawn_peer(write).result()
    assert list(ch) == ["from the child"]
    assert ch.stats().writers == 0
    out.close()


# --- Users that poll notice a death ---


@pytest.mark.other_process
@pytest.mark.parametrize("poll", ["get_nowait", "get, timeout", "select", "aget", "broken", "closed"])
def test_reader_that_only_polls_notices_a_writers_death(make, spawn_peer, poll):
    """C5: the reader only makes calls that do not wait for long."""
    ch = make()
    peer = spawn_peer(open_writer_and_stay, ch)
    wait_stats(ch, items_in=3)
    ch.get_many(3)
    peer.kill()
    peer.join()

    def learnt():
        try:
            if poll == "get_nowait":
                ch.get_nowait()
            elif poll == "get, timeout":
                ch.get(timeout=0.001)
            elif poll == "select":
                select([ch], timeout=0)
            elif poll == "aget":
                asyncio.run(asyncio.wait_for(ch.aget(), 0.001))
            else:
                return getattr(ch, poll)
        except Broken:
            return True
        except (Empty, NothingReady, TimeoutError):
            return False
        raise AssertionError("nothing was put")

    wait_until(learnt)
    assert ch.broken


@pytest.mark.other_process
def test_await_on_several_channels_notices_a_writers_death(make, spawn_peer):
    """C5, C9: one thread sleeps for all coroutines, and other events keep waking it."""
    ch, busy = make(), Channel()
    peer = spawn_peer(open_writer_and_stay, ch)
    wait_stats(ch, items_in=3)
    ch.get_many(3)

    async def main():
        async def keep_busy():
            while not waiting.done():
                await busy.aput(1)
            busy.close()

        async def read_what_is_busy():
            return [item async for item in busy]

        waiting = asyncio.create_task(ch.aget())
        others = [asyncio.create_task(task()) for task in (keep_busy, read_what_is_busy)]
        peer.kill()
        with pytest.raises(Broken):
            await waiting
        await asyncio.gather(*others)

    asyncio.run(main())
    peer.join()


# --- Readers ---


@pytest.mark.other_process
@pytest.mark.one_machine("the writer would poll until the peer timeout expires")
def test_put_nowait_notices_the_last_readers_death(make, spawn_peer):
    """C5: otherwise, the writer would put items that no reader gets."""
    ch = make(10**6)
    peer = spawn_peer(open_reader_and_stay, ch)
    wait_stats(ch, readers=1)
    peer.kill()
    put_until_closed(ch)
    assert len(ch) < 10**6
    peer.join()


@pytest.mark.other_process
def test_killing_the_last_reader_closes_the_channel(make, spawn_peer):
    """C5: a writer that fills the channel without a reader gets Closed instead of waiting forever."""
    ch = make(2)
    peer = spawn_peer(open_reader_and_stay, ch)
    wait_stats(ch, readers=1)
    peer.kill()
    put_until_closed(ch)
    peer.join()


@pytest.mark.other_process
def test_killing_the_last_reader_wakes_waiting_writers(make, spawn_peer):
    """Check C5."""
    ch = make(1)
    reader = spawn_peer(open_reader_and_stay, ch)
    wait_stats(ch, readers=1)
    ch.put("inside")
    writer = spawn_peer(ch.put, "outside")
    wait_blocked(ch, writers=1)
    reader.kill()
    with pytest.raises(Closed):
        writer.result()
    reader.join()


@pytest.mark.other_process
@pytest.mark.one_machine("a remote reader gets one item in advance")
def test_items_leased_by_a_killed_reader_return(make, spawn_peer):
    """C4, C5: the items return to the front, in order, as if the reader had not existed."""
    ch = make()
    ch.put_many(range(4))
    ch.close()

    def take_and_stay():
        into = ch.reader()
        into.get_many(2)
        signal.pause()

    peer = spawn_peer(take_and_stay)
    wait_stats(ch, leased=2)
    assert ch.get_many(5) == [2, 3]
    reader = spawn_peer(ch.get_many, 5)
    wait_blocked(ch, readers=1)
    peer.kill()
    assert reader.result() == [0, 1]
    peer.join()
    assert list(ch) == []

"""C9 for asyncio: ``aput``, ``aget`` and ``async for`` on channels and ports of every transport.

A cancelled call has neither taken nor put an item. A wait occupies no thread, and the event loop keeps
running. These tests do not measure the CPU time of a blocked await. A blocked await sleeps in the same call
as ``select``.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections import Counter

import pytest
from support.peers import ProcessPeer, ThreadPeer
from support.waiting import WAIT_LIMIT_S, wait_blocked, wait_until

from flowchan import Broken, Channel, Closed, Drained
from flowchan.channel import awaiting


def run(coroutine):
    """Run a coroutine in a new loop with a time limit."""

    async def limited():
        return await asyncio.wait_for(coroutine, WAIT_LIMIT_S)

    return asyncio.run(limited())


async def until(condition):
    """Wait for a condition without stopping the loop."""
    while not condition():
        await asyncio.sleep(0)


async def blocked(channel, readers=0, writers=0):
    """Wait until this many readers and writers wait for the channel."""

    def reached():
        stats = channel.stats()
        return stats.waiting_readers >= readers and stats.waiting_writers >= writers

    await until(reached)


# calls that succeed


def test_aput_and_aget_pass_items(make):
    """C1, C9: neither call has to wait."""

    async def main():
        ch = make()
        for item in (1, None, "three"):
            await ch.aput(item)
        return [await ch.aget() for _ in range(3)]

    assert run(main()) == [1, None, "three"]


def test_async_for_ends_when_the_channel_is_drained(make):
    """Check C4 and C9."""

    async def main():
        ch = make()
        ch.put_many(range(5))
        ch.close()
        return [item async for item in ch]

    assert run(main()) == list(range(5))


def test_a_waiting_aget_is_woken_by_another_thread_or_process(make, spawn_peer):
    """Check C8 and C9."""

    async def main():
        ch = make()
        task = asyncio.create_task(ch.aget())
        await blocked(ch, readers=1)
        peer = spawn_peer(ch.put, "item")
        item = await task
        peer.result()
        return item

    assert run(main()) == "item"


def test_a_waiting_aput_is_woken_by_another_thread_or_process(make, spawn_peer):
    """Check C2, C8 and C9."""

    async def main():
        ch = make(1)
        ch.put("old")
        task = asyncio.create_task(ch.aput("new"))
        await blocked(ch, writers=1)
        assert len(ch) == 1
        peer = spawn_peer(ch.get)
        await task
        assert peer.result() == "old"
        return ch.get()

    assert run(main()) == "new"


def test_coroutines_pass_items_through_a_full_channel(make):
    """C2, C9: one coroutine writes and one reads, in the same loop and over a channel with capacity 1."""

    async def main():
        ch = make(1)

        async def write():
            for i in range(300):
                await ch.aput(i)
            ch.close()

        writing = asyncio.create_task(write())
        items = [item async for item in ch]
        await writing
        return items

    assert run(main()) == list(range(300))


def test_ports_can_be_awaited_like_channels(make):
    """C5, C9: the last writer's exit ends the loop, and an item stays leased until the next request."""

    async def main():
        ch = make(1)
        reader, writer = ch.reader(), ch.writer()

        async def write():
            with writer:
                for i in range(50):
                    await writer.aput(i)

        writing = asyncio.create_task(write())
        items = []
        async for item in reader:
            assert ch.stats().leased == 1
            items.append(item)
        await writing
        reader.close()
        return items

    assert run(main()) == list(range(50))


def test_event_loop_runs_while_a_coroutine_waits(make):
    """Check C9."""

    async def main():
        ch = make()
        waiting = asyncio.create_task(ch.aget())
        steps = 0
        while not ch.stats().waiting_readers:
            steps += 1
            await asyncio.sleep(0)
        assert not waiting.done()
        ch.put(steps)
        return await waiting

    assert run(main()) > 0


@pytest.mark.parametrize(("end", "raised"), [("close", Drained), ("abort", Broken)])
def test_close_or_abort_wakes_every_waiting_aget(make, end, raised):
    """Check C3, C6 and C9."""

    async def main():
        ch = make()
        tasks = [asyncio.create_task(ch.aget()) for _ in range(5)]
        await blocked(ch, readers=5)
        getattr(ch, end)()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(error) for error in run(main())] == [raised] * 5


@pytest.mark.parametrize(("end", "raised"), [("close", Closed), ("abort", Broken)])
def test_close_or_abort_wakes_every_waiting_aput(make, end, raised):
    """Check C3, C6 and C9."""

    async def main():
        ch = make(1)
        ch.put("old")
        tasks = [asyncio.create_task(ch.aput(i)) for i in range(5)]
        await blocked(ch, writers=5)
        getattr(ch, end)()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(error) for error in run(main())] == [raised] * 5


def test_closing_a_port_ends_an_await_on_the_port(make):
    """Check C5 and C9."""

    async def main():
        ch = make()
        keep, reader = ch.reader(), ch.reader()
        task = asyncio.create_task(reader.aget())
        await blocked(ch, readers=1)
        reader.close()
        with pytest.raises(ValueError, match=r"this port of .* was closed"):
            await task
        keep.close()
        return ch.stats().waiting_readers

    assert run(main()) == 0


@pytest.mark.copying
def test_an_item_that_cannot_be_sent_raises_in_aput(make):
    """Check C9 and C13."""

    async def main():
        ch = make()
        with pytest.raises(TypeError, match="can't send"):
            await ch.aput(threading.Lock())
        return len(ch)

    assert run(main()) == 0


# cancellation


def test_cancelled_aget_has_taken_no_item(make):
    """Check C9."""

    async def main():
        ch = make()
        task = asyncio.create_task(ch.aget())
        await blocked(ch, readers=1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        ch.put("item")
        await until(lambda: ch.stats().waiting_readers == 0)
        return ch.get_nowait()

    assert run(main()) == "item"


def test_cancelled_aput_has_put_no_item(make):
    """Check C9."""

    async def main():
        ch = make(1)
        ch.put("old")
        task = asyncio.create_task(ch.aput("new"))
        await blocked(ch, writers=1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return ch.get_many(5)

    assert run(main()) == ["old"]


def test_timeout_around_aget_takes_no_item(make):
    """Check C7 and C9."""

    async def main():
        ch = make()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await ch.aget()
        ch.put("item")
        return await ch.aget()

    assert run(main()) == "item"


def test_cancelled_call_that_was_woken_wakes_the_next_reader(make):
    """C8, C9: the item that has woken the cancelled call must reach another reader."""

    async def main():
        for _ in range(50):
            ch = make()
            tasks = [asyncio.create_task(ch.aget()) for _ in range(2)]
            await blocked(ch, readers=2)
            ch.put("item")
            tasks[0].cancel()
            results = await asyncio.gather(tasks[0], return_exceptions=True)
            if results == ["item"]:
                ch.put("item")
            assert await tasks[1] == "item"

    run(main())


def test_cancelled_call_passes_its_wake_up_to_a_thread(make):
    """Check C8 and C9."""

    async def main():
        for _ in range(50):
            ch = make()
            task = asyncio.create_task(ch.aget())
            thread = ThreadPeer(ch.get)
            await blocked(ch, readers=2)
            ch.put("item")
            task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if result == "item":
                ch.put("item")
            assert await asyncio.to_thread(thread.result) == "item"

    run(main())


def test_many_cancelled_agets_lose_no_item(make, spawn_peer):
    """C9: every item must arrive exactly once, although readers are cancelled during the puts."""
    ch, writers, each = make(4), 2, 700
    taken = []

    async def read(chance):
        while True:
            task = asyncio.create_task(ch.aget())
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
            try:
                taken.append(await task)
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():  # so that the reader ends if the test fails
                    raise
            except Drained:
                return

    async def main():
        peers = [spawn_peer(ch.put_many, [(number, i) for i in range(each)]) for number in range(writers)]
        reading = [asyncio.create_task(read(random.Random(seed))) for seed in range(5)]
        await asyncio.to_thread(lambda: [peer.result() for peer in peers])
        ch.close()
        await asyncio.gather(*reading)

    run(main())
    assert Counter(taken) == dict.fromkeys(((number, i) for number in range(writers) for i in range(each)), 1)


def test_many_cancelled_aputs_put_each_item_once(make):
    """C9: a cancelled call reports correctly whether it has put its item."""
    ch, put = make(2), []

    async def write(number):
        chance = random.Random(number)
        for i in range(200):
            task = asyncio.create_task(ch.aput((number, i)))
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
            try:
                await task
                put.append((number, i))
            except asyncio.CancelledError:
                continue

    async def main():
        reader = ThreadPeer(list, ch)
        await asyncio.gather(*(write(number) for number in range(5)))
        ch.close()
        return await asyncio.to_thread(reader.result)

    taken = run(main())
    assert taken
    assert Counter(taken) == Counter(put)
    assert max(Counter(taken).values()) == 1


# threads and loops


def test_500_concurrent_waits_use_few_threads(make):
    """C9: the waits are spread over a hundred channels, and each item wakes one of five waiters."""

    async def main():
        channels = [make() for _ in range(100)]
        before = threading.active_count()
        tasks = [asyncio.create_task(ch.aget()) for ch in channels for _ in range(5)]
        for ch in channels:
            await blocked(ch, readers=5)
        threads = threading.active_count() - before
        for number, ch in enumerate(channels):
            ch.put_many([number] * 5)
        assert Counter(await asyncio.gather(*tasks)) == dict.fromkeys(range(100), 5)
        return threads

    assert run(main()) <= 4  # one thread for every 127 waits


def test_two_event_loops_wait_on_the_same_channel(make):
    """C8, C9: each loop runs in its own thread."""
    ch, items = make(2), 400

    def read():
        async def main():
            return [item async for item in ch]

        return run(main())

    def write(start):
        async def main():
            for i in range(start, items, 2):
                await ch.aput(i)

        run(main())

    readers = [ThreadPeer(read) for _ in range(2)]
    for writer in [ThreadPeer(write, start) for start in range(2)]:
        writer.result()
    ch.close()
    assert sorted(item for reader in readers for item in reader.result()) == list(range(items))


def test_event_loop_may_be_closed_while_a_call_waits(make):
    """C8, C9: the end of the loop's thread removes its waiters, and other readers get the item."""
    ch = make()
    loop = asyncio.new_event_loop()
    task = loop.create_task(ch.aget())
    loop.run_until_complete(blocked(ch, readers=1))
    task.cancel()
    loop.close()
    wait_until(lambda: not any(thread.name == "flowchan async" for thread in threading.enumerate()))
    assert ch.stats().waiting_readers == 0
    ch.put("item")
    assert ch.get() == "item"


def test_closed_event_loop_is_freed(make):
    """C9, C12: flowchan keeps no reference to a closed loop, even if calls waited in it."""
    ch = make()

    async def main():
        waiting = asyncio.create_task(ch.aget())
        await blocked(ch, readers=1)
        waiting.cancel()
        return weakref.ref(asyncio.get_running_loop())

    reference = asyncio.run(main())

    def forgotten():
        gc.collect()
        return reference() is None

    wait_until(forgotten)
    wait_until(lambda: len(awaiting._watchers) == 0)


def test_watcher_thread_ends_when_idle(make, monkeypatch):
    """C12: a later wait restarts the thread."""
    monkeypatch.setattr(awaiting.Watcher, "IDLE", 0.0)

    async def main():
        ch = make()
        for item in range(2):
            task = asyncio.create_task(ch.aget())
            await blocked(ch, readers=1)
            ch.put(item)
            assert await task == item
            await until(lambda: not any(thread.name == "flowchan async" for thread in threading.enumerate()))

    run(main())


def test_forked_child_awaits_in_a_new_event_loop():
    """C9: the process forks while its own loop is waiting."""
    ch, answer = Channel(across="processes"), Channel(across="processes")

    def child():
        async def add_one():
            await answer.aput(1 + await ch.aget())

        run(add_one())

    async def main():
        waiting = asyncio.create_task(answer.aget())
        await blocked(answer, readers=1)
        peer = ProcessPeer(child)
        wait_blocked(ch, readers=1)
        ch.put(41)
        result = await waiting
        await asyncio.to_thread(peer.result)
        return result

    assert run(main()) == 42

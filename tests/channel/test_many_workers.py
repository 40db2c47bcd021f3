"""C8: only as many of a stage's workers run as are needed; the others sleep.

If an ordered stage cannot pass on its outputs, a few workers keep one output each, and the others take no
items. When the channel has room again, all workers continue.
"""

from __future__ import annotations

import os
import resource
import sys
import sysconfig
import threading
from typing import Any

import pytest
from support.waiting import wait_blocked, wait_until

from flowchan import Channel, Drained

WORKERS = 30
CROWD = 2


def work(into: Any, out: Any, go: threading.Event) -> None:
    """Process items like a ``map`` worker. The worker with item 0 delays the others until ``go`` is set."""
    try:
        while True:
            item = into.get()
            if item == 0:
                go.wait()
            out.put(item)
    except Drained:
        into.close()
        out.close()


@pytest.mark.parametrize("capacity", [1, 2, 8, 64])
@pytest.mark.parametrize("single", [True, False])
def test_few_workers_hold_an_output_while_the_channel_is_full(capacity: int, single: bool) -> None:
    before: Channel[int] = Channel(200)
    after: Channel[int] = Channel(capacity)
    ports = [(before.reader(), after.writer()) for _ in range(WORKERS)]
    for into, out in ports:
        out._follow(into, True, single)
    before.put_many(range(200))
    go = threading.Event()
    threads = [threading.Thread(target=work, args=(*port, go)) for port in ports]
    for thread in threads:
        thread.start()
    wait_blocked(after, writers=WORKERS - 1)
    assert after.stats().items_out == 0
    # workers have taken item 0, the items with parked outputs, and the items whose outputs wait for room
    taken = before.stats().items_out
    assert capacity <= taken <= capacity + CROWD
    before.close()
    go.set()
    assert list(after) == list(range(200))
    for thread in threads:
        thread.join()


def test_worker_that_waits_for_room_raises_when_the_channel_breaks() -> None:
    before: Channel[int] = Channel(200)
    after: Channel[int] = Channel(1)
    ports = [(before.reader(), after.writer()) for _ in range(WORKERS)]
    for into, out in ports:
        out._follow(into, True, True)
    before.put_many(range(100))
    go = threading.Event()
    ended: list[BaseException] = []

    def worker(into: Any, out: Any) -> None:
        try:
            work(into, out, go)
        except BaseException as error:
            ended.append(error)

    threads = [threading.Thread(target=worker, args=port) for port in ports]
    for thread in threads:
        thread.start()
    wait_blocked(after, writers=WORKERS - 1)
    after.abort(ValueError("no more"))
    before.abort(ValueError("no more"))
    go.set()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(ended) == WORKERS, what=lambda: ended)
    for into, out in ports:
        into.close()
        out.close()


@pytest.mark.parametrize("across", ["threads", "processes"])
@pytest.mark.parametrize("stage", [True, False], ids=["stage", "plain"])
def test_same_few_workers_of_a_stage_take_all_items(stage: bool, across: Any) -> None:
    """If all workers are already waiting whenever an item arrives, the same worker takes every item.

    In a ring, that worker has a low rank. Plain readers take turns instead.
    """
    channel: Channel[int] = Channel(across=across)
    ports = [channel.reader() for _ in range(WORKERS)]
    takers: list[Any] = []

    def read(port: Any) -> None:
        for _ in port:
            takers.append(port)

    threads = [threading.Thread(target=read, args=(port,)) for port in ports]
    for port, thread in zip(ports, threads, strict=True):
        if stage:
            port._wake_lazily()
        thread.start()
    wait_blocked(channel, readers=WORKERS)
    for item in range(2 * WORKERS):
        channel.put(item)
        wait_until(lambda item=item: len(takers) > item)
        wait_blocked(channel, readers=WORKERS)
    channel.close()
    for thread in threads:
        thread.join()
    if across == "threads":
        assert len(set(takers)) == (1 if stage else WORKERS)
    # a reader may still be falling asleep, so a second reader is woken as well
    else:
        assert (len(set(takers)) < WORKERS // 3) == stage


@pytest.mark.skipif(sysconfig.get_config_var("Py_GIL_DISABLED") == 1, reason="needs the GIL")
def test_at_most_one_reader_per_core_is_woken_at_once() -> None:
    """Each reader that takes an item wakes the next. No reader can run while this test holds the GIL."""
    cores = os.sysconf("SC_NPROCESSORS_ONLN")
    channel: Channel[int] = Channel(across="processes")
    taken: list[int] = []
    threads = [threading.Thread(target=lambda: taken.append(channel.get())) for _ in range(3 * cores)]
    for thread in threads:
        thread.start()
    wait_blocked(channel, readers=len(threads))
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        for item in range(len(threads)):
            channel.put(item)
        woken = channel.stats().woken
    finally:
        sys.setswitchinterval(usual)
    for thread in threads:
        thread.join()
    assert woken == cores
    assert sorted(taken) == list(range(len(threads)))


@pytest.mark.parametrize("across", ["threads", "processes"])
def test_reader_of_closed_channel_sleeps_until_all_leases_end(across: Any) -> None:
    """Waking all readers after each finished lease would take quadratic time."""
    channel: Channel[int] = Channel(WORKERS, across=across)
    turns = [threading.Event() for _ in range(WORKERS)]
    switches: list[int] = []

    def read(reader: Any, turn: threading.Event) -> None:
        reader.get()
        turn.wait()
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        with pytest.raises(Drained):
            reader.get()
        switches.append(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before)

    readers = [threading.Thread(target=read, args=(channel.reader(), turn)) for turn in turns]
    with channel.writer() as out:
        out.put_many(range(WORKERS))
    for reader in readers:
        reader.start()
    wait_until(lambda: channel.stats().items_out == WORKERS)
    for number, turn in enumerate(turns[:-1], 1):
        turn.set()
        wait_until(lambda number=number: channel.stats().waiting_readers == number)
    turns[-1].set()
    for reader in readers:
        reader.join()
    assert sum(switches) < WORKERS * WORKERS / 4

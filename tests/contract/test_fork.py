"""Fork safety: in a forked child, a channel works, or raises at once and says why.

This must not depend on how other threads use the channel during the fork.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections import Counter
from collections.abc import Callable

import pytest
from support.peers import ProcessPeer, ThreadPeer
from support.waiting import wait_blocked, wait_until

from flowchan import Channel, ChannelError, Closed, Graph, select

FORKS = 10


def in_child(function: Callable[[], object]) -> int:
    """Call the function in a forked child.

    Return the child's exit code, which is 0 if the function returned true.
    """
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            code = 0 if function() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.copying
def test_channel_works_after_forks_while_threads_use_it(make):
    """The parent's threads put and get without a pause, so most forks happen while locks are held.

    No item is lost or repeated.
    """
    ch, back, each = make(4), make(), 5
    stop = threading.Event()

    def hammer(number):
        count = 0
        while not stop.is_set():
            ch.put(("thread", number, count))
            count += 1
        return count

    threads = [ThreadPeer(hammer, number) for number in range(3)]
    reader = ThreadPeer(list, ch)
    for fork in range(FORKS):

        def use(fork=fork):
            for i in range(each):
                ch.put(("child", fork, i))
            back.put(fork)
            return len(ch) <= 4

        assert in_child(use) == 0
    stop.set()
    counts = [thread.result() for thread in threads]
    ch.close()
    seen = Counter(reader.result())
    expected = [("thread", number, i) for number, count in enumerate(counts) for i in range(count)]
    expected += [("child", fork, i) for fork in range(FORKS) for i in range(each)]
    assert seen == dict.fromkeys(expected, 1)
    assert sorted(back.get_many(FORKS)) == list(range(FORKS))


def test_threads_channel_raises_at_once_in_a_forked_child():
    """The channel's lock may be held by a thread that the child does not have, so no call may wait for it."""
    ch: Channel[int] = Channel(4)
    reader, writer = ch.reader(), ch.writer()
    stop = threading.Event()

    def hammer():
        while not stop.is_set():
            with contextlib.suppress(ChannelError):
                ch.put_nowait(1)
                ch.get_nowait()
                ch.stats()

    threads = [ThreadPeer(hammer) for _ in range(3)]
    calls = [
        lambda: ch.put(1),
        ch.get,
        lambda: ch.get(timeout=1),
        lambda: ch.put_many([1]),
        lambda: ch.get_many(1),
        ch.stats,
        lambda: list(ch),
        reader.get,
        lambda: writer.put(1),
        ch.reader,
        ch.writer,
        lambda: select([ch]),
        lambda: len(ch),
        lambda: ch.closed,
        lambda: ch.drained,
        ch.close,
        ch.abort,
    ]

    def refused():
        for call in calls:
            with pytest.raises(ChannelError, match="does not reach a forked child"):
                call()
        return True

    for _ in range(FORKS):
        assert in_child(refused) == 0
    stop.set()
    for thread in threads:
        thread.result()


def test_child_that_drops_inherited_objects_does_not_disturb_its_parent(make):
    """The child's exit runs all destructors, with locks held as they were at the fork.

    Ports and items still belong to the parent.
    """
    ch = make(2)
    kept = [ch.reader(), ch.writer()]
    stop = threading.Event()

    def hammer():
        while not stop.is_set():
            with contextlib.suppress(ChannelError):
                ch.put_nowait("item")
                ch.get_nowait()

    threads = [ThreadPeer(hammer) for _ in range(2)]

    def drop():
        nonlocal ch
        kept.clear()
        ch = None
        gc.collect()
        return True

    for _ in range(FORKS):
        assert in_child(drop) == 0
    stop.set()
    for thread in threads:
        thread.result()
    assert not ch.closed
    assert (ch.stats().readers, ch.stats().writers) == (1, 1)
    kept[1].put("last")
    assert kept[0].get_many(3)[-1] == "last"
    for port in kept:
        port.close()
    assert ch.closed


@pytest.mark.copying
def test_waiting_forked_child_is_woken(make):
    """The parent also has waiting calls at the fork."""
    ch, answer = make(), make()
    waiting = ThreadPeer(ch.get)
    wait_blocked(ch, readers=1)
    child = ProcessPeer(lambda: answer.put(ch.get()))
    wait_blocked(ch, readers=2)
    ch.put_many(["a", "b"])
    assert {waiting.result(), answer.get()} == {"a", "b"}
    child.result()


@pytest.mark.copying
def test_port_used_in_a_forked_child_moves_to_the_child(make):
    """When the child dies, the items that its port leased return."""
    ch = make()
    ch.put("item")
    reader = ch.reader()
    child = ProcessPeer(lambda: (reader.get(), wait_until(lambda: False)))
    wait_until(lambda: ch.stats().leased == 1)
    child.kill()
    child.join()
    assert ch.get() == "item"
    reader.close()


@pytest.mark.copying
def test_grandchild_uses_the_channel(make):
    ch = make()

    def child():
        ch.put("child")
        return in_child(lambda: ch.put("grandchild") is None) == 0

    assert in_child(child) == 0
    assert sorted(ch.get_many(2)) == ["child", "grandchild"]


def test_child_forked_during_a_run_does_not_affect_the_run():
    """The child neither delays nor ends the run, and can run other graphs."""
    numbers: Channel[int] = Channel(across="processes")
    graph = Graph("forked")
    source = graph.input()
    doubled = source.map(lambda item: 2 * item, on="process").collect()

    def own_run():
        own = Graph("child")
        result = own.source(range(5)).map(lambda item: item + 1, on="process").collect()
        numbers.put(sum(own.run()[result]))
        return True

    with graph.start() as run:
        run[source].put(1)
        assert in_child(own_run) == 0
        run[source].put(2)
    assert run.wait()[doubled] == [2, 4]
    assert numbers.get() == 15
    with pytest.raises((Closed, ValueError)):
        run[source].put(3)

"""Test ``Channel`` and ``select`` with the cases from Go's tests of channels and ``select``.

The original files are ``runtime/chan_test.go`` and ``test/chan``. Each test has the name of the original test
but none of its code.

The following cases differ from the originals:

``TestChan``
    A closed channel raises ``Drained`` instead of yielding zeros, and a capacity is at least 1.
``TestNonblockSelectRace2``, ``TestSelectStackAdjust``
    ``ready=`` waits for a channel to close.
``TestSelfSelect``
    Channels have no rendezvous, so a select may get the item that it has put.
``doubleselect``
    A select ends before the next one begins.
``fifo``, ``select3``
    Synchronous channels are replaced with channels of capacity 1.
``nonblock``
    ``put_nowait`` and ``get_nowait`` never wait.
``select2``, ``select4``, ``select6``, ``select7``
    ``stats()`` shows whether a select leaves waiters behind.

The following cases are left out:

``perm``, ``zerosize``, ``select5``, ``sendstmt``, ``TestChanSendInterface``
    They test the compiler and its types; in flowchan, a port either reads or writes.
``TestShrinkStackDuringBlockedSend``, ``TestNoShrinkStackWhileParking``
    They test the stacks of goroutines.
``powser1``, ``powser2``, ``select8``
    ``powser1`` and ``powser2`` are whole programs, like ``sieve1``. ``select8`` tests ``break``, which needs
    no test in Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.waiting import wait_blocked

from flowchan import Channel, Closed, Drained, Empty, Full, NothingReady, select

across = pytest.mark.parametrize("across", ["threads", "processes"])


def idle(*channels: Channel[Any]) -> bool:
    return all(
        ch.stats().waiting_readers == ch.stats().waiting_writers == ch.stats().selecting == 0
        for ch in channels
    )


# --- chan_test.go ---


@across
@pytest.mark.parametrize("capacity", [1, 2, 7, 200])
def test_chan(across: Any, capacity: int, go: Any) -> None:
    empty = Channel[int](capacity, across=across)
    readers = [go(empty.get) for _ in range(2)]
    wait_blocked(empty, readers=2)
    with pytest.raises(Empty):
        empty.get_nowait()
    empty.put_many([0, 0])
    assert [reader.result() for reader in readers] == [0, 0]

    full = Channel[int](capacity, across=across)
    full.put_many(range(capacity))
    writer = go(full.put, capacity)
    wait_blocked(full, writers=1)
    with pytest.raises(Full):
        full.put_nowait(0)
    assert (len(full), full.capacity) == (capacity, capacity)
    assert [full.get() for _ in range(capacity + 1)] == list(range(capacity + 1))
    writer.result()
    full.close()
    for _ in range(2):
        with pytest.raises(Drained):
            full.get()

    closing = Channel[int](capacity, across=across)
    reader = go(lambda: list(closing))
    wait_blocked(closing, readers=1)
    closing.close()
    assert reader.result() == []


@across
def test_chan_of_many(across: Any, go: Any) -> None:
    """The last part of ``TestChan``: four readers get the items from four writers, each item once."""
    ch = Channel[int](3, across=across)
    readers = [go(lambda: Counter(ch.get() for _ in range(200))) for _ in range(4)]
    for _ in range(4):
        go(ch.put_many, range(200))
    assert sum((reader.result() for reader in readers), Counter()) == dict.fromkeys(range(200), 4)


def test_nonblock_recv_race(go: Any) -> None:
    for _ in range(100):
        ch = Channel[int](1)
        ch.put(1)

        def look(ch: Channel[int] = ch) -> None:
            try:
                ch.get_nowait()
            except Drained:
                pass  # the channel is closed; get_nowait() must never raise Empty here

        looking = go(look)
        ch.close()
        try:
            ch.get()
        except Drained:
            pass
        looking.result()


def test_nonblock_select_race(go: Any) -> None:
    """One of the two channels is always ready, so even a select that does not wait finds it."""
    for _ in range(200):
        first, second = Channel[int](1), Channel[int](1)
        first.put(1)
        looking = go(lambda first=first, second=second: select([first, second], timeout=0))
        second.put(1)
        try:
            first.get_nowait()
        except Empty:
            pass  # the select got the item
        looking.result()


def test_nonblock_select_race2(go: Any) -> None:
    for _ in range(200):
        first, second = Channel[int](1), Channel[int](1)
        first.put(1)
        looking = go(lambda first=first, second=second: select([first], ready=[second], timeout=0))
        second.close()
        try:
            first.get_nowait()
        except Empty:
            pass
        looking.result()


@across
def test_self_select(across: Any, go: Any) -> None:
    ch = Channel[int](10, across=across)

    def both(number: int) -> int:
        return sum(1 if select([ch], puts=[(ch, number)]).put else -1 for _ in range(500))

    left = go(both, 0), go(both, 1)
    assert sum(peer.result() for peer in left) == len(ch)
    assert idle(ch)


@across
def test_select_stress(across: Any, go: Any) -> None:
    channels, each = [Channel[int](size, across=across) for size in (1, 1, 2, 3)], 150

    def puts() -> None:
        left = dict.fromkeys(range(4), each)
        while left:
            done = select(puts=[(channels[n], 0) for n in left])
            _count(left, channels.index(done.channel))

    def gets() -> None:
        left = dict.fromkeys(range(4), each)
        while left:
            _count(left, channels.index(select([channels[n] for n in left]).channel))

    peers = [go(puts), go(gets)]
    for ch in channels:
        peers += [go(ch.put_many, [0] * each), go(lambda ch=ch: [ch.get() for _ in range(each)])]
    for peer in peers:
        peer.result()
    assert [len(ch) for ch in channels] == [0] * 4
    assert idle(*channels)


def _count(left: dict[int, int], number: int) -> None:
    left[number] -= 1
    if not left[number]:
        del left[number]


@across
def test_select_fairness(across: Any) -> None:
    """The limits are eight standard deviations from the mean."""
    first, second = Channel[int](1_000, across=across), Channel[int](1_000, across=across)
    first.put_many(range(600))
    second.put_many(range(600))
    chosen = sum(select([first, second, Channel[int]()]).channel is first for _ in range(600))
    assert 200 < chosen < 400


def test_pseudo_random_send() -> None:
    ch = Channel[int](400)
    for _ in range(400):
        select(puts=[(ch, 1), (ch, 0)])
    assert 120 < sum(ch.get_many(400)) < 280


@across
def test_multi_consumer(across: Any, go: Any) -> None:
    numbers = [2, 3, 7, 11, 13, 17, 19, 23, 27, 31]
    questions, answers = (Channel[int](24, across=across) for _ in range(2))

    def work(writer: Any) -> None:
        with writer:
            for number in questions:
                writer.put(number)

    workers = [go(work, answers.writer()) for _ in range(8)]
    sent = [numbers[n % 10] for n in range(2_000)]
    feeder = go(lambda: (questions.put_many(sent), questions.close()))
    got = list(answers)
    assert (len(got), sum(got)) == (len(sent), sum(sent))
    for peer in (feeder, *workers):
        peer.result()


@across
def test_select_duplicate_channel(across: Any, go: Any) -> None:
    c, d, e = (Channel[int](1, across=across) for _ in range(3))
    first = go(lambda: (select([c, c, d]), e.put(9)))
    wait_blocked(c, readers=2)
    second = go(c.get)
    wait_blocked(c, readers=3)
    d.put(7)
    assert e.get() == 9
    c.put(8)
    assert second.result() == 8
    first.result()
    assert idle(c, d, e)


# --- test/chan ---


def test_doubleselect(go: Any) -> None:
    a, b, c, merged = (Channel[int]() for _ in range(4))

    def send() -> None:
        for number in range(500):
            select(puts=[(ch, number) for ch in (a, b, c)])
        for ch in (a, b, c):
            ch.close()

    go(send)
    forwards = [go(lambda ch=ch: merged.put_many(ch)) for ch in (a, b, c)]
    go(lambda: ([peer.result() for peer in forwards], merged.close()))
    assert Counter(merged) == dict.fromkeys(range(500), 1)


@across
def test_fifo(across: Any, go: Any) -> None:
    ch = Channel[int](10, across=across)
    ch.put_many(range(10))
    assert [ch.get() for _ in range(10)] == list(range(10))
    turns = [Channel[int](1)]
    for number in range(10):
        turns.append(Channel(1))
        go(lambda n=number, before=turns[-2], after=turns[-1]: (before.get(), ch.put(n), after.put(0)))
    turns[0].put(0)
    turns[-1].get()
    assert ch.get_many(10) == list(range(10))


def test_goroutines(go: Any) -> None:
    chain = [Channel[int](1)]
    for _ in range(200):
        chain.append(Channel(1))
        go(lambda before=chain[-2], after=chain[-1]: after.put(1 + before.get()))
    chain[0].put(0)
    assert chain[-1].get() == 200


@across
def test_nonblock(across: Any) -> None:
    for item in (1, True, 1.5, "string", None, {"a": [1]}):
        ch = Channel[Any](1, across=across)
        with pytest.raises(Empty):
            ch.get_nowait()
        ch.put_nowait(item)
        with pytest.raises(Full):
            ch.put_nowait(item)
        assert ch.get_nowait() == item


@across
def test_select(across: Any) -> None:
    """From ``select.go``: an item is put only into the chosen channel."""
    full, free = Channel[int](1, across=across), Channel[int](1, across=across)
    full.put(0)
    assert select(puts=[(full, 1), (free, 2)]).channel is free
    with pytest.raises(NothingReady):
        select(puts=[(full, 1), (free, 2)], timeout=0)
    assert (full.get(), free.get()) == (0, 2)


@across
def test_select2(across: Any, go: Any) -> None:
    """The operations that were not chosen leave no waiters behind."""
    used, other = Channel[int](across=across), Channel[int](across=across)
    reader = go(lambda: [select([used, other]).item for _ in range(300)])
    used.put_many(range(300))
    assert reader.result() == list(range(300))
    assert idle(used, other)


@across
def test_select3(across: Any) -> None:
    """Some selects wait forever, some do not wait at all, and some raise."""
    empty, full, closed = (Channel[int](1, across=across) for _ in range(3))
    full.put(1)
    closed.close()
    for waits in (
        {"gets": [empty]},
        {"puts": [(full, 2)]},
        {"gets": [empty], "puts": [(full, 2)]},
        {"gets": [empty, closed]},
    ):
        with pytest.raises(NothingReady):
            select(timeout=0.01, **waits)  # type: ignore[arg-type]
    for ends, raised in (({"gets": [closed]}, Drained), ({"puts": [(closed, 1)]}, Closed)):
        with pytest.raises(raised):
            select(**ends)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 to 128 operations"):
        select()
    assert select([full, empty]).channel is full


def test_select6(go: Any) -> None:
    """The end of a select does not disturb the waiters before and after it."""
    first, second, leave = (Channel[bool](1) for _ in range(3))
    before = go(first.get)
    wait_blocked(first, readers=1)
    leaves = go(lambda: select([first, leave]))
    wait_blocked(first, readers=2)
    after = go(first.get)
    wait_blocked(first, readers=3)
    leave.put(True)
    assert leaves.result().channel is leave
    first.put_many([True, True])
    assert before.result()
    assert after.result()
    assert idle(first, second, leave)


def test_select4_and_select7(go: Any) -> None:
    """Each method to put is combined with each method to get."""
    ways_to_get: list[Callable[[Channel[int]], int]] = [
        lambda ch: ch.get(),
        lambda ch: select([ch]).item,
        lambda ch: select([ch, Channel()]).item,
        lambda ch: next(iter(ch)),
    ]
    ways_to_put: list[Callable[[Channel[int]], object]] = [
        lambda ch: ch.put(8),
        lambda ch: select(puts=[(ch, 8)]),
        lambda ch: select([Channel()], puts=[(ch, 8)]),
        lambda ch: ch.put_nowait(8),
    ]
    for get in ways_to_get:
        for put in ways_to_put:
            ch = Channel[int](1)
            reader = go(get, ch)
            put(ch)
            assert reader.result() == 8


@pytest.mark.parametrize("primes", [[2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31]])
def test_sieve1_and_sieve2(primes: list[int], go: Any) -> None:
    """Each prime filters the numbers that follow it. Closing one channel ends all filters at once."""
    stop = Channel[int](1)

    def count(out: Channel[int]) -> None:
        number = 2
        while select(puts=[(out, number)], ready=[stop]).put:
            number += 1

    def sift(prime: int, source: Channel[int], out: Channel[int]) -> None:
        while (done := select([source], ready=[stop])).channel is source:
            if done.item % prime and not select(puts=[(out, done.item)], ready=[stop]).put:
                return

    source, found = Channel[int](1), []
    go(count, source)
    for _ in primes:
        prime, after = source.get(), Channel[int](1)
        found.append(prime)
        go(sift, prime, source, after)
        source = after
    stop.close()
    assert found == primes


def test_close_wakes_all_selects(go: Any) -> None:
    """``TestSelectStackAdjust``: closing a channel ends every select that is waiting on it."""
    ready, work = Channel[int](1), Channel[int](1)
    waiting = [go(lambda: select([work], ready=[ready]).channel) for _ in range(3)]
    wait_blocked(ready, readers=3)
    ready.close()
    assert all(peer.result() is ready for peer in waiting)

"""Test ``Channel`` with the cases from crossbeam-channel's channel tests.

Closing the last ``writer()`` corresponds to dropping the last sender. Each test has the name of the original
test but none of its code. The original files are ``array.rs``, ``list.rs`` and ``iter.rs``; the cases from
``select.rs`` and ``ready.rs`` are in ``test_crossbeam_select.py``.

The following cases differ from the originals:

``list.rs``
    An unbounded channel is one with ``capacity=None``, between threads.
``send_after_disconnect``, ``recv_after_disconnect``
    The errors are ``Closed`` and ``Drained``.
``recv_in_send``, ``drop_unreceived``
    A channel that is freed also frees its items; between threads, no put runs code that belongs to an item.

The following cases are left out:

``zero.rs``, and names that begin with ``zero`` elsewhere
    flowchan has no rendezvous channels; ``docs/channels.md`` gives the reason.
``after.rs``, ``tick.rs``, ``never.rs``
    ``timeout=`` replaces a channel that yields after some time; a channel without writers never yields.
``same_channel.rs``
    Python's ``is`` compares channels.
``mpsc.rs``, ``golang.rs``
    They repeat the tests under the names of the standard library and of Go; Go has its own file here.
``panic_on_drop``, ``stack_overflow``
    They are specific to Rust.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
from executors import Thing
from support.waiting import wait_blocked

from flowchan import Channel, Closed, Drained, Empty, Full, select

across = pytest.mark.parametrize("across", ["threads", "processes"])
kinds = pytest.mark.parametrize("kind", ["array", "list"])


def made(kind: str, capacity: int = 64) -> Channel[Any]:
    return Channel(capacity if kind == "array" else None)


# --- array.rs, list.rs ---


@kinds
def test_one_item_goes_in_and_comes_out(kind: str) -> None:
    ch = made(kind, 1)
    ch.put(7)
    assert ch.get_nowait() == 7
    ch.put(8)
    assert ch.get() == 8
    for wait in (ch.get_nowait, lambda: ch.get(timeout=0.01)):
        with pytest.raises(Empty):
            wait()


def test_capacity() -> None:
    for capacity in range(1, 10):
        assert Channel(capacity).capacity == capacity
    assert "None" in repr(Channel(None))


@kinds
def test_len_empty_full_and_len(kind: str, go: Any) -> None:
    ch = made(kind, 2)
    assert len(ch) == 0
    ch.put(0)
    assert len(ch) == 1
    ch.put(1)
    assert len(ch) == 2
    if kind == "array":
        with pytest.raises(Full):
            ch.put_nowait(2)
    ch.get()
    assert len(ch) == 1
    ch.close()
    reader = go(lambda: list(ch))
    assert reader.result() == [1]
    assert len(ch) == 0


@kinds
def test_try_recv_and_recv(kind: str, go: Any) -> None:
    ch = made(kind)
    with pytest.raises(Empty):
        ch.get_nowait()
    reader = go(lambda: [ch.get(), ch.get()])
    wait_blocked(ch, readers=1)
    ch.put_many([7, 8])
    assert reader.result() == [7, 8]
    ch.close()
    for get in (ch.get, ch.get_nowait):
        with pytest.raises(Drained):
            get()


@kinds
def test_recv_timeout(kind: str, go: Any) -> None:
    ch = made(kind)
    with pytest.raises(Empty):
        ch.get(timeout=0.01)
    reader = go(lambda: ch.get(timeout=60))
    wait_blocked(ch, readers=1)
    ch.put(7)
    assert reader.result() == 7
    ch.close()
    with pytest.raises(Drained):
        ch.get(timeout=60)


@across
def test_try_send_send_and_send_timeout(across: Any, go: Any) -> None:
    ch = Channel[int](1, across=across)
    ch.put_nowait(1)
    with pytest.raises(Full):
        ch.put_nowait(2)
    with pytest.raises(Full):
        ch.put(3, timeout=0.01)
    writer = go(lambda: ch.put(4, timeout=60))
    wait_blocked(ch, writers=1)
    assert [ch.get(), ch.get()] == [1, 4]
    writer.result()
    ch.close()
    for put in (ch.put, ch.put_nowait):
        with pytest.raises(Closed):
            put(5)


@across
def test_send_after_disconnect(across: Any) -> None:
    """The last receiver has closed."""
    ch = Channel[int](across=across)
    first, second = ch.reader(), ch.reader()
    ch.put(1)
    first.close()
    ch.put(2)
    second.close()
    for put in (ch.put, ch.put_nowait, lambda item: ch.put(item, timeout=60)):
        with pytest.raises(Closed):
            put(3)


@across
def test_recv_after_disconnect(across: Any) -> None:
    ch = Channel[int](across=across)
    with ch.writer() as writer:
        writer.put_many([1, 2, 3])
    assert [ch.get(), ch.get(), ch.get()] == [1, 2, 3]
    with pytest.raises(Drained):
        ch.get()


@across
def test_disconnect_wakes_sender_and_receiver(across: Any, go: Any) -> None:
    full, empty = Channel[int](1, across=across), Channel[int](1, across=across)
    full.put(0)

    def put() -> str:
        try:
            full.put(1)
        except Closed:
            return "closed"
        return "put"

    reader, writer = full.reader(), empty.writer()
    peers = go(put), go(lambda: list(empty))
    wait_blocked(full, writers=1)
    wait_blocked(empty, readers=1)
    reader.close()
    writer.close()
    assert [peer.result() for peer in peers] == ["closed", []]


@across
@pytest.mark.parametrize("parties", [1, 4], ids=["spsc", "mpmc"])
def test_spsc_and_mpmc(across: Any, parties: int, go: Any) -> None:
    ch = Channel[int](3, across=across)
    readers = [go(lambda: Counter(ch)) for _ in range(parties)]
    writers = [go(ch.put_many, range(400)) for _ in range(parties)]
    for writer in writers:
        writer.result()
    ch.close()
    got = sum((reader.result() for reader in readers), Counter())
    assert got == dict.fromkeys(range(400), parties)


def test_stress_oneshot(go: Any) -> None:
    for _ in range(100):
        ch = Channel[int](1)
        reader = go(ch.get)
        ch.put(0)
        assert reader.result() == 0


@kinds
def test_stress_iter(kind: str, go: Any) -> None:
    """Answers that are already in the channel can be read without a wait."""
    requests, answers = made(kind, 100), made(kind, 100)

    def serve() -> None:
        for _ in requests:
            answers.put(1)
        answers.close()

    go(serve)
    for _ in range(50):
        requests.put(None)
    requests.close()
    assert sum(answers) == 50


def test_stress_timeout_two_threads(go: Any) -> None:
    ch = Channel[int](2)

    def put() -> None:
        for number in range(200):
            while True:
                try:
                    ch.put(number, timeout=0.001)
                    break
                except Full:
                    continue

    def get() -> list[int]:
        found: list[int] = []
        while len(found) < 200:
            try:
                found.append(ch.get(timeout=0.001))
            except Empty:
                continue
        return found

    go(put)
    assert go(get).result() == list(range(200))


@kinds
def test_drops(kind: str) -> None:
    """The test includes ``drop_unreceived``."""
    ch, things = made(kind), [Thing() for _ in range(20)]
    ch.put_many(things)
    gone = [weakref.ref(thing) for thing in things]
    del things
    for _ in range(5):
        ch.get()
    assert [ref() is None for ref in gone] == [True] * 5 + [False] * 15
    del ch
    gc.collect()
    assert all(ref() is None for ref in gone)


@kinds
def test_linearizable(kind: str, go: Any) -> None:
    """A thread that has put an item never finds the channel empty."""
    ch = made(kind, 4)

    def both() -> None:
        for _ in range(300):
            ch.put(0)
            ch.get_nowait()

    for peer in [go(both) for _ in range(4)]:
        peer.result()
    assert len(ch) == 0


@across
def test_fairness(across: Any) -> None:
    """The limits are eight standard deviations from the mean."""
    first, second = Channel[int](1_000, across=across), Channel[int](1_000, across=across)
    for ch in (first, second):
        ch.put_many(range(600))
    chosen = sum(select([first, second]).channel is first for _ in range(600))
    assert 200 < chosen < 400


def test_fairness_duplicates() -> None:
    ch = Channel[int](1_000)
    ch.put_many(range(500))
    assert [select([ch, ch, ch]).item for _ in range(500)] == list(range(500))


@across
def test_many_channels_pass_through_channels(across: Any, go: Any) -> None:
    ch = Channel[Any](1, across=across)

    def put() -> None:
        last = ch
        for _ in range(20):
            following = Channel[Any](1, across=across)
            last.put(following)
            last = following
        last.close()

    go(put)
    last, links = ch, 0
    for _ in range(20):
        last = last.get()
        links += 1
    assert (links, list(last)) == (20, [])


# --- iter.rs ---


def test_nested_recv_iter_and_recv_iter_break(go: Any) -> None:
    ch, total = Channel[int](), Channel[int]()

    def add() -> None:
        found = 0
        for number in ch:
            if found > 5:
                break
            found += number
        total.put(found)

    go(add)
    ch.put_many([3, 1, 2])
    ch.close()
    assert total.get() == 6


def test_recv_try_iter(go: Any) -> None:
    ch = Channel[int]()
    ch.put_many([1, 2, 3])
    assert ch.get_many(100) == [1, 2, 3]
    with pytest.raises(Empty):
        ch.get_nowait()


def test_recv_into_iter() -> None:
    """Python does not distinguish owned from borrowed iterators."""
    ch = Channel[int]()
    iterator = iter(ch)
    ch.put_many([1, 2])
    ch.close()
    assert [next(iterator), next(iterator)] == [1, 2]
    with pytest.raises(StopIteration):
        next(iterator)

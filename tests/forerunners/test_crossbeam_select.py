"""Test ``select`` with the cases from crossbeam-channel's tests of ``Select``.

Each test has the name of the original test but none of its code. The original files are ``select.rs`` and
``ready.rs``; the cases for channels are in ``test_crossbeam.py``.

The following cases differ from the originals:

``ready.rs``
    ``select(ready=…)`` reports a channel from which ``get`` would not wait. ``put_nowait`` checks for room
    and puts in one call.
``disconnected``
    The errors are ``Closed`` and ``Drained``.
``default``, ``timeout``
    ``timeout=0`` and ``timeout=`` raise ``NothingReady``.

The following cases are left out:

``select_macro.rs``
    It repeats the tests with a macro.
``forget_select_*``, ``uncompleted_select_zero``
    They are specific to Rust.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support.waiting import wait_blocked
from test_crossbeam import across

from flowchan import Channel, Closed, Drained, Empty, NothingReady, Selected, select

# --- select.rs ---


@across
def test_smoke1_and_smoke2(across: Any) -> None:
    first, second, *others = (Channel[int](across=across) for _ in range(5))
    first.put(1)
    assert select([first, second]) == Selected(first, 1, put=False)
    second.put(2)
    assert select([first, second, *others]) == Selected(second, 2, put=False)


@across
def test_disconnected(across: Any, go: Any) -> None:
    """``select`` reports a closed channel in ``ready=``, and skips any other closed channel."""
    first, second = Channel[int](across=across), Channel[int](across=across)
    first.close()
    second.put(2)
    assert select([first, second]).item == 2
    assert select([second], ready=[first]) == Selected(first, None, put=False)
    waiting = go(lambda: select([], ready=[second]).channel is second)
    wait_blocked(second, readers=1)
    second.close()
    assert waiting.result()


@across
@pytest.mark.parametrize("timeout", [0, 0.01], ids=["default", "timeout"])
def test_default_and_timeout(across: Any, timeout: float) -> None:
    first, second = Channel[int](1, across=across), Channel[int](1, across=across)
    second.put(0)
    with pytest.raises(NothingReady):
        select([first], [(second, 1)], timeout=timeout)
    first.put(3)
    assert select([first], [(second, 1)], timeout=timeout).item == 3


@across
def test_default_when_disconnected(across: Any) -> None:
    ch = Channel[int](across=across)
    ch.close()
    with pytest.raises(Drained):
        select([ch], timeout=0)
    with pytest.raises(Closed):
        select(puts=[(ch, 1)], timeout=0)
    assert select(ready=[ch], timeout=0).channel is ch


@across
def test_unblocks_and_both_ready(across: Any, go: Any) -> None:
    first, second = Channel[int](1, across=across), Channel[int](1, across=across)
    waiting = go(lambda: select([first, second]).item)
    wait_blocked(first, readers=1)
    second.put(2)
    assert waiting.result() == 2
    second.put(1)
    waiting = go(lambda: select([first], [(second, 3)], timeout=60))
    wait_blocked(first, readers=1)
    assert second.get() == 1
    assert waiting.result() == Selected(second, 3, put=True)
    first.put(4)
    done = select([first, second])
    left = select([first, second])
    assert {done.item, left.item} == {3, 4}


def test_loop_try(go: Any) -> None:
    for _ in range(20):
        first, second, stop = Channel[int](1), Channel[int](1), Channel[int](1)
        first.put(1)

        def turns(gets: Any, puts: Any, stop: Channel[int] = stop) -> Selected | None:
            while not stop.closed:
                try:
                    return select(gets, puts, timeout=0)
                except NothingReady:
                    continue
            return None

        peers = go(turns, [first], []), go(turns, [], [(second, 2)])
        assert peers[0].result().item == 1  # type: ignore[union-attr]
        assert peers[1].result().put
        stop.close()


def test_cloning_and_preflight(go: Any) -> None:
    """Opening and closing a port disturbs no waiter, and items from before the last close arrive."""
    ch, done = Channel[int](1), Channel[int](1)
    with ch.writer() as writer:
        waiting = go(lambda: select([ch, done]).item)
        wait_blocked(ch, readers=1)
        for _ in range(5):
            ch.writer().close()
        writer.put(1)
        assert waiting.result() == 1
        writer.put(2)
    assert select([ch, done]).item == 2


@across
def test_duplicate_operations_and_nesting(across: Any) -> None:
    ch = Channel[int](1, across=across)
    assert select([ch, ch], [(ch, 0), (ch, 0)]).put
    assert select([ch, ch], [(ch, 1)], timeout=0).item == 0
    while select([ch], [(ch, 2)]).put:
        assert select([ch, ch]).item == 2
        break
    assert len(ch) == 0


@across
def test_stress_recv_send_and_mixed(across: Any, go: Any) -> None:
    first, second, answers = (Channel[int](2, across=across) for _ in range(3))

    def put() -> None:
        for number in range(200):
            first.put(number)
            select(puts=[(second, number)])
            answers.get()

    go(put)
    for number in range(200):
        assert {select([first, second]).item, select([first, second]).item} == {number}
        select(puts=[(answers, number)])


@across
def test_send_recv_same_channel_and_matching(across: Any, go: Any) -> None:
    ch = Channel[int](1, across=across)
    done = [go(lambda n=n: select([ch], [(ch, n)]).put) for n in range(20)]
    assert sum(1 if one.result() else -1 for one in done) == len(ch)


@pytest.mark.parametrize("timeout", [0, 0.01], ids=["try", "timeout"])
def test_linearizable_try_and_linearizable_timeout(timeout: float, go: Any) -> None:
    """A select finds the item that its own thread has put, even while other threads take items."""
    ch = Channel[int](4)

    def both() -> None:
        for _ in range(200):
            ch.put(0)
            assert select([ch], timeout=timeout).item == 0

    for peer in [go(both) for _ in range(4)]:
        peer.result()


# --- ready.rs ---


@across
def test_ready_smoke_and_duplicate_operations(across: Any) -> None:
    first, second = Channel[int](across=across), Channel[int](across=across)
    first.put(1)
    for _ in range(3):
        assert select(ready=[first, second, first]).channel is first
    assert first.get_nowait() == 1


@across
def test_ready_default_when_disconnected_and_disconnected(across: Any) -> None:
    ch = Channel[int](across=across)
    with pytest.raises(NothingReady):
        select(ready=[ch], timeout=0)
    ch.close()
    assert select(ready=[ch], timeout=0).channel is ch


@across
def test_ready_unblocks_and_stress_recv(across: Any, go: Any) -> None:
    """Threads that wait for the channel to be ready get all its items and lose none."""
    ch = Channel[int](3, across=across)

    def take() -> Counter[int]:
        found = Counter[int]()
        while True:
            select(ready=[ch])
            try:
                found[ch.get_nowait()] += 1
            except Drained:
                return found
            except Empty:
                continue  # another thread has taken the item

    takers = [go(take) for _ in range(3)]
    wait_blocked(ch, readers=3)
    ch.put_many(range(300))
    ch.close()
    assert sum((taker.result() for taker in takers), Counter()) == dict.fromkeys(range(300), 1)


@across
def test_ready_fairness1(across: Any) -> None:
    """The limits are eight standard deviations from the mean."""
    first, second = Channel[int](1, across=across), Channel[int](1, across=across)
    first.put(1)
    second.put(2)
    assert 200 < sum(select(ready=[first, second]).channel is first for _ in range(600)) < 400

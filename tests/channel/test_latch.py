"""Test the latch that threads and coroutines can wait for."""

from __future__ import annotations

import asyncio

import pytest
from support.peers import ThreadPeer
from support.waiting import wait_blocked, wait_until

from flowchan.channel.latch import Latch


def test_wait_returns_whether_the_latch_is_set() -> None:
    latch = Latch()
    assert not latch.is_set()
    assert latch.wait(0) is False
    latch.set()
    latch.set()  # setting it again has no effect
    assert latch.is_set()
    assert latch.wait(0) is True
    assert latch.wait() is True


def test_setting_the_latch_wakes_all_threads() -> None:
    latch = Latch()
    waiters = [ThreadPeer(latch.wait) for _ in range(3)]
    wait_blocked(latch._channel, readers=3)
    latch.set()
    assert [waiter.result() for waiter in waiters] == [True] * 3


def test_setting_the_latch_wakes_a_coroutine() -> None:
    latch = Latch()
    waiter = ThreadPeer(asyncio.run, latch.awaited())
    wait_until(lambda: latch._channel.stats().awaiting == 1)
    latch.set()
    assert waiter.result() is None
    assert asyncio.run(latch.awaited()) is None


def test_item_in_the_channel_of_a_latch_is_a_bug() -> None:
    latch = Latch()
    latch._channel.put(None)
    with pytest.raises(AssertionError, match="never holds an item"):
        latch.wait()

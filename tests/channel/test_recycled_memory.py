"""A writer of large items that outpaces its readers waits briefly for recycled memory."""

from __future__ import annotations

import numpy as np

from flowchan import Channel

ITEM = np.ones(1 << 20, np.uint8)


def test_writer_of_an_unread_channel_never_waits_for_memory() -> None:
    channel = Channel[np.ndarray](64, across="processes")
    for _ in range(10):
        channel.put(ITEM)
    assert channel.stats().write_wait == 0


def test_put_waits_briefly_and_once_for_memory_that_readers_hold() -> None:
    """After one put has waited, later puts use new memory at once until readers have finished more items."""
    channel = Channel[np.ndarray](64, across="processes")
    waits = []
    kept = []
    for _ in range(2):
        channel.put(ITEM)
        kept.append(channel.get())  # the array is a view, so its memory cannot be recycled
        for _ in range(2):
            channel.put(ITEM)
            waits.append(channel.stats().write_wait)
    first, second, third, fourth = waits
    assert 0 < first == second < third == fourth


def test_put_nowait_uses_new_memory_at_once() -> None:
    channel = Channel[np.ndarray](64, across="processes")
    channel.put(ITEM)
    kept = channel.get()
    channel.put_nowait(ITEM)
    assert channel.stats().write_wait == 0
    assert (kept == channel.get()).all()

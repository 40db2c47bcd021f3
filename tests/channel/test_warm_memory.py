"""Who puts large items faster than they are read waits a moment for memory that was used before."""

from __future__ import annotations

import numpy as np

from flowchan import Channel

ITEM = np.ones(1 << 20, np.uint8)


def test_who_fills_a_channel_that_nobody_reads_never_waits() -> None:
    channel = Channel[np.ndarray](64, across="processes")
    for _ in range(10):
        channel.put(ITEM)
    assert channel.stats().write_wait == 0


def test_a_wait_for_memory_that_does_not_come_back_is_short_and_the_only_one() -> None:
    """Until others have finished more."""
    channel = Channel[np.ndarray](64, across="processes")
    waits = []
    kept = []
    for _ in range(2):
        channel.put(ITEM)
        kept.append(channel.get())  # its memory is in view, so that nobody gets it
        for _ in range(2):
            channel.put(ITEM)
            waits.append(channel.stats().write_wait)
    first, second, third, fourth = waits
    assert 0 < first == second < third == fourth


def test_a_put_that_does_not_wait_takes_new_memory_at_once() -> None:
    channel = Channel[np.ndarray](64, across="processes")
    channel.put(ITEM)
    kept = channel.get()
    channel.put_nowait(ITEM)
    assert channel.stats().write_wait == 0
    assert (kept == channel.get()).all()

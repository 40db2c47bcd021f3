"""Kernels for aarch64 have pages of 4, 16 or 64 KB, and a mapping must start at a page."""

from __future__ import annotations

from operator import methodcaller
from pathlib import Path
from pickle import PickleBuffer
from typing import Any

from flowchan import Channel

LARGEST = 1 << 16


def mapped_from() -> set[int]:
    """Return the offsets where this process's mappings of channel memory start."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[2], 16) for line in maps if "memfd:flowchan" in line}


class Writable:
    """An item that arrives as writable bytes, in a separate mapping."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __reduce_ex__(self, _: object) -> tuple[Any, ...]:
        return methodcaller("private"), (PickleBuffer(bytes(self.size)),)


def test_channel_mappings_are_aligned_to_64_kb() -> None:
    """Check slots, blocks and writable bytes while the channel grows."""
    channel: Channel[Any] = Channel(5000, across="processes")
    for count in (100, 1000, 4000):
        channel.put_many(range(count))
        assert channel.get_many(count) == list(range(count))
    kept = []
    for size in (20_000, 100_000, 3_000_000, 100_001):
        channel.put(Writable(size))
        kept.append(channel.get())
    begin = mapped_from()
    assert len(begin) > 4
    assert {at % LARGEST for at in begin} == {0}

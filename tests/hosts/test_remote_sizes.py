"""Test items of a remote channel that exceed the default ``max_bytes`` of this process (C1)."""

from __future__ import annotations

import os

import pytest
from support.peers import HostPeer

from flowchan import Channel
from flowchan.channel import channel as channels

pytestmark = pytest.mark.usefixtures("impatient")


def test_remote_channel_accepts_items_up_to_its_own_max_bytes(monkeypatch):
    """C1: the channel's ``max_bytes`` is larger than this process's default."""
    channel, back = (Channel(8, across="hosts", max_bytes=1 << 20) for _ in range(2))
    monkeypatch.setattr(channels, "_MOST_BY_DEFAULT", 1 << 16)

    def use():
        channels._MOST_BY_DEFAULT = 1 << 16
        items: list[bytes] = []
        while len(items) < 3:
            items += channel.get_many(3)
        back.put(items[0] * 4)
        return len(items)

    channel.put_many([os.urandom(40_000)] * 3)
    assert HostPeer(use).result() == 3
    assert len(back.get()) == 160_000

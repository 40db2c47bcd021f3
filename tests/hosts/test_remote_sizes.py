"""Test items of a remote channel that are large for this process (C1)."""

from __future__ import annotations

import os

import pytest
from support.peers import HostPeer

from flowchan import Channel
from flowchan.channel import channel as channels

pytestmark = pytest.mark.usefixtures("impatient")


def test_items_up_to_the_channels_max_bytes_can_be_requested(monkeypatch):
    """C1: the channel has a larger ``max_bytes`` than the default."""
    channel, back = (Channel(8, across="hosts", max_bytes=1 << 20) for _ in range(2))
    monkeypatch.setattr(channels, "_MOST_BY_DEFAULT", 1 << 16)

    def use():
        channels._MOST_BY_DEFAULT = 1 << 16
        items = channel.get_many(3)
        back.put(items[0] * 4)
        return len(items)

    channel.put_many([os.urandom(40_000)] * 3)
    assert HostPeer(use).result() == 3
    assert len(back.get()) == 160_000

"""Test remote items that are large for the line that carries calls and replies (C1, C9)."""

from __future__ import annotations

import os

import pytest
from support.peers import HostPeer

from flowchan import Channel, Drained
from flowchan.channel import channel as channels
from flowchan.remote import session

pytestmark = pytest.mark.usefixtures("impatient")


def test_request_line_takes_items_up_to_the_channels_max_bytes(monkeypatch):
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


def test_reply_contains_a_bounded_number_of_bytes(monkeypatch):
    """C9: the other items stay in the channel."""
    channel = Channel(64, across="hosts")
    monkeypatch.setattr(session, "TOGETHER", 100)
    items = [b"x" * 60, "y" * 60, [b"z" * 60], 4, 5]
    channel.put_many(items)
    channel.close()

    def use():
        found = []
        try:
            while True:
                found.append(channel.get_many(64))
        except Drained:
            return found

    assert HostPeer(use).result() == [items[:2], items[2:]]


def test_caller_gets_the_error_of_an_oversized_reply(monkeypatch):
    channel = Channel(8, across="hosts")
    monkeypatch.setattr(session, "control_ring", lambda: Channel(64, across="processes", max_bytes=10_000))
    channel.put_many([b"x" * 20_000, "after"])

    def use():
        with pytest.raises(ValueError, match="item must have at most max_bytes=10000"):
            channel.get(timeout=60)
        return channel.get()

    assert HostPeer(use).result() == "after"

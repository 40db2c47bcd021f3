"""Test the limits of a channel that its creator does not set."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from flowchan import Channel, Full
from flowchan.channel.transports import TRANSPORTS

ACROSS = pytest.mark.parametrize(
    ("across", "capacity"), [("threads", 4096), ("processes", 64), ("hosts", 64)]
)


@ACROSS
def test_put_waits_at_the_documented_capacity(across: Any, capacity: int) -> None:
    channel: Channel[int] = Channel(across=across)
    assert channel.capacity == capacity
    channel.put_many(range(capacity))
    with pytest.raises(Full):
        channel.put_nowait(0)


def test_only_channels_that_copy_have_a_limit_of_bytes() -> None:
    limits = {across: Channel[int](across=across).max_bytes for across in TRANSPORTS}
    assert limits["threads"] is None
    assert limits["processes"] == limits["hosts"]
    assert 0 < (limits["hosts"] or 0) <= 16 << 30


@ACROSS
def test_transport_of_a_channel_cannot_be_changed(across: Any, capacity: int) -> None:
    transport = Channel[int](across=across).transport
    assert (str(transport), transport.capacity) == (across, capacity)
    with pytest.raises(dataclasses.FrozenInstanceError):
        transport.capacity = 1  # type: ignore[misc]

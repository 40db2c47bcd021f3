"""Create channels in this program that workers on a pool's hosts can reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowchan.channel.channel import Channel
from flowchan.hosts.host_pool import Pool
from flowchan.remote.channel_server import ChannelServer
from flowchan.transport.tcp import joined


def channel_maker(pool: Pool) -> Callable[[int], Channel[Any]]:
    """Return a function that creates a channel across hosts with a given capacity.

    All these channels share one server. It listens at the address at which the pool's agents reach this
    program, and ends when its last channel is released.
    """
    address = joined((pool.provider.listen_at(), 0))
    return ChannelServer(address, tls=pool.tls, peer_timeout=pool.peer_timeout).make

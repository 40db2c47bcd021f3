"""Create channels of this program that workers in other processes or on other hosts can open."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flowchan.channel.channel import Channel
from flowchan.declare.placements import Placement
from flowchan.hosts.host_pool import Pool
from flowchan.remote.channel_server import ChannelServer
from flowchan.transport.tcp import joined


def channel_maker(placement: Placement) -> Callable[[int], Channel[Any]]:
    """Return a function that creates channels which the workers of a placement can open.

    The function takes the capacity. If the placement is a pool, one server serves all these channels. The
    server listens on the address at which the pool's agents reach this program, and ends when its last
    channel is released.
    """
    if not isinstance(placement, Pool):
        return functools.partial(Channel, across="processes")
    address = joined((placement.provider.listen_at(), 0))
    return ChannelServer(address, tls=placement.tls, peer_timeout=placement.peer_timeout).make

"""Create channels of this program that workers in other processes or on other hosts can open."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from flowchan.channel.channel import Channel
from flowchan.declare.placements import Placement
from flowchan.hosts.host_pool import Pool
from flowchan.remote.channel_server import ChannelServer
from flowchan.transport.tcp import joined, route_to


class Reach(NamedTuple):
    """Describes how hosts reach the program, according to the options of their pool.

    Attributes:
        at: Address of the program.
        tls: True if connections are encrypted.
        peer_timeout: Seconds without a sign of life after which a peer counts as lost.
    """

    at: str
    tls: bool
    peer_timeout: float

    def channel(self, capacity: int) -> Channel[Any]:
        """Make a channel of this process that other hosts can reach.

        The channel listens on this process's address on the route to the program.

        Args:
            capacity: Number of items that the channel can hold.

        Returns:
            The channel.

        Raises:
            OSError: The program's name cannot be resolved within the peer timeout, or no route leads to it.
        """
        address = joined((route_to(self.at, self.peer_timeout), 0))
        return ChannelServer(address, tls=self.tls, peer_timeout=self.peer_timeout).make(capacity)


def reach_of(pool: Pool) -> Reach:
    """Return how the hosts of a pool reach this program."""
    return Reach(pool.provider.listen_at(), pool.tls, pool.peer_timeout)


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

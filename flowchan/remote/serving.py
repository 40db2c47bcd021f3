"""Serve this process's channels across hosts, at the address set with ``serve``."""

from __future__ import annotations

import functools
import os
import threading
from dataclasses import dataclass
from typing import Any

from flowchan.channel.channel import Channel
from flowchan.errors import ChannelError
from flowchan.items.arguments import finite_seconds, flag, refuses_misspelt, secret_bytes
from flowchan.remote.channel_server import ANY_PORT, ChannelServer, chosen
from flowchan.remote.connection import using
from flowchan.remote.remote_channel import make_remote, unpickle_channel
from flowchan.transport import descriptors
from flowchan.transport.addresses import channel_address, mark_of
from flowchan.transport.link_events import PEER_TIMEOUT_S
from flowchan.transport.tcp import split


@dataclass(frozen=True, slots=True)
class Hosted:
    """Address at which a channel of this process can be reached.

    Args:
        server: Server of the channel.
        number: Channel's number at that server.
    """

    server: ChannelServer
    number: int

    @property
    def address(self) -> str:
        """Address of the channel, for ``open_channel``."""
        return channel_address(self.server.address, self.number)

    @property
    def secret(self) -> bytes:
        """Secret that clients must prove to know."""
        return self.server.secret

    @property
    def tls(self) -> bool:
        """True if connections are encrypted."""
        return self.server.tls

    def reduced(self) -> tuple[Any, ...]:
        """Return the value that pickle stores for the channel.

        If the channel is packed as part of an item, count the item.
        """
        parcel = descriptors.now.packing
        sent = parcel is not None and self.server.send(self.number)
        if parcel is not None and sent:
            parcel.counted.append(functools.partial(self.server.item_done, self.number))
        mark = sent and mark_of(self.server.id, self.number)
        return unpickle_channel, (self.address, self.secret, self.server.tls, self.server.id, mark)

    def another(self, capacity: int) -> Channel[Any]:
        """Make another channel with the same owner."""
        server = self.server
        if server.pid == os.getpid():
            return server.make(capacity)
        # A forked child asks its parent for a channel, as any other client does.
        at = server.address, server.secret, server.tls
        with using(*at) as connection:
            return make_remote(connection, *at, capacity)


_lock = threading.Lock()
_settings: dict[str, Any] = {}
_servers: list[ChannelServer] = []


@refuses_misspelt("serve")
def serve(
    address: str = ANY_PORT,
    *,
    secret: bytes | None = None,
    tls: bool = False,
    peer_timeout: float = PEER_TIMEOUT_S,
) -> None:
    """Set the address at which this process's channels across hosts can be reached from now on.

    Args:
        address: Host and port to listen on; port 0 picks any free port (default: ``"127.0.0.1:0"``, for
            programs on this machine only).
        secret: At least 16 bytes that programs on other hosts need (default: 32 random bytes).
        tls: Encrypt and authenticate the traffic with TLS (default: False).
        peer_timeout: Seconds without a message from this program after which clients give up (default: 10).

    Raises:
        TypeError: An argument has the wrong type, or its name is unknown.
        ValueError: An argument is out of range.

    Example:
        >>> from flowchan import Channel, hosts
        >>> hosts.serve("127.0.0.1:0", secret=b"a secret of 16 bytes or more")
        >>> Channel(across="hosts").secret
        b'a secret of 16 bytes or more'
        >>> hosts.serve()  # the defaults again
    """
    split(address)
    flag("serve", "tls", tls)
    if secret is not None:
        secret_bytes("serve", secret)
    peer_timeout = finite_seconds("serve", "peer_timeout", peer_timeout)
    with _lock:
        _settings.update(address=address, secret=secret, tls=tls, peer_timeout=peer_timeout)
        _servers.clear()


def let_in(channel: Channel[Any]) -> Hosted:
    """Register a new channel with a server, so that other programs can reach it."""
    if (server := chosen.get()) is not None:
        number = server.add(channel)
        if number is None:
            raise ChannelError(f"{server!r} has ended and accepts no more channels")
        return Hosted(server, number)
    with _lock:
        number = _servers[0].add(channel) if _servers else None
        if number is None:
            _servers[:] = [ChannelServer(**_settings)]
            number = _servers[0].add(channel)
            assert number is not None
        return Hosted(_servers[0], number)


def _after_fork() -> None:
    """Forget the server in a forked child, because the child lacks the server's thread."""
    global _lock
    _lock = threading.Lock()
    _servers.clear()


os.register_at_fork(after_in_child=_after_fork)

"""Which home the channels across hosts of this process have: one for all, at the address that was said."""

from __future__ import annotations

import functools
import os
import threading
from dataclasses import dataclass
from typing import Any

from flowchan.channel.channel import Channel
from flowchan.errors import ChannelError
from flowchan.items.arguments import finite_seconds, flag, refuses_misspelt, secret_bytes
from flowchan.remote.channel_server import ANYWHERE, ChannelServer, chosen
from flowchan.remote.connection import using
from flowchan.remote.remote_channel import arrive, make_elsewhere
from flowchan.transport import descriptors
from flowchan.transport.addresses import channel_address, mark_of
from flowchan.transport.link_events import PEER_TIMEOUT_S
from flowchan.transport.tcp import split


@dataclass(frozen=True, slots=True)
class Hosted:
    """Where a channel of this process is reached. ``number``: which of its home's it is."""

    home: ChannelServer
    number: int

    @property
    def address(self) -> str:
        return channel_address(self.home.address, self.number)

    @property
    def secret(self) -> bytes:
        return self.home.secret

    def reduced(self) -> tuple[Any, ...]:
        parcel = descriptors.now.packing
        sent = parcel is not None and self.home.send(self.number)
        if parcel is not None and sent:
            parcel.counted.append(functools.partial(self.home.come, self.number))
        mark = sent and mark_of(self.home.id, self.number)
        return arrive, (self.address, self.secret, self.home.tls, self.home.id, mark)

    def another(self, capacity: int) -> Channel[Any]:
        home = self.home
        if home.pid == os.getpid():
            return home.make(capacity)
        at = home.address, home.secret, home.tls  # a forked child makes channels there as all others do
        with using(*at) as connection:
            return make_elsewhere(connection, *at, capacity)


_lock = threading.Lock()
_settings: dict[str, Any] = {}
_homes: list[ChannelServer] = []  # at most one


@refuses_misspelt("serve")
def serve(
    address: str = ANYWHERE,
    *,
    secret: bytes | None = None,
    tls: bool = False,
    peer_timeout: float = PEER_TIMEOUT_S,
) -> None:
    """Set the address of the channels across hosts that this process makes from now on.

    Args:
        address: Host and port to listen at; port 0 is any free port (default: ``"127.0.0.1:0"``).
        secret: At least 16 bytes that programs on other hosts must know (default: 32 random bytes).
        tls: Whether to encrypt and authenticate the traffic with TLS (default: False).
        peer_timeout: Seconds after which a program that hears nothing from this one gives its channels up.

    Raises:
        TypeError: An argument has the wrong type or an unknown name.
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
        _homes.clear()


def let_in(channel: Channel[Any]) -> Hosted:
    """Lets others reach a new channel."""
    if (home := chosen.get()) is not None:
        number = home.add(channel)
        if number is None:
            raise ChannelError(f"{home!r} has ended, and takes no more of them")
        return Hosted(home, number)
    with _lock:
        number = _homes[0].add(channel) if _homes else None
        if number is None:
            _homes[:] = [ChannelServer(**_settings)]
            number = _homes[0].add(channel)
            assert number is not None
        return Hosted(_homes[0], number)


def _begin_anew() -> None:
    """A forked child has none of its parent's threads, so a home of its own."""
    global _lock
    _lock = threading.Lock()
    _homes.clear()


os.register_at_fork(after_in_child=_begin_anew)

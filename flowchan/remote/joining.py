"""Clients of a server: each gets a pair of channels at the server's home, one for each direction."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flowchan.channel.channel import Channel, In, Out
from flowchan.errors import Closed, HostError
from flowchan.items.arguments import secret_bytes
from flowchan.remote.channel_server import ChannelServer
from flowchan.remote.connection import using
from flowchan.remote.messages import sealed, to_put
from flowchan.remote.remote_channel import remote_channel
from flowchan.remote.session import ClientSession
from flowchan.transport.tcp import split

POLL_INTERVAL_S = 0.005
"""Seconds between two looks at who has read all."""


@dataclass(frozen=True, slots=True)
class JoinedClient:
    """A client as its server has it. ``id``: its number, from 1 on."""

    id: int
    tag: str
    inbox: In[Any]
    outbox: Out[Any]
    link: Any


class Clients:
    """Lets clients join at an address. ``came`` hears of each. Raises ``ValueError`` or ``OSError``."""

    def __init__(
        self,
        address: str,
        secret: bytes | None,
        tls: bool,
        capacity: int,
        came: Callable[[JoinedClient], None],
    ) -> None:
        split(address)
        if secret is not None:
            secret_bytes("Server", secret)
        self._capacity, self._came = capacity, came
        self._closed = False
        self._joined: list[tuple[ClientSession, Channel[Any], Channel[Any]]] = []
        self._home = ChannelServer(address, secret, tls, kept=True)
        self._home.asked["join"] = self._join
        self._home.left = self._left
        self.address, self.secret = self._home.address, self._home.secret
        self._number = 0

    def _join(self, guest: ClientSession, tag: str) -> tuple[int, str, str]:
        """In the thread of the home."""
        if self._closed:
            raise Closed(f"the server at {self.address} was closed")
        up: Channel[Any] = self._home.make(self._capacity)
        down: Channel[Any] = self._home.make(self._capacity)
        self._number += 1
        self._joined.append((guest, up, down))
        up._name = f"from client {self._number}"
        down._name = f"to client {self._number}"
        guest.keep(up)
        guest.keep(down)
        self._came(JoinedClient(self._number, tag, up.reader(), down.writer(), guest.link))
        return self._number, up.address, down.address

    def _left(self, guest: ClientSession) -> None:
        """A client that goes before it has opened its end leaves nothing that tells of it."""
        for one, up, _ in self._joined:
            if one is guest and not up.closed:
                up.abort(HostError(f"a client of the server at {self.address} has gone", self.address))
        self._joined = [joined for joined in self._joined if joined[0] is not guest]

    def close(self, timeout: float) -> None:
        """Lets nobody join any more. Returns when all have read what was sent to them or are gone, or after
        ``timeout`` seconds."""
        self._closed = True
        give_up, pause = time.monotonic() + timeout, threading.Event()
        while time.monotonic() < give_up and not all(guest.has_read(down) for guest, _, down in self._joined):
            pause.wait(POLL_INTERVAL_S)
        self._home.close()
        self._joined.clear()


def join(
    address: str, secret: bytes, tls: bool, timeout: float, tag: str
) -> tuple[int, In[Any], Out[Any], Any]:
    """As a client: its number, what it reads, what it writes, and the link."""
    split(address)
    with using(address, secret, tls, timeout) as connection:
        id, up, down = connection.ask(0, "join", tag)
        to_read, to_write = (remote_channel(one, secret, tls, timeout) for one in (down, up))
        return id, to_read.reader(), to_write.writer(), connection.link


def sealed_once(message: Any) -> Any:
    """To be put into many channels, encoded once."""
    return to_put(sealed(message))

"""Let clients join a :class:`Server`.

For each client, the server owns one channel in each direction.
"""

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
from flowchan.remote.messages import for_put, sealed
from flowchan.remote.remote_channel import remote_channel
from flowchan.remote.session import ClientSession
from flowchan.transport.tcp import split

POLL_INTERVAL_S = 0.005
"""Seconds between checks of whether the clients have read everything."""


@dataclass(frozen=True, slots=True)
class JoinedClient:
    """Server's handle of a client that has joined.

    Args:
        id: Number of the client, from 1.
        tag: Tag that the client chose.
        inbox: Port that reads the client's messages.
        outbox: Port that writes to the client.
        link: Link to the client.
    """

    id: int
    tag: str
    inbox: In[Any]
    outbox: Out[Any]
    link: Any


class Clients:
    """Listener through which clients join a server.

    Args:
        address: Address to listen on.
        secret: Secret of the server, which clients must prove to know (default: 32 random bytes).
        tls: Encrypt the connections.
        capacity: Capacity of each channel.
        on_join: Called with each client that joins.

    Raises:
        ValueError: The address or the secret is invalid.
        OSError: The server cannot listen on the address.
    """

    def __init__(
        self,
        address: str,
        secret: bytes | None,
        tls: bool,
        capacity: int,
        on_join: Callable[[JoinedClient], None],
    ) -> None:
        split(address)
        if secret is not None:
            secret_bytes("Server", secret)
        self._capacity, self._on_join = capacity, on_join
        self._closed = False
        self._joined: list[tuple[ClientSession, Channel[Any], Channel[Any]]] = []
        self._server = ChannelServer(address, secret, tls, kept=True)
        self._server.requests["join"] = self._join
        self._server.client_left = self._left
        self.address, self.secret = self._server.address, self._server.secret
        self._number = 0

    def _join(self, session: ClientSession, tag: str) -> tuple[int, str, str]:
        """Make the two channels for a new client. The channel server's thread calls this method."""
        if self._closed:
            raise Closed(f"the server at {self.address} was closed")
        up: Channel[Any] = self._server.make(self._capacity)
        down: Channel[Any] = self._server.make(self._capacity)
        self._number += 1
        self._joined.append((session, up, down))
        up._name = f"from client {self._number}"
        down._name = f"to client {self._number}"
        session.keep(up)
        session.keep(down)
        self._on_join(JoinedClient(self._number, tag, up.reader(), down.writer(), session.link))
        return self._number, up.address, down.address

    def _left(self, session: ClientSession) -> None:
        """Abort a client's inbound channel if the client left before it opened its end of the channel.

        The loss of such a client does not break the channel, because the client has no port.
        """
        for one, up, _ in self._joined:
            if one is session and not up.closed:
                up.abort(HostError(f"a client of the server at {self.address} has left", self.address))
        self._joined = [joined for joined in self._joined if joined[0] is not session]

    def close(self, timeout: float) -> None:
        """Stop accepting clients, and wait until all of them have read their items.

        Args:
            timeout: Seconds to wait for clients that have neither left nor read everything.
        """
        self._closed = True
        give_up, pause = time.monotonic() + timeout, threading.Event()
        while time.monotonic() < give_up and not all(
            session.has_read(down) for session, _, down in self._joined
        ):
            pause.wait(POLL_INTERVAL_S)
        self._server.close()
        self._joined.clear()


def join(
    address: str, secret: bytes, tls: bool, timeout: float, tag: str
) -> tuple[int, In[Any], Out[Any], Any]:
    """Join a server as a client.

    Args:
        address: Host and port of the server.
        secret: Secret of the server.
        tls: True if the connection is encrypted.
        timeout: Seconds to wait for the server.
        tag: Name of this client, which the server shows.

    Returns:
        The client's number, reading port, writing port and link.
    """
    split(address)
    with using(address, secret, tls, timeout) as connection:
        id, up, down = connection.ask(0, "join", tag)
        to_read, to_write = (remote_channel(one, secret, tls, timeout) for one in (down, up))
        return id, to_read.reader(), to_write.writer(), connection.link


def sealed_once(message: Any) -> Any:
    """Encode a message once, for several channels."""
    return for_put(sealed(message))

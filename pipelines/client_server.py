"""Provide a server for clients on any host. A pair of channels connects each client to the server."""

from __future__ import annotations

import collections
import contextlib
import math
import threading
import time
from dataclasses import dataclass
from typing import Any

from flowchan import Broken, Channel, Closed, Empty, In, NothingReady, Out, select
from flowchan.items.arguments import flag, refuses_misspelt
from flowchan.pipelines.fill_into import fill
from flowchan.public import public
from flowchan.remote.joining import Clients, JoinedClient, join, sealed_once

LATE = 300.0
"""Default time in seconds that a client waits for its server, and a server for its clients."""
CAPACITY = 1024


@public
@dataclass(frozen=True, slots=True)
class Traffic:
    """Statistics of the connection between a client and its server.

    All clients in one process share a connection and therefore these counts.

    Attributes:
        sent: Bytes sent by the caller's side.
        received: Bytes received by the caller's side.
        breaks: Number of times that the connection was lost and restored.
        round_trip: Round-trip time in seconds.

    Example:
        >>> from flowchan.pipelines import Client, Server
        >>> with Server() as server, Client(server.address, server.secret) as client:
        ...     client.send("hello")
        ...     message, sender = server.recv_any()
        ...     traffic = client.stats()
        >>> traffic.sent > 0, traffic.breaks
        (True, 0)
    """

    sent: int
    received: int
    breaks: int
    round_trip: float


class _End:
    """One side of the pair of channels between a client and its server.

    ``id`` is the client's number, counted from 1 in order of arrival, and ``tag`` is its label.
    """

    def __init__(self, kind: str, id: int, tag: str, inbox: In[Any], outbox: Out[Any], link: Any) -> None:
        self.id, self.tag = id, tag
        self._kind = kind
        self._inbox, self._outbox, self._link = inbox, outbox, link
        self._unread: collections.deque[Any] = collections.deque()

    def __repr__(self) -> str:
        return f"<{self._kind} {self.id}, tag {self.tag!r}>"

    def send(self, message: Any, timeout: float | None = None) -> None:
        """Send a message.

        Args:
            message: Any value that a channel between processes accepts.
            timeout: Maximum seconds to wait for room (default: no limit).

        Raises:
            Closed: The peer has left.
            Broken: The peer has died.
            Full: ``timeout`` expired.

        Example:
            >>> from flowchan.pipelines import Client, Server
            >>> with Server() as server, Client(server.address, server.secret) as client:
            ...     client.send("hello")
            ...     server.recv_any()[0]
            'hello'
        """
        self._outbox.put(message, timeout)

    def recv(self, timeout: float | None = None, *, into: Any = None) -> Any:
        """Receive the next message.

        Args:
            timeout: Maximum seconds to wait (default: no limit).
            into: Tensor or array to fill with the message. ``into`` must have the shape and type of the
                message.

        Returns:
            The message, or ``into``.

        Raises:
            Drained: The peer has closed its side, and all its messages have been read.
            Broken: The peer has died.
            Empty: ``timeout`` expired.
            ValueError: ``into`` does not match the message. The next call returns that message.

        Example:
            >>> from flowchan.pipelines import Client, Server
            >>> with Server() as server, Client(server.address, server.secret) as client:
            ...     server.clients(1)[0].send("hello")
            ...     client.recv(timeout=60)
            'hello'
        """
        message = self._unread.popleft() if self._unread else self._inbox.get(timeout)
        if into is None:
            return message
        try:
            fill("recv", into, message)
        except BaseException:
            self._unread.appendleft(message)
            raise
        return into

    def recv_nowait(self) -> Any:
        """Return the next message if one has already arrived.

        Returns:
            The message.

        Raises:
            Empty: No message has arrived.
            Drained: The peer has closed its side, and all its messages have been read.
            Broken: The peer has died.

        Example:
            >>> from flowchan import Empty
            >>> from flowchan.pipelines import Client, Server
            >>> with Server() as server, Client(server.address, server.secret) as client:
            ...     try:
            ...         client.recv_nowait()
            ...     except Empty:
            ...         print("nothing yet")
            nothing yet
        """
        return self._unread.popleft() if self._unread else self._inbox.get_nowait()

    def stats(self) -> Traffic:
        """Return the statistics of the connection so far.

        Returns:
            The counts of bytes and breaks, and the round-trip time.

        Example:
            >>> from flowchan.pipelines import Client, Server
            >>> with Server() as server, Client(server.address, server.secret) as client:
            ...     client.stats().breaks
            0
        """
        state = self._link.state()
        return Traffic(state["bytes_out"], state["bytes_in"], state["breaks"], state["round_trip"])

    def close(self) -> None:
        """Close this side.

        The peer can still read the messages sent so far. After the last message, the peer gets ``Drained``.

        Example:
            >>> from flowchan import Drained
            >>> from flowchan.pipelines import Client, Server
            >>> with Server() as server, Client(server.address, server.secret) as client:
            ...     server.clients(1)[0].close()
            ...     try:
            ...         client.recv()
            ...     except Drained:
            ...         print("no more messages")
            no more messages
        """
        self._outbox.close()
        self._inbox.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@public
class Client(_End):
    """Connection to a :class:`Server`. The client may be started before the server.

    Args:
        address: Address of the server (``server.address``).
        secret: Secret of the server (``server.secret``).
        tag: Label by which the server can select its clients (default: empty).
        tls: True to use TLS; the server must use the same setting (default: False).
        timeout: Maximum seconds to wait for the server (default: 300).

    Raises:
        HostError: No server with this secret answered within ``timeout`` seconds.

    Example:
        >>> from flowchan.pipelines import Client, Server
        >>> with Server() as server:
        ...     with Client(server.address, server.secret, tag="trainer") as client:
        ...         client.send({"loss": 0.5})
        ...         message, sender = server.recv_any()
        ...         sender.send("go on")
        ...         print(message, client.recv())
        {'loss': 0.5} go on
    """

    @refuses_misspelt("Client")
    def __init__(
        self, address: str, secret: bytes, *, tag: str = "", tls: bool = False, timeout: float = LATE
    ) -> None:
        flag("Client", "tls", tls)
        id, inbox, outbox, link = join(address, secret, tls, timeout, tag)
        super().__init__("client", id, tag, inbox, outbox, link)


@public
class ServedClient(_End):
    """Server's handle of a connected client.

    The server may change the client's ``tag``.

    Attributes:
        id: Number of the client, from 1 in order of arrival.
        tag: Label of the client.

    Example:
        >>> from flowchan.pipelines import Client, Server
        >>> with Server() as server, Client(server.address, server.secret, tag="trainer"):
        ...     (served,) = server.clients(1)
        ...     served.id, served.tag
        (1, 'trainer')
    """

    def __init__(self, member: JoinedClient) -> None:
        super().__init__("client", member.id, member.tag, member.inbox, member.outbox, member.link)

    def _has_left(self) -> bool:
        return bool(self._inbox.closed) and not self._unread


@public
class Server:
    """Server for any number of clients that know its secret.

    Args:
        address: Host and port to listen on; port 0 selects any free port (default: ``"127.0.0.1:0"``).
        secret: Bytes that a client must know (default: 32 random bytes).
        tls: True to use TLS (default: False).

    Raises:
        TypeError: ``secret`` is not bytes, or ``tls`` is not a bool.
        ValueError: ``secret`` is too short.

    Example:
        >>> from flowchan.pipelines import Client, Server
        >>> with Server() as server, Client(server.address, server.secret) as client:
        ...     client.send("hello")
        ...     message, sender = server.recv_any()
        ...     sender.send(message.upper())
        ...     client.recv()
        'HELLO'
    """

    @refuses_misspelt("Server")
    def __init__(
        self, address: str = "127.0.0.1:0", *, secret: bytes | None = None, tls: bool = False
    ) -> None:
        flag("Server", "tls", tls)
        self._lock = threading.Lock()
        self._all: list[ServedClient] = []
        # One channel for each waiting call. When a client arrives, one item is put into each of them.
        self._wakeups: list[Channel[None]] = []
        self._clients = Clients(address, secret, tls, CAPACITY, self._add_client)
        self.address, self.secret = self._clients.address, self._clients.secret

    def __repr__(self) -> str:
        return f"<server at {self.address}, {len(self._all)} clients>"

    def _add_client(self, member: JoinedClient) -> None:
        with self._lock:
            self._all.append(ServedClient(member))
            waiting = list(self._wakeups)
        for wakeup in waiting:
            with contextlib.suppress(Exception):  # the channel may already contain an item
                wakeup.put_nowait(None)

    def clients(
        self, count: int | None = None, *, tag: str | None = None, timeout: float = LATE
    ) -> list[ServedClient]:
        """Return the connected clients in order of arrival.

        Args:
            count: Number of clients to wait for (default: none; the call returns at once).
            tag: Return only clients with this tag (default: all).
            timeout: Maximum seconds to wait for ``count`` clients (default: 300).

        Returns:
            The clients.

        Raises:
            Empty: Fewer than ``count`` clients connected within ``timeout`` seconds.

        Example:
            >>> from flowchan.pipelines import Client, Server
            >>> with Server() as server, Client(server.address, server.secret, tag="trainer"):
            ...     [client.tag for client in server.clients(1, timeout=60)]
            ['trainer']
        """
        give_up = time.monotonic() + timeout
        with self._subscription() as wakeup:
            while True:
                with self._lock:
                    self._all = [client for client in self._all if not client._has_left()]
                    found = [client for client in self._all if tag is None or client.tag == tag]
                if count is None or len(found) >= count:
                    return found
                try:
                    wakeup.get(max(0.0, give_up - time.monotonic()))
                except Empty:
                    raise Empty(
                        f"{self!r} has {len(found)} of {count} clients{'' if tag is None else f' {tag!r}'} "
                        f"after {timeout:g} s"
                    ) from None

    @contextlib.contextmanager
    def _subscription(self) -> Any:
        wakeup: Channel[None] = Channel(1)
        with self._lock:
            self._wakeups.append(wakeup)
        try:
            yield wakeup
        finally:
            with self._lock:
                self._wakeups.remove(wakeup)

    def recv_any(self, *, tag: str | None = None, timeout: float | None = None) -> tuple[Any, ServedClient]:
        """Receive the next message from any client. Clients with messages take turns.

        A client that closes its side is skipped from then on.

        Args:
            tag: Receive only from clients with this tag (default: all).
            timeout: Maximum seconds to wait (default: no limit).

        Returns:
            The message and the client that sent it.

        Raises:
            Broken: A client has died. ``recv_any`` raises this error once for each dead client.
            Empty: No message arrived within ``timeout`` seconds.

        Example:
            >>> from flowchan.pipelines import Client, Server
            >>> with Server() as server, Client(server.address, server.secret) as client:
            ...     client.send("hello")
            ...     message, sender = server.recv_any(timeout=60)
            >>> message
            'hello'
        """
        give_up = math.inf if timeout is None else time.monotonic() + timeout
        with self._subscription() as wakeup:
            while True:
                clients = self.clients(tag=tag)
                for client in clients:
                    if client._unread:
                        return client._unread.popleft(), client
                inboxes = [client._inbox for client in clients]
                left = None if give_up == math.inf else max(0.0, give_up - time.monotonic())
                try:
                    done = select([*inboxes, wakeup], timeout=left)
                except NothingReady:
                    raise Empty(f"{self!r}: no message within {timeout:g} s") from None
                except Broken as error:
                    self._raise_for_dead_client(clients, error)
                    continue
                if done.channel is not wakeup:
                    return done.item, clients[inboxes.index(done.channel)]

    def _raise_for_dead_client(self, clients: list[ServedClient], error: Broken) -> None:
        for client in clients:
            if client._inbox.channel.broken:
                with self._lock:
                    self._all.remove(client)
                raise Broken(f"{client!r} of {self!r} has died") from error.__cause__

    def broadcast(self, message: Any, *, tag: str | None = None) -> int:
        """Send a message to all connected clients. The message is encoded only once.

        A client that leaves during the call is skipped.

        Args:
            message: Any value that a channel between processes accepts.
            tag: Send only to clients with this tag (default: all).

        Returns:
            The number of clients to which the message was sent.

        Example:
            >>> from flowchan.pipelines import Client, Server
            >>> with Server() as server, Client(server.address, server.secret) as client:
            ...     server.clients(1)
            ...     server.broadcast("stop"), client.recv()
            [<client 1, tag ''>]
            (1, 'stop')
        """
        once, count = sealed_once(message), 0
        for client in self.clients(tag=tag):
            with contextlib.suppress(Closed, Broken):
                client._outbox.put(once)
                count += 1
        return count

    def stats(self) -> Traffic:
        """Return the combined statistics of all connected clients.

        Returns:
            The sums of the counts, and the longest round-trip time.

        Example:
            >>> from flowchan.pipelines import Server
            >>> with Server() as server:
            ...     server.stats()
            Traffic(sent=0, received=0, breaks=0, round_trip=0.0)
        """
        links = {id(client._link): client.stats() for client in self.clients()}.values()
        return Traffic(
            sum(one.sent for one in links),
            sum(one.received for one in links),
            sum(one.breaks for one in links),
            max((one.round_trip for one in links), default=0.0),
        )

    def close(self, timeout: float = 10.0) -> None:
        """Close the server.

        No further clients can connect. Each connected client can still read its messages and then gets
        ``Drained``.

        Args:
            timeout: Maximum seconds to wait until all clients have read their messages (default: 10).

        Example:
            >>> from flowchan.pipelines import Server
            >>> server = Server()
            >>> server.close()
        """
        for client in self.clients():
            client.close()
        self._clients.close(timeout)
        with self._lock:
            self._all.clear()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""A server and any number of clients, on any hosts: each client is a pair of channels."""

from __future__ import annotations

import collections
import contextlib
import math
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from flowchan import Broken, Channel, Closed, Empty, In, NothingReady, Out, select
from flowchan.items.arguments import flag, refuses_misspelt
from flowchan.remote.joining import Clients, JoinedClient, join, sealed_once

LATE = 300.0
"""Seconds for which a client waits for its server, and a server for its clients."""
CAPACITY = 1024


@dataclass(frozen=True, slots=True)
class Traffic:
    """What has crossed between a client and its server: bytes sent and received, by whoever asks; how often
    the connection broke and was made again; seconds there and back. Clients of one process share a
    connection, and so these counts."""

    sent: int
    received: int
    breaks: int
    round_trip: float


class _End:
    """One end of a pair of channels. ``id`` is the client's number, from 1 on in the order of their coming,
    ``tag`` what it is called."""

    def __init__(self, who: str, id: int, tag: str, inbox: In[Any], outbox: Out[Any], link: Any) -> None:
        self.id, self.tag = id, tag
        self._who = who
        self._inbox, self._outbox, self._link = inbox, outbox, link
        self._unread: collections.deque[Any] = collections.deque()

    def __repr__(self) -> str:
        return f"<{self._who} {self.id}, tag {self.tag!r}>"

    def send(self, message: Any, timeout: float | None = None) -> None:
        """Sends what can be put into a channel. Raises ``Closed`` when the other side has gone."""
        self._outbox.put(message, timeout)

    def recv(self, timeout: float | None = None, *, into: Any = None) -> Any:
        """The next message. ``into``: a tensor or an array of the same shape and type, which is filled with
        the message and given back; one that does not fit raises ``ValueError``, and the message stays the
        next one. Raises ``Drained`` when the other side has said farewell and all is read, and ``Broken``
        when it has died."""
        message = self._unread.popleft() if self._unread else self._inbox.get(timeout)
        if into is None:
            return message
        try:
            _fill(into, message)
        except BaseException:
            self._unread.appendleft(message)
            raise
        return into

    def recv_nowait(self) -> Any:
        """The next message, if it is here, else ``Empty``."""
        return self._unread.popleft() if self._unread else self._inbox.get_nowait()

    def stats(self) -> Traffic:
        """What has crossed so far."""
        state = self._link.state()
        return Traffic(state["bytes_out"], state["bytes_in"], state["breaks"], state["round_trip"])

    def close(self) -> None:
        """Says farewell: the other side reads what was sent, and then meets the end."""
        self._outbox.close()
        self._inbox.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client(_End):
    """A connection to the :class:`Server` at ``address`` (``server.address``), which has to be given its
    ``secret`` (``server.secret``). The server may come later, by up to ``timeout`` seconds. ``tag``: what the
    server may call it. Raises ``HostError`` when there is none by then."""

    @refuses_misspelt("Client")
    def __init__(
        self, address: str, secret: bytes, *, tag: str = "", tls: bool = False, timeout: float = LATE
    ) -> None:
        flag("Client", "tls", tls)
        id, inbox, outbox, link = join(address, secret, tls, timeout, tag)
        super().__init__("client", id, tag, inbox, outbox, link)


class ServedClient(_End):
    """A client as its server has it. Its ``tag`` may be set anew."""

    def __init__(self, member: JoinedClient) -> None:
        super().__init__("client", member.id, member.tag, member.inbox, member.outbox, member.link)

    def _has_gone(self) -> bool:
        return bool(self._inbox.closed) and not self._unread


class Server:
    """Listens at ``address``, a host and a port (0: any free one), for any number of clients that know the
    ``secret``: 32 random bytes, unless told otherwise."""

    @refuses_misspelt("Server")
    def __init__(
        self, address: str = "127.0.0.1:0", *, secret: bytes | None = None, tls: bool = False
    ) -> None:
        flag("Server", "tls", tls)
        self._lock = threading.Lock()
        self._all: list[ServedClient] = []
        self._told: list[Channel[None]] = []  # whoever waits hears of each client that comes
        self._clients = Clients(address, secret, tls, CAPACITY, self._has_come)
        self.address, self.secret = self._clients.address, self._clients.secret

    def __repr__(self) -> str:
        return f"<server at {self.address}, {len(self._all)} clients>"

    def _has_come(self, member: JoinedClient) -> None:
        with self._lock:
            self._all.append(ServedClient(member))
            told = list(self._told)
        for news in told:
            with contextlib.suppress(Exception):  # it has heard enough
                news.put_nowait(None)

    def clients(
        self, count: int | None = None, *, tag: str | None = None, timeout: float = LATE
    ) -> list[ServedClient]:
        """Those that are connected, in the order of their coming; with ``tag`` those that are called so.
        ``count``: waits until there are so many of them. Raises ``Empty`` when there are not within
        ``timeout`` seconds."""
        give_up = time.monotonic() + timeout
        with self._hearing() as news:
            while True:
                with self._lock:
                    self._all = [client for client in self._all if not client._has_gone()]
                    found = [client for client in self._all if tag is None or client.tag == tag]
                if count is None or len(found) >= count:
                    return found
                try:
                    news.get(max(0.0, give_up - time.monotonic()))
                except Empty:
                    raise Empty(
                        f"{self!r} has {len(found)} of {count} clients{'' if tag is None else f' {tag!r}'} "
                        f"after {timeout:g} s"
                    ) from None

    @contextlib.contextmanager
    def _hearing(self) -> Any:
        news: Channel[None] = Channel(1)
        with self._lock:
            self._told.append(news)
        try:
            yield news
        finally:
            with self._lock:
                self._told.remove(news)

    def recv_any(self, *, tag: str | None = None, timeout: float | None = None) -> tuple[Any, ServedClient]:
        """The next message of any client, or of any that is called ``tag``, and whose it is. Of several that
        have sent one each has the same chance. Clients that say farewell are left out. Raises ``Broken`` once
        for each that died, and ``Empty`` when nothing has come within ``timeout`` seconds."""
        give_up = math.inf if timeout is None else time.monotonic() + timeout
        with self._hearing() as news:
            while True:
                clients = self.clients(tag=tag)
                for client in clients:
                    if client._unread:
                        return client._unread.popleft(), client
                inboxes = [client._inbox for client in clients]
                left = None if give_up == math.inf else max(0.0, give_up - time.monotonic())
                try:
                    done = select([*inboxes, news], timeout=left)
                except NothingReady:
                    raise Empty(f"{self!r}: no message within {timeout:g} s") from None
                except Broken as error:
                    self._tell_of_the_dead(clients, error)
                    continue
                if done.channel is not news:
                    return done.item, clients[inboxes.index(done.channel)]

    def _tell_of_the_dead(self, clients: list[ServedClient], error: Broken) -> None:
        for client in clients:
            if client._inbox.channel.broken:
                with self._lock:
                    self._all.remove(client)
                raise Broken(f"{client!r} of {self!r} has died") from error.__cause__

    def broadcast(self, message: Any, *, tag: str | None = None) -> int:
        """Sends a message to all clients that are connected, or to those that are called ``tag``; it is
        encoded once. Those that go meanwhile are left out. To how many it went."""
        once, count = sealed_once(message), 0
        for client in self.clients(tag=tag):
            with contextlib.suppress(Closed, Broken):
                client._outbox.put(once)
                count += 1
        return count

    def stats(self) -> Traffic:
        """What has crossed so far, with all clients that are connected."""
        links = {id(client._link): client.stats() for client in self.clients()}.values()
        return Traffic(
            sum(one.sent for one in links),
            sum(one.received for one in links),
            sum(one.breaks for one in links),
            max((one.round_trip for one in links), default=0.0),
        )

    def close(self, timeout: float = 10.0) -> None:
        """Says farewell to all clients, and lets nobody in any more. Returns when they have read what was
        sent, or after ``timeout`` seconds."""
        for client in self.clients():
            client.close()
        self._clients.close(timeout)
        with self._lock:
            self._all.clear()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fill(into: Any, message: Any) -> None:
    """Copies a tensor or an array to where it is wanted."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kinds = tuple(kind for kind in (torch and torch.Tensor, numpy and numpy.ndarray) if kind)
    if not isinstance(into, kinds):
        raise TypeError(f"recv: into must be a tensor or an array, not {type(into).__name__}")
    if not isinstance(message, type(into)) and not isinstance(into, type(message)):
        raise ValueError(f"recv: a {type(message).__name__} does not go into a {type(into).__name__}")
    ours, theirs = (into.dtype, tuple(into.shape)), (message.dtype, tuple(message.shape))
    if ours != theirs:
        raise ValueError(
            f"recv: a message of type {theirs[0]} and shape {theirs[1]} does not go into {ours[0]} {ours[1]}"
        )
    if hasattr(into, "copy_"):
        with torch.no_grad():  # type: ignore[union-attr]
            into.copy_(message)
    else:
        into[...] = message

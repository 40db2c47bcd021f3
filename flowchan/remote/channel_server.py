"""Serve the channels that this process owns to other processes.

Each such channel is an ordinary ring in its owner, the process that created it. The server listens on one
address for all of the owner's channels, and accepts clients that prove that they know the secret. Each client
process has one link and one :class:`ClientSession`, which carries out the client's requests on the channels.
If a client opens a port, the owner opens an ordinary port, and the link uses it for the client.

One thread runs the server's event loop, and one thread per client watches its link. All of them end when the
last channel has been released.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hmac
import os
import re
import secrets
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from flowchan import _core
from flowchan.channel import awaiting
from flowchan.channel.channel import Channel
from flowchan.channel.transports import HOSTS
from flowchan.errors import Broken, ChannelError, FlowchanError
from flowchan.remote.connection import Connection, using
from flowchan.remote.messages import packed_in
from flowchan.remote.orphans import OrphanMemory, Orphans
from flowchan.remote.session import ClientSession
from flowchan.run.crew.at_exit import before_exit
from flowchan.transport.addresses import mark_of
from flowchan.transport.link_events import PEER_TIMEOUT_S
from flowchan.transport.listener import AuthenticatedListener
from flowchan.transport.local_peers import local_peer
from flowchan.transport.tcp import listen
from flowchan.transport.versions import differs, versions

ANY_PORT = "127.0.0.1:0"
# The server remembers this many lost clients. If one of them connects again, the server can tell it the
# reason for the rejection.
MAX_LOST_CLIENTS = 32
DISCARD_INTERVAL_S = 0.005  # seconds between checks for more items in a channel that no process uses
CHILD_TIMEOUT_S = 1.0  # seconds within which a live owner replies to its forked children


class ChannelServer:
    """Server for several numbered channels, at one address.

    Unless ``kept`` is true, the server ends when its last channel has been released.

    Args:
        address: Address to listen on.
        secret: Secret of the server, which clients must prove to know (default: 32 random bytes).
        tls: True if connections are encrypted.
        peer_timeout: Seconds without a message from this process after which clients give up.
        kept: True if the server continues to run when it has no channels.

    Raises:
        ValueError: The address is invalid.
        OSError: The server cannot listen on ``address``.
    """

    def __init__(
        self,
        address: str = ANY_PORT,
        secret: bytes | None = None,
        tls: bool = False,
        peer_timeout: float = PEER_TIMEOUT_S,
        kept: bool = False,
    ) -> None:
        self.id, self.pid = secrets.token_hex(16), os.getpid()
        self.tls, self.peer_timeout = tls, peer_timeout
        self.secret = secrets.token_bytes(32) if secret is None else secret
        self.requests: dict[str, Callable[..., Any]] = {}  # handlers of additional requests, by name
        # Called with each session when it ends.
        self.client_left: Callable[[ClientSession], None] = lambda _: None
        self._stays, self._kept, self._over = kept, True, False
        self._channels: weakref.WeakValueDictionary[int, Channel[Any]] = weakref.WeakValueDictionary()
        self._sent: dict[int, Channel[Any]] = {}
        # Second object for each channel. The ports through which clients put belong to this object.
        self._entrances: weakref.WeakValueDictionary[int, Channel[Any]] = weakref.WeakValueDictionary()
        # For each channel, the number of unfinished items that contain the channel.
        self._under_way: Counter[int] = Counter()
        self._dropped: deque[Orphans] = deque()  # channels that may have no users any more
        self._mark = re.compile(re.escape(mark_of(self.id, "").encode()) + rb"(\d+)")
        # Reentrant, because the garbage collector may call item_done() in a thread that holds the lock.
        self._counting = threading.RLock()
        self._numbers = 0
        self._sessions: dict[str, ClientSession] = {}
        self._given_up: list[str] = []
        self._hello = {
            **versions(),
            "server": self.id,
            "peer_timeout": peer_timeout,
            "given_up": self._given_up,
        }
        self._listener = AuthenticatedListener(listen(address), self.secret, self._hello, tls=tls)
        self.address = self._listener.address
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        name = f"flowchan server {self.address}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        _servers[self.id] = self
        before_exit(_close_all, 0)

    def __repr__(self) -> str:
        return f"<ChannelServer with {len(self._channels)} channels at {self.address}>"

    # --- channels ---

    def add(self, channel: Channel[Any]) -> int | None:
        """Register a channel and return its number; None if the server has ended."""
        with _ending:
            if self._over:
                return None
            self._numbers += 1
            self._channels[self._numbers] = channel
            number = self._numbers
        self._kept = self._stays
        self._watch_release(channel, number)
        return number

    def make(self, capacity: int) -> Channel[Any]:
        """Make a channel of this server."""
        before = chosen.set(self)
        try:
            return Channel(capacity, across=HOSTS.name)
        finally:
            chosen.reset(before)

    def send(self, number: int) -> bool:
        """Count an item that contains the channel, and keep the channel until the item is finished.

        The process that finishes the item calls :meth:`item_done`.

        Args:
            number: Number of the channel.

        Returns:
            False if no process uses the channel any more.
        """
        if os.getpid() != self.pid:
            with contextlib.suppress(Broken):
                connection = self._from_child()
                return connection is not None and connection.send(number)
            return False
        channel = self._channels.get(number)
        with self._counting:
            if channel is None and number not in self._sent:
                return False
            if channel is not None and number not in self._sent:
                # Call dup() before counting, because it fails if the process is out of descriptors.
                self._sent[number] = _twin(channel, os.dup(channel._fd))
            self._under_way[number] += 1
        return True

    def item_done(self, number: int) -> None:
        """Stop counting an item that contained the channel, because the item is finished."""
        if os.getpid() != self.pid:
            if (connection := self._from_child()) is not None:
                connection.notify("item_done", number)
            return
        with self._counting:
            self._under_way[number] -= 1
            if self._under_way[number] > 0:
                return
            del self._under_way[number]
            last = self._sent.pop(number, None)
        if last is not None:
            self.drop(number, OrphanMemory(last))
        del last  # release the channel without holding the lock

    def sent_in(self, value: Any) -> Counter[int]:
        """Count how often each of this server's channels occurs in ``value``, by number."""
        found: Counter[int] = Counter()
        if self._sent:
            for packed in packed_in(value):
                found.update(int(match) for match in self._mark.findall(packed))
        return found

    def keep(self, channel: Channel[Any], number: int) -> None:
        """Keep a channel that a forked child received in an item.

        The child opens the channel like a remote client. The item may hold the parent's only reference to the
        channel, so the parent must keep the channel while the child has it open.
        """
        if os.getpid() == self.pid:
            return
        with contextlib.suppress(FlowchanError):  # the parent may have ended
            if (connection := self._from_child()) is not None:
                connection.open(number, CHILD_TIMEOUT_S)
                weakref.finalize(channel, connection.notify, "drop", number).atexit = False

    def _from_child(self) -> Connection | None:
        """Return a forked child's connection to its parent, or None if the parent has ended.

        The connection stays open. Through it, the child reports the channels in its items, as a remote
        client does.
        """
        try:
            os.kill(self.pid, 0)
            with using(self.address, self.secret, self.tls, CHILD_TIMEOUT_S) as connection:
                connection.is_kept = True
                return connection
        except (FlowchanError, OSError):
            return None

    def is_here(self, number: int) -> bool:
        """Return whether this process has the channel.

        A forked child has the channels from before the fork.
        """
        return self.pid == os.getpid() or number in self._channels or number in self._sent

    def find(self, number: int) -> Channel[Any]:
        """Return the channel with this number.

        Args:
            number: Number of the channel.

        Returns:
            The channel.

        Raises:
            ChannelError: The channel was released, or never existed.
        """
        with self._counting:  # several threads may look up the same channel at once
            found = self._channels.get(number)
            if found is None and (sent := self._sent.get(number)) is not None:
                # Channels in transit are not registered, because they must not keep the server alive.
                twin = _twin(sent, os.dup(sent._fd))
                # The garbage collector may have registered the channel since the look-up.
                found = self._channels.setdefault(number, twin)
                if found is twin:
                    self._watch_release(found, number)
        if found is not None:
            return found
        raise ChannelError(
            f"channel {number} does not exist at {self.address}: its owner has released the channel or "
            "never made it; keep a reference to it in the owner"
        )

    def _watch_release(self, channel: Channel[Any], number: int) -> None:
        weakref.finalize(channel, _dropped, weakref.ref(self), number, OrphanMemory(channel)).atexit = False

    def drop(self, number: int, memory: OrphanMemory) -> None:
        """Schedule a check of whether a channel is still in use: one of its objects will be released.

        The garbage collector may call this method.
        """
        if os.getpid() != self.pid:
            return
        # If no channel is in transit, none of this channel's items contains a channel.
        has_items = self._sent or number in self._entrances
        if has_items and (dropped := memory.dropped(number)) is not None:
            self._dropped.append(dropped)
        if self._over:  # the server may have ended since the check
            self._dropped.clear()
        self.wake()

    def _check_dropped(self) -> None:
        """Find unused channels, discard their items, and release the channels in these items."""
        for _ in range(len(self._dropped)):
            try:
                dropped = self._dropped.popleft()
            except IndexError:  # the server has ended in the meantime
                return
            if dropped.number in self._channels or dropped.number in self._sent:
                continue
            if not dropped.is_unused():
                self._dropped.append(dropped)  # a forked child still has the channel: check again later
                continue
            for number in self.sent_in(dropped.items()).elements():
                self.item_done(number)
            if dropped.number in self._entrances:
                self._dropped.append(dropped)  # check again later, because more items may be in transit
                self._loop.call_later(DISCARD_INTERVAL_S, self._changed.set)

    def entrance(self, channel: Channel[Any], number: int) -> Channel[Any]:
        """Return a second object for the channel, which does not count as one of the channel's users.

        The ports through which clients put belong to this object. Items in transit therefore do not keep
        alive a channel that no process can read any more.
        """
        found = self._entrances.get(number)
        if found is None:
            self._entrances[number] = found = _twin(
                channel, os.open(f"/proc/self/fd/{channel._fd}", os.O_RDWR)
            )
        return found

    def is_over(self) -> bool:
        """Return whether the server has ended or has no channels left."""
        # Iterate instead of using len(), which may count objects that are already released.
        used = (*self._channels.values(), *self._entrances.values())
        return self._over or (not self._kept and not used)

    def wake(self) -> None:
        """Make the server check whether to end. The garbage collector may call this method."""
        with contextlib.suppress(RuntimeError):  # the loop may have ended
            self._loop.call_soon_threadsafe(self._changed.set)

    def has_prefetched(self, channel: Channel[Any], other_than: ClientSession) -> bool:
        """Return whether another client has prefetched items of ``channel``."""
        return any(
            session.has_prefetched(channel) for session in self.sessions() if session is not other_than
        )

    def sessions(self) -> list[ClientSession]:
        """Return the sessions of all clients."""
        return list(self._sessions.values())

    def close(self) -> None:
        """End the server and all its sessions now."""
        self._over = True
        self.wake()
        if threading.current_thread() is not self._thread and os.getpid() == self.pid:
            self._thread.join()

    # --- its thread ---

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept_clients)
        while True:
            # Wake up at least once a second, to drop connections that stay silent.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 1.0)
            self._changed.clear()
            self._check_dropped()
            self._accept_clients()
            with _ending:
                if self.is_over():
                    self._over = True
                    _servers.pop(self.id, None)
                    break
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        why = f"the program at {self.address} has closed them"
        await asyncio.gather(*(session.notify_and_end(why) for session in self.sessions()))
        self._sent.clear()
        self._dropped.clear()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        awaiting.end_waits()

    def _accept_clients(self) -> None:
        with contextlib.suppress(TimeoutError):
            while True:
                sock, hello = self._listener.accept(0)
                session = self._session(hello)
                if session is None:
                    sock.close()
                else:
                    session.attach(sock)

    def _session(self, hello: dict[str, Any]) -> ClientSession | None:
        """Return the session for a client, or None if its session has ended or its version differs."""
        id, pid = hello.get("client"), hello.get("pid")
        if not isinstance(id, str) or not isinstance(pid, int) or id in self._given_up:
            return None
        if differs(hello):
            return None  # the client compares the versions itself and raises an error
        if id not in self._sessions:
            if hello.get("again"):
                return None
            self._sessions[id] = ClientSession(self, self._loop, id, pid, local_peer(hello))
        return self._sessions[id]

    def forget(self, session: ClientSession) -> None:
        """Forget a session that has ended."""
        if self._sessions.pop(session.id, None) is not None:
            self._given_up.append(session.id)
            del self._given_up[:-MAX_LOST_CLIENTS]
            self.client_left(session)
        self.wake()


_servers: dict[str, ChannelServer] = {}
"""Servers of this process, by server id. After a fork, the child also has its parents' servers."""
_ending = threading.Lock()
"""Lock that a server holds while it decides whether to end."""
chosen: ContextVar[ChannelServer | None] = ContextVar("chosen", default=None)
"""Server for the channel being made (default: this process's server)."""


def _twin(channel: Channel[Any], fd: int) -> Channel[Any]:
    """Return a second object for the channel, with another descriptor ``fd`` of its memory."""
    twin: Channel[Any] = Channel.__new__(Channel)
    socket = os.dup(channel._socket) if channel._socket >= 0 else -1
    _core.Channel.__init__(twin, fd=fd, socket=socket, name=channel._name)
    twin._hosts, twin._reached = True, channel._reached
    return twin


def _dropped(server: weakref.ref[ChannelServer], number: int, memory: OrphanMemory) -> None:
    if (one := server()) is not None:
        one.drop(number, memory)


def server_of(id: str) -> ChannelServer | None:
    """Return the server with this ID, which belongs to this process or to one of its parents."""
    return _servers.get(id)


def server_at(address: str, secret: bytes) -> ChannelServer | None:
    """Return this process's server at ``address``, or None if there is none or the secret is wrong."""
    found = [server for server in _servers.values() if server.address == address]
    return found[0] if found and hmac.compare_digest(found[0].secret, secret) else None


def _close_all() -> None:
    for server in list(_servers.values()):
        if server.pid == os.getpid():
            server.close()


def _after_fork() -> None:
    """Stop listening in a forked child, which can access its parents' channels directly."""
    global _ending
    _ending = threading.Lock()
    for server in _servers.values():
        server._listener.drop()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork)

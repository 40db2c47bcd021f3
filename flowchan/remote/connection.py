"""Connect this process to the owners of remote channels.

A connection consists of a link, a control stream, and one stream for each open port of this process. A
connection has two threads: one keeps the link connected, and the other receives the owner's messages. The
connection ends when this process no longer uses the owner's channels.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from typing import Any

from flowchan import _core
from flowchan.channel.channel import Channel
from flowchan.channel.latch import Latch
from flowchan.channel.select import Selected, select
from flowchan.errors import Broken, ChannelError, Closed, HostError
from flowchan.remote.messages import Finished, Reply, ServerClosed, cause_in, control_ring
from flowchan.remote.pending_calls import CLOSED_HERE, Calls, Unanswered
from flowchan.remote.remote_ports import RemotePort
from flowchan.run.crew.at_exit import before_exit
from flowchan.run.worker.items_in_transit import before_end
from flowchan.transport.dial import Backoff, reach
from flowchan.transport.interrupts import append_result
from flowchan.transport.link_events import STUCK, LinkBroken, LinkIdle, watch
from flowchan.transport.local_peers import card
from flowchan.transport.versions import differs, versions

PEER_TIMEOUT_S = 10.0
"""Seconds to wait for a reply from an owner that this process is not connected to yet."""
REPLY_TIMEOUT_S = 1.0
"""Seconds to wait for a reply, in addition to the call's timeout and two round trips."""
EXIT_TIMEOUT_S = 2.0
"""Seconds for which an exiting process waits for its items in transit. A worker that ends also waits longer
as long as items arrive."""


class Connection(Calls):
    """Connection to one owner; the module docstring describes it.

    Args:
        address: Host and port of the owner.
        secret: Secret of the owner's server.
        tls: True if the connection is encrypted.
        timeout: Seconds to wait for the owner.

    Raises:
        HostError: The owner could not be reached within ``timeout`` seconds.
    """

    def __init__(self, address: str, secret: bytes, tls: bool, timeout: float = PEER_TIMEOUT_S) -> None:
        super().__init__(address)
        self.pid = os.getpid()
        self.is_kept = False  # if true, stay connected even without channels
        self._starting = 0  # number of callers about to use a channel
        self._secret, self._tls = secret, tls
        self._hello = {**versions(), **card(), "client": secrets.token_hex(16), "again": False}
        self._stream_numbers = 0
        self._streams: dict[int, RemotePort] = {}
        self._users: set[object] = set()  # one token for each object that uses a channel
        self._known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._left = False
        self._has_left = Latch()
        sock, their_hello = self._dial(timeout, f"can't open a channel at {address}")
        self.server_id, self._peer_timeout = their_hello["server"], float(their_hello["peer_timeout"])
        self._hello["again"] = True
        requests, replies = control_ring(), control_ring()
        self._requests, request_reader = requests.writer(), requests.reader()
        self._replies, reply_writer = replies.reader(), replies.writer()
        self._notices: Channel[tuple[str, int]] = Channel(2**20)
        self._ends = request_reader, reply_writer
        self.link = _core.Link(False)
        self.link.open_stream(0, [reply_writer], [request_reader])
        self.link.attach(sock.detach())
        name = f"flowchan to {address}"
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work in (self._keep_connected, self._receive)
        ]
        for thread in self._threads:
            thread.start()
        # Leave before this process's servers close, because one of them may own these channels.
        before_exit(_leave_all, 1)

    def _dial(self, within: float, why: str) -> Any:
        try:
            sock, their_hello, _ = reach(
                self.address, self._secret, self._hello,
                why=why, within=within, tls=self._tls, wanted=lambda: not self._has_left.is_set(),
            )  # fmt: skip
        except OSError as error:
            remedy = ""
            if isinstance(error.__cause__, ConnectionRefusedError):
                remedy = "; check that the owner's program is running and that the address is right"
            raise HostError(f"{error}{remedy}", self.address) from None
        why_not = differs(their_hello)
        if not why_not and "server" not in their_hello:
            why_not = "no channel server listens there"
        elif self._hello["again"] and their_hello["server"] != self.server_id:
            why_not = "a different program listens there now"
        elif self._hello["client"] in their_hello.get("given_up", ()):
            why_not = "its owner received nothing from this program for too long, and closed the session"
        if not why_not:
            return sock, their_hello
        sock.close()
        raise HostError(f"{why} at {self.address}: {why_not}", self.address)

    # --- requests to the owner ---

    def open(self, channel: int, within: float | None = None) -> Any:
        """Open a channel.

        The owner keeps the channel until this process drops it.

        Args:
            channel: Number of the channel.
            within: Seconds to wait for the reply, in addition to two round trips (default: no limit).

        Returns:
            The channel's capacity, ``max_bytes`` and name.

        Raises:
            HostError: The owner did not reply in time.
        """

        def drop(reply: Reply) -> None:
            if reply.error is None:
                self.notify("drop", channel)

        wait = None if within is None else within + self.two_round_trips()
        try:
            return self.ask(channel, "open", late=drop, within=wait)
        except Unanswered:
            why = f"can't open a channel at {self.address}: its owner has not answered for {wait:.3g} s"
            raise HostError(why, self.address) from None

    def send(self, channel: int) -> bool:
        """Count an item that contains the channel; see :meth:`ChannelServer.send`."""

        def undo(reply: Reply) -> None:
            if reply.value:
                self.notify("item_done", channel)

        return bool(self.ask(channel, "send", late=undo))

    def two_round_trips(self) -> float:
        """Return the measured duration of two round trips in seconds."""
        return 2 * float(self.link.state()["round_trip"])

    def answered_within(self, timeout: float) -> float:
        """Return the number of seconds to wait for the reply to a call with this timeout."""
        return timeout + self.two_round_trips() + REPLY_TIMEOUT_S

    # --- streams ---

    def new_stream(self, name: str, max_bytes: int | None, reads: bool, counted: bool) -> RemotePort:
        """Return a new stream with its ring. The stream does not have a port at the owner yet."""
        with self._lock:
            self._stream_numbers += 1
            return RemotePort(self._stream_numbers, name, max_bytes, reads, counted)

    def open_stream(self, stream: RemotePort, channel: int) -> None:
        """Connect a stream to a new port of the channel. The user already has the local end of the stream."""

        def join(reply: Reply) -> None:
            """Add the stream to the link, even if the caller has given up.

            Otherwise, the owner would never learn that the port is closed.
            """
            with self._lock:
                if reply.error is not None:
                    self._streams.pop(stream.number, None)
                elif stream.number in self._streams and stream.number not in self.link.state()["streams"]:
                    ends = [stream.end]
                    fill, drain = (ends, []) if stream.reads else ([], ends)
                    self.link.open_stream(stream.number, fill, drain, stream.reads)

        def joined(room: Any) -> None:
            join(Reply(stream.number))
            if not stream.reads and not stream.counted:
                stream.ring._allow(room)

        # Register the stream before the request. The stream may finish before this process handles the reply.
        def enter() -> None:
            with self._lock:
                self._streams[stream.number] = stream

        what = "reader" if stream.reads else "writer"
        self.ask(channel, what, stream.number, stream.counted, late=join, take=joined, first=enter)
        if self.lost:
            self._lose(self.lost)

    def _finish(self, message: Finished) -> None:
        with self._lock:
            stream = self._streams.pop(message.stream, None)
            if stream is not None:
                self.link.drop(message.stream)
        if stream is None:
            return
        if message.broken:
            stream.ring.abort(cause_in(message.cause))  # has no effect if the link has aborted the ring
        stream.end.close()
        stream.arrived = message.used
        stream.finished.set()

    def await_used(self, stream: RemotePort, count: int, timeout: float | None) -> bool | None:
        """Wait until the owner has put ``count`` items of this stream.

        Args:
            stream: The stream.
            count: Number of items since the stream was opened.
            timeout: Seconds to wait; None waits without a limit.

        Returns:
            True if the owner has put the items, False if the owner never will, and None if ``timeout``
            seconds have passed.
        """
        if not stream.finished.is_set():
            used: bool | None = self.link.await_used(stream.number, count, timeout)
            if used is not False:
                return used
            stream.finished.wait()  # from then on, `arrived` is the number of items that the owner has put
        return stream.arrived >= count

    # --- users of the connection ---

    def register(self, number: int, user: Any) -> Any:
        """Register ``user`` as this process's object for the channel, and return the first object registered.

        If several threads open a channel at the same time, all of them therefore use the same object.
        """
        token = object()
        with self._lock:
            self._users.add(token)
            weakref.finalize(user, _dropped, self._users, token, self._notices, number).atexit = False
            return self._known.setdefault(number, user)

    def notify(self, what: str, number: int) -> None:
        """Queue a notice to the owner about a channel, without waiting.

        Args:
            what: "item_done" if an item that contained the channel is finished; "drop" if an object of the
                channel was released.
            number: Number of the channel.
        """
        _notify(self._notices, what, number)

    def user(self, number: int) -> Any:
        """Return this process's object for the channel, or None."""
        return self._known.get(number)

    def _send_notice(self, what: str, number: int) -> None:
        """Send a queued notice to the owner."""
        if what in ("item_done", "drop"):
            with contextlib.suppress(Broken):
                self.post(number, what, ())
        elif what == "end":
            try:
                self.post(0, "leave", (), done=self._has_left.set)
            except Broken:
                self._has_left.set()
            return
        self._leave_if_unused()

    def _leave_if_unused(self) -> None:
        """Disconnect from the owner if this process no longer uses the owner's channels."""
        with _registry_lock:
            if self._left or self._starting or (self.is_kept and not self.lost):
                return
            # The queued notices must be sent first. This method runs again after each notice.
            if len(self._notices):
                return
            if self._users or any(stream.is_open() for stream in self._streams.values()):
                return
            if self._streams and not self.lost:  # items that this process put are still in transit
                return
            self._left = True
            forget(self)
            _leaving.add(self)
        if self.lost:
            self._end()
        else:
            with contextlib.suppress(Broken):
                self.post(0, "leave", (), done=self._end)

    # --- threads ---

    def _keep_connected(self) -> None:
        """Reconnect whenever the connection breaks."""
        backoff = Backoff()
        for event in watch(self.link, self._peer_timeout / 4):
            # Reconnect even while this process is leaving, because the owner must get its notices.
            if isinstance(event, LinkBroken) and not self._has_left.is_set():
                if event.stuck > self._peer_timeout:
                    self._lose(
                        f"the owner at {self.address} was lost: {STUCK.format(event.stuck, event.why)}"
                    )
                    break
                backoff.wait_after_break(event.in_vain)
                try:
                    sock, _ = self._dial(self._peer_timeout, f"lost the owner of the channels ({event.why})")
                except HostError as error:
                    self._lose(str(error))
                    break
                self.link.attach(sock.detach())
            elif isinstance(event, LinkIdle) and event.silent > self._peer_timeout:
                self._lose(f"nothing was heard from {self.address} for {self._peer_timeout:g} s")
                break

    def _receive(self) -> None:
        with contextlib.suppress(Closed, Broken):
            while not self._left or not self.lost:
                done: Selected[Any] = select([self._replies, self._notices])
                if done.channel is self._notices:
                    self._send_notice(*done.item)
                else:
                    self._received(done.item)
                del done

    def _received(self, message: Reply | Finished | ServerClosed) -> None:
        if isinstance(message, Finished):
            self._finish(message)
            self._leave_if_unused()
        elif isinstance(message, ServerClosed):
            self._lose(message.why, message.ended)
        else:
            self._receive_reply(message)

    # --- ending ---

    def _lose(self, why: str, ended: Collection[int] = ()) -> None:
        """Break all open streams of this connection, because the owner is lost.

        The streams in ``ended`` had already ended without a failure. These streams are closed instead.
        """
        with self._lock:
            self.lost = self.lost or why
            streams, self._streams = list(self._streams.values()), {}
        with _registry_lock:
            forget(self)
        self.link.close()
        self._fail_all()
        for stream in streams:
            if stream.number in ended:
                stream.ring.close()
            else:
                stream.ring.abort(HostError(self.lost, self.address))
            stream.finished.set()
        _notify(self._notices, "lost", 0)

    def _end(self) -> None:
        self.lost = self.lost or CLOSED_HERE
        self._has_left.set()
        self.link.close()
        for end in self._ends:
            end.close()
        self._requests.close()
        self._notices.close()
        _leaving.discard(self)

    def undelivered(self) -> int:
        """Return how many of this process's items have not reached the owner yet; 0 if the owner is lost."""
        return 0 if self.lost else sum(stream.undelivered() for stream in list(self._streams.values()))

    def leave(self) -> None:
        """Wait until the owner has this process's items, then disconnect. Called before exit."""
        give_up = time.monotonic() + EXIT_TIMEOUT_S
        for stream in list(self._streams.values()):
            if not stream.counted:
                stream.leave()
            if not stream.is_open():
                stream.finished.wait(max(0.0, give_up - time.monotonic()))
            while not self.lost and stream.undelivered() and time.monotonic() < give_up:
                time.sleep(0.005)
            if not self.lost and (count := stream.undelivered()):
                _report_undelivered(self.address, count, bool(self.link.state()["connected"]))
        _notify(self._notices, "end", 0)  # comes after all other notices
        self._has_left.wait(EXIT_TIMEOUT_S)
        self._left = True
        self._end()
        for thread in self._threads:
            thread.join(EXIT_TIMEOUT_S)


_registry_lock = threading.RLock()
_connections: dict[tuple[str, bytes], Connection] = {}
_leaving: set[Connection] = set()
"""Connections that wait for the reply to "leave". The program waits for these replies before it exits."""
_dialling: weakref.WeakValueDictionary[tuple[str, bytes], Any] = weakref.WeakValueDictionary()
"""Lock for each owner, held by the thread that is connecting to it."""


@contextlib.contextmanager
def using(address: str, secret: bytes, tls: bool, timeout: float = PEER_TIMEOUT_S) -> Iterator[Connection]:
    """Yield this process's connection to an owner, and keep the connection during the ``with`` block.

    One connection serves all channels of an owner.
    """
    connection = _acquire(address, secret, tls, timeout)
    try:
        yield connection
    finally:
        with _registry_lock:
            connection._starting -= 1
        connection.notify("used", 0)


def _acquire(address: str, secret: bytes, tls: bool, timeout: float) -> Connection:
    key, give_up = (address, secret), time.monotonic() + timeout
    while True:
        with _registry_lock:
            if (connection := _connections.get(key)) is not None:
                connection._starting += 1
                return connection
            dialling = _dialling.setdefault(key, threading.Lock())
        # Don't hold the registry's lock here: an owner that does not reply must not delay users of other
        # owners.
        left = max(0.0, give_up - time.monotonic())
        held: list[bool] = []
        try:
            append_result(held, dialling.acquire, True, min(left, threading.TIMEOUT_MAX))
            if not held[0]:
                late = f"its owner has not answered for {timeout:g} s"
                raise HostError(f"can't open a channel at {address}: {late}", address)
            if key not in _connections:
                _connections[key] = Connection(address, secret, tls, timeout)
        finally:
            if True in held:
                dialling.release()


def _report_undelivered(address: str, count: int, connected: bool) -> None:
    full = f"the channels at {address} had no room for them; call flush() before the program ends"
    unreachable = f"the owner of the channels at {address} cannot be reached"
    why = full if connected else unreachable
    lost = "1 of its items is" if count == 1 else f"{count} of its items are"
    if sys.stderr is not None:
        print(f"flowchan: the program ends, and {lost} lost, because {why}", file=sys.stderr)


def forget(connection: Connection) -> None:
    """Remove a connection from the registry, because the owner is lost or this process disconnects."""
    for key, one in list(_connections.items()):
        if one is connection:
            del _connections[key]


def _notify(notices: Channel[tuple[str, int]], what: str, number: int) -> None:
    with contextlib.suppress(ChannelError):
        notices.put_nowait((what, number))


def _dropped(users: set[object], token: object, notices: Channel[tuple[str, int]], number: int) -> None:
    """Notify the owner that an object of a channel was released.

    Remove the token before queuing the notice, so that the order in which the garbage collector runs
    finalizers does not matter.
    """
    users.discard(token)
    _notify(notices, "drop", number)


def _leave_all() -> None:
    for connection in [*_connections.values(), *_leaving]:
        if connection.pid == os.getpid():
            connection.leave()


def _deliver_all() -> None:
    """Wait until the owners have all items, or until no item has reached them for ``EXIT_TIMEOUT_S``."""
    least, give_up = 0, math.inf
    while count := sum(connection.undelivered() for connection in list(_connections.values())):
        if give_up == math.inf or count < least:
            least, give_up = count, time.monotonic() + EXIT_TIMEOUT_S
        elif time.monotonic() >= give_up:
            return
        time.sleep(0.005)


def _after_fork() -> None:
    """Forget the parent's connections in a forked child, because the child lacks their threads."""
    global _registry_lock
    _registry_lock = threading.RLock()
    _connections.clear()
    _leaving.clear()
    _dialling.clear()


before_end(_deliver_all)
atexit.register(_leave_all)
os.register_at_fork(after_in_child=_after_fork)

"""Exchange messages with members on other hosts, over one connection from each sender to each receiver.

Every member has a listening thread. ``send`` puts a message into a channel. A thread connects to the receiver
and forwards the message, and a thread of the receiver puts it into the channel that ``receive`` reads. A
sender therefore waits only while both channels are full.

A member *watches* a peer from which it expects a first message. A connection for watching carries only one
message: the notice that the peer is leaving.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from flowchan.channel.channel import Channel, Out
from flowchan.collective.connector import Connector
from flowchan.collective.point_to_point import Use, take
from flowchan.collective.value_bytes import dumps, loads
from flowchan.errors import Broken, ChannelError, Closed, GroupError, MemberDied, MemberLeft
from flowchan.transport.authentication import Hello
from flowchan.transport.interrupts import is_interrupt
from flowchan.transport.listener import AuthenticatedListener

SIZE = struct.Struct("<q")
LEFT_WORD = -1  # a sender that leaves sends this number in place of a size
# If no other message is waiting, the calling thread itself sends messages of at most this many bytes.
SENT_AT_ONCE = 16 * 1024
READ_AHEAD = 8  # number of messages that the receiving thread reads ahead
BUFFER = 1 << 16
POLL_INTERVAL_S, LISTENER_INTERVAL_S, WATCH_AFTER_S = 0.05, 1.0, 0.2

LEFT, DIED, UNKNOWN = "left", "died", "unknown"
"""How a peer ended. ``UNKNOWN``: it was already gone when this member first tried to connect."""


Framed = tuple[bytes, bytes]
"""Size of a message, and the message itself."""


class RemotePeers:
    """Peers of member ``rank`` on other hosts.

    Member ``rank`` accepts the connections of its peers at ``listener``, and the peers listen on
    ``addresses``.
    """

    def __init__(
        self, rank: int, listener: AuthenticatedListener, addresses: Sequence[str], connector: Connector
    ) -> None:
        self.rank, self.addresses, self.connector = rank, addresses, connector
        self.is_closed = self._is_leaving = False
        self.leaders: SimpleQueue[tuple[int, socket.socket]] = SimpleQueue()
        self._listener = listener
        self._peers: dict[int, RemotePeer] = {}
        self._watchers: list[socket.socket] = []  # connections over which other members watch this one
        # Reentrant, because the garbage collector may drop instances in a thread that holds the lock.
        self._lock = threading.RLock()
        self._wake = os.fdopen(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), "r+b", 0)
        self._thread = start("listener", self._serve)

    def peer(self, rank: int) -> RemotePeer:
        with self._lock:
            if rank not in self._peers:
                self._peers[rank] = RemotePeer(self, rank)
                if self._is_leaving:
                    self._peers[rank].receive_no_more()
            return self._peers[rank]

    def adopt(self, sock: socket.socket, hello: Hello) -> None:
        """Accept a connection that a sender, a watcher or another leader has opened."""
        if "host" in hello:
            self.leaders.put((hello["host"], sock))
        elif "watches" in hello:
            self._watchers.append(sock)
        else:
            self.peer(hello["rank"]).attach(sock)

    def next_leader(self, missing: Sequence[int], give_up: float) -> tuple[int, socket.socket]:
        """Wait until one of the ``missing`` leaders connects.

        Args:
            missing: Hosts of the leaders.
            give_up: Monotonic time at which to stop waiting.

        Returns:
            The leader's host, and the connection to it.

        Raises:
            MemberDied: One of the leaders is gone.
            TimeoutError: None of the leaders connected in time.
        """
        watch_at = time.monotonic() + WATCH_AFTER_S
        while True:
            ended = [peer for peer in map(self.peer, missing) if peer.has_ended()]
            remaining = give_up - time.monotonic()
            with contextlib.suppress(Empty):
                return self.leaders.get(timeout=0.0 if ended else max(0.0, min(POLL_INTERVAL_S, remaining)))
            if ended:
                raise ended[0].death_error("connecting")
            if remaining <= 0:
                raise TimeoutError(f"the leaders of other hosts, ranks {missing}, did not connect in time")
            if time.monotonic() > watch_at:
                for peer in map(self.peer, missing):
                    peer.incoming()

    def _serve(self) -> None:
        """Accept connections, and notice when watched peers end."""
        while not self.is_closed:
            peers = [*self._peers.values()]
            watched = {peer.watch.fileno(): peer for peer in peers if peer.watch is not None}
            waiting = select.poll()
            for fd in (self._wake.fileno(), self._listener.fileno(), *watched):
                waiting.register(fd, select.POLLIN)
            ended = [watched[fd] for fd, _ in waiting.poll(LISTENER_INTERVAL_S * 1000) if fd in watched]
            ended += [peer for peer in peers if peer.was_refused]
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake.fileno())
            with contextlib.suppress(TimeoutError):
                while True:
                    self._listener.accept(0.0, self.adopt)
            for peer in peers:
                peer.begin_watch()
            for peer in ended:  # by now, all earlier connections of these peers have been accepted
                peer.receive_end()
        for sock in self._watchers:
            with contextlib.suppress(OSError), sock:
                sock.send(SIZE.pack(LEFT_WORD))
        for peer in [*self._peers.values()]:
            peer.end()
        self._listener.close()
        while not self.leaders.empty():
            self.leaders.get()[1].close()
        with self._lock:
            self._wake.close()

    def wake_thread(self) -> None:
        with self._lock:
            if not self._wake.closed:
                os.eventfd_write(self._wake.fileno(), 1)

    def drop(self) -> None:
        """Leave without waiting for sent messages to be received."""
        for peer in [*self._peers.values()]:
            peer.send_no_more()
        self._stop()

    def close(self, wait: bool = True) -> None:
        """Leave the group.

        If ``wait`` is true, return once all sent messages have been received or their receivers are gone.
        Otherwise, drop unsent messages.
        """
        with self._lock:
            self._is_leaving = True
            peers = [*self._peers.values()]
        for peer in peers:
            peer.receive_no_more()
            peer.send_no_more() if wait else peer.abandon()
        for peer in peers:
            peer.join()
        self._stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _stop(self) -> None:
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self.wake_thread()


class RemotePeer:
    """Member ``rank`` on another host, as seen by the member ``owner``."""

    def __init__(self, owner: RemotePeers, rank: int) -> None:
        self.watch: socket.socket | None = None
        self.was_refused = False  # true if this peer has refused an attempt to watch it
        self._owner, self._rank = owner, rank
        self._in: Channel[bytearray] = Channel(READ_AHEAD)
        self._again: list[bytearray] = []  # messages that interrupted calls have put back
        self._out: tuple[Channel[Framed], Out[Framed], threading.Thread] | None = None
        self._waiting = 0  # number of messages that the sending thread has not sent yet
        self._incoming: socket.socket | None = None
        self._sock: socket.socket | None = None  # connection over which this member sends
        self._ended = ""
        self.wants_watch = self._is_watched = self._sends_no_more = self._is_abandoned = (
            self._receives_no_more
        ) = False
        # Guards the flags, so that there is at most one connection in each direction.
        self._lock = threading.Lock()

    # --- sending ---

    def send(self, x: Any, timeout: float | None) -> None:
        message = dumps(x)
        framed = SIZE.pack(len(message)), message
        with self._lock:
            if self._sends_no_more:
                raise self.death_error("send")
            if len(message) <= SENT_AT_ONCE and not self._waiting and self._send_now(b"".join(framed)):
                return
            if self._out is None:
                messages: Channel[Framed] = Channel(capacity=64)
                writer = messages.writer()
                sender = start("send", self._pass_on, messages)
                # Assign the channel, its writer and its thread in one statement. If Ctrl-C prevents the
                # assignment, the writer is dropped, which closes the channel and ends the thread.
                self._out = messages, writer, sender
            self._waiting += 1
        try:
            self._out[0].put(framed, timeout)
        except (Broken, Closed) as error:
            raise self.death_error("send") from error
        except BaseException:
            with self._lock:
                self._waiting -= 1
            raise

    def _send_now(self, data: bytes) -> bool:
        """Send as many bytes as the kernel accepts without waiting. The peer's thread sends the rest later.

        Return whether the kernel accepted any bytes.
        """
        if self._sock is None or self._out is None:
            return False
        # Ctrl-C takes effect either before the bytes are sent or after their count is in this list.
        sent: list[int] = []
        try:
            sent.extend(map(self._sock.send, (data,), (socket.MSG_DONTWAIT,)))
            if rest := data[sent[0] :]:
                self._waiting += 1
                self._out[0].put((b"", rest), 0.0)
        except BaseException as error:
            if sent and sent[0] < len(data):
                _shut_down(self._sock)  # the peer has got only a part of the message
            if sent or not isinstance(error, OSError) or is_interrupt(error):
                raise
        return bool(sent)

    def _pass_on(self, messages: Channel[Framed]) -> None:
        """Connect when the first message arrives, and send all queued messages.

        The thread connects only once, because a second connection would confuse the receiver.
        """
        try:
            first = messages.get()
            hello = {"rank": self._owner.rank}
            with self._connect(hello, lambda: not self._is_abandoned) as self._sock:
                if self._is_abandoned:
                    return
                for parts in itertools.chain([first], messages):
                    for part in parts:
                        self._sock.sendall(part)
                    with self._lock:
                        self._waiting -= 1
                self._sock.sendall(SIZE.pack(LEFT_WORD))
        except OSError as error:
            messages.abort(error)
        except ChannelError:
            pass  # nothing was sent, or the queued messages were dropped

    def _connect(self, hello: Hello, wanted: Callable[[], bool]) -> socket.socket:
        return self._owner.connector.connect(self._owner.addresses[self._rank], hello, wanted)

    def connect_leader(self, host: int, give_up: float) -> socket.socket:
        """Connect a host's leader to this peer, which is also a leader.

        Args:
            host: Host of this process.
            give_up: Monotonic time at which to stop trying.

        Returns:
            The connection.

        Raises:
            MemberDied: The peer is gone.
        """
        try:
            address = self._owner.addresses[self._rank]
            return self._owner.connector.connect(address, {"host": host}, lambda: True, give_up)
        except ConnectionRefusedError:
            raise self.death_error("connecting") from None

    def send_no_more(self) -> None:
        with self._lock:
            self._sends_no_more = True
        if self._out is not None:
            self._out[0].close()

    def abandon(self) -> None:
        """Drop the messages that are waiting to be sent."""
        self._is_abandoned = True
        self.send_no_more()
        if self._out is not None:
            self._out[0].abort()
        _shut_down(self._sock)

    def join(self) -> None:
        """Wait until all messages have been sent or can no longer be delivered."""
        if self._out is not None and not self._is_abandoned:
            self._out[2].join()

    # --- receiving ---

    def incoming(self) -> Channel[bytearray]:
        """Return the channel of messages from this peer. Watch the peer if it has sent nothing yet."""
        if not self.wants_watch and self._incoming is None and not self._ended:
            self.wants_watch = True
            self._owner.wake_thread()
        return self._in

    def begin_watch(self) -> None:
        """Start to watch this peer, if requested.

        Call this only from the serving thread, because Ctrl-C in the main thread could interrupt the start of
        the new thread.
        """
        if self.wants_watch and not self._is_watched:
            self._is_watched = True
            start("watch", self._watch)

    def _watch(self) -> None:
        def wanted() -> bool:
            return self._incoming is None and not self._receives_no_more

        while wanted():
            try:
                self.watch = self._connect({"watches": self._owner.rank}, wanted)
                self._owner.wake_thread()
                return
            except ConnectionRefusedError:
                self.was_refused = True
                self._owner.wake_thread()
                return
            except OSError:  # for example, the network is down
                time.sleep(LISTENER_INTERVAL_S)

    def receive_end(self) -> None:
        """Record how a watched peer ended, after all of its earlier connections have been accepted."""
        watch, self.watch, self.was_refused = self.watch, None, False
        how = DIED if watch is not None else UNKNOWN
        if watch is not None:
            with contextlib.suppress(OSError), watch:
                how = LEFT if watch.recv(SIZE.size) else DIED
        if self._incoming is None:
            self._end(how)

    def attach(self, sock: socket.socket) -> None:
        """Receive messages from this peer over ``sock``."""
        self._incoming = sock
        start("receive", self._read, sock)

    def _read(self, sock: socket.socket) -> None:
        how = DIED
        sock.settimeout(None)
        with contextlib.suppress(OSError, EOFError), sock, sock.makefile("rb", BUFFER) as stream:
            while (size := SIZE.unpack(_exactly(stream, SIZE.size))[0]) != LEFT_WORD:
                message = _exactly(stream, size)
                with contextlib.suppress(ChannelError):  # this member may have stopped receiving
                    self._in.put(message)
            how = LEFT
        self._end(how)

    def _end(self, how: str) -> None:
        self._ended = self._ended or how
        self._in.close()

    def take(self, channel: Any, timeout: float | None, use: Use) -> Any:
        return take(self._again, channel, timeout, lambda message: use(loads(message)))

    def receive_no_more(self) -> None:
        """End calls that wait for a message. Drop later messages, so that their sender need not wait."""
        self._receives_no_more = True
        self._in.abort()

    def end(self) -> None:
        """Close the connections over which this member receives."""
        _shut_down(self._incoming)
        if self.watch is not None:
            self.watch.close()

    # --- when a peer has ended ---

    def has_ended(self) -> bool:
        return bool(self._ended)

    def has_left(self) -> bool:
        """Return whether the peer left the group, or was already gone when this member first connected."""
        return self._ended in (LEFT, UNKNOWN)

    def death_error(self, call: str) -> GroupError:
        if self._sends_no_more:
            return GroupError(f"{call} failed: this member has left the group")
        has_left = self._ended == LEFT or (self._ended == UNKNOWN and call == "receive_any")
        kind, word = (
            (MemberLeft, "has left") if has_left else (MemberDied, "died, has left, or is unreachable")
        )
        rank = self._rank
        return kind(f"{call} failed: rank {rank}, on another host, {word}", (rank,), call)


def start(what: str, work: Callable[..., None], *given: Any) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=work, args=given, name=f"flowchan-collective-{what}", daemon=True)
    thread.start()
    return thread


def _shut_down(sock: socket.socket | None) -> None:
    """Shut down a socket, which ends calls that are waiting for it.

    The ``shutdown`` method of a TLS socket is not used, because it would continue in plain text.
    """
    if sock is not None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _exactly(stream: Any, size: int) -> bytearray:
    """Read exactly ``size`` bytes.

    Raises:
        EOFError: The stream ended too early.
    """
    data = bytearray(size)
    if stream.readinto(data) != size:
        raise EOFError
    return data

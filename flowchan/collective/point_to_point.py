"""Exchange messages between pairs of members, in the order in which they were sent.

The first message from one member to another creates a channel, which also carries all later messages. On one
host, the sender publishes the channel in the group's memory, and the receiver opens it there. Between hosts,
a connection joins two channels (``messages_remote.py``). In both cases, the receiver reads an ordinary
channel, and can therefore wait for all other members at once.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flowchan.channel.channel import Channel, In, Out
from flowchan.channel.channel import _arrive as arrive
from flowchan.channel.select import NothingReady, select
from flowchan.collective.deadline import RemainingTime, countdown
from flowchan.collective.handles import Handle
from flowchan.errors import Broken, Closed, Drained, Empty, Full, GroupError, MemberDied, MemberLeft
from flowchan.transport.descriptors import Borrowed, lacks
from flowchan.transport.interrupts import append_result, is_interrupt, unless_interrupted

POLL_INTERVAL_S, LONGEST_INTERVAL_S = 0.001, 0.02
CHANNELS_OF_ONE_SELECT = 128
_PACKED = 1 << 32
_LEFT = 1  # the core's status code for a member that has left
_random = random.Random()  # a separate generator does not affect the program's random numbers


Use = Callable[[Any], Any]
"""Function to apply to a received value. If Ctrl-C interrupts it, the next call receives that value again."""


def unchanged(x: Any) -> Any:
    """Return ``x``."""
    return x


class Peer(Protocol):
    """Another member, with which this one exchanges messages."""

    def send(self, x: Any, timeout: float | None) -> None: ...
    def incoming(self) -> Any:
        """Return the channel of messages from the peer; None if it has sent none."""

    def take(self, channel: Any, timeout: float | None, use: Use) -> Any:
        """Receive a value from the channel, and return ``use(value)``."""

    def has_ended(self) -> bool:
        """Return whether the peer's channel will get no more messages."""

    def has_left(self) -> bool:
        """Return whether this member knows that a peer which is gone has left the group."""

    def death_error(self, call: str) -> GroupError:
        """Return the error for a call with a peer that is gone."""


class ReceiveHandle(Handle):
    """Handle of a receive that was started with ``wait=False``.

    The receive makes progress only in :meth:`wait` and :meth:`done`.
    """

    def __init__(self, messages: Messages, source: int, use: Use) -> None:
        self._messages, self._source, self._use = messages, source, use
        self._found: list[Any] = []
        self.error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> Any:
        self._messages.progress(self._source, countdown(timeout), self)
        if self.error is not None:
            raise self.error
        if not self._found:
            raise self._messages.late(self._source)
        return self._found[0]

    def done(self) -> bool:
        self._messages.progress(self._source, lambda: 0.0, self)
        return self.has_ended

    @property
    def has_ended(self) -> bool:
        return bool(self._found) or self.error is not None

    def keep(self, x: Any) -> None:
        append_result(self._found, self._use, x)

    def forget(self) -> None:
        """Forget a received value that an interrupted call has put back, and wait for the value again."""
        self._found.clear()


class Messages:
    """Messages of member ``rank`` of ``size``. ``peer`` creates the object for another member."""

    def __init__(self, rank: int, size: int, peer: Callable[[int], Peer]) -> None:
        self._rank, self._size, self._peer_of = rank, size, peer
        self._peers: dict[int, Peer] = {}
        self._lock = threading.Lock()
        # Receive operations by source, in the order in which they were started.
        self._started: dict[int, deque[ReceiveHandle]] = {}

    def peer(self, rank: int) -> Peer:
        if rank not in self._peers:
            with self._lock:
                self._peers.setdefault(rank, self._peer_of(rank))
        return self._peers[rank]

    def send(self, x: Any, to: int, timeout: float | None) -> None:
        peer = self._peers.get(to) or self.peer(to)
        peer.send(x, timeout)

    def receive(self, source: int, timeout: float | None, use: Use = unchanged) -> Any:
        """Return ``use(value)`` for the next value.

        If Ctrl-C interrupts the call, the next call receives that value.
        """
        if self._started.get(source):
            remaining = countdown(timeout)
            self.progress(source, remaining)
            if self._started[source]:
                raise self.late(source)
            timeout = remaining()
        return self._receive(source, timeout, use)

    def start(self, source: int, use: Use) -> ReceiveHandle:
        """Start a receive, which gets its message after all receives that were started earlier."""
        handle = ReceiveHandle(self, source, use)
        self._started.setdefault(source, deque()).append(handle)
        return handle

    def progress(self, source: int, remaining: RemainingTime, until: ReceiveHandle | None = None) -> None:
        """Receive messages from a source for the receives that were started, up to the handle ``until``."""
        started = self._started.get(source, ())
        while started and not (until is not None and until.has_ended):
            first = started[0]
            if not first.has_ended:
                try:
                    self._receive(source, remaining(), first.keep)
                except unless_interrupted(TimeoutError):
                    return
                except BaseException as error:
                    if lacks(error) or is_interrupt(error):
                        first.forget()
                        raise
                    if isinstance(error, ReferenceError):  # the member has been garbage-collected
                        error = GroupError("receive failed: this member has left the group")
                    first.error = error
            if started and started[0] is first:
                started.popleft()

    def late(self, source: int) -> TimeoutError:
        """Return the error for a message that did not arrive in time."""
        return TimeoutError(f"receive: rank {source} sent nothing to rank {self._rank} in time")

    def _receive(self, source: int, timeout: float | None, use: Use) -> Any:
        peer = self._peers.get(source) or self.peer(source)
        try:
            if (channel := peer.incoming()) is not None:
                return peer.take(channel, timeout, use)
            return self._receive_first(peer, countdown(timeout), use)
        except Empty:
            raise self.late(source) from None
        except (Broken, Drained) as error:
            raise peer.death_error("receive") from error

    def _receive_first(self, peer: Peer, remaining: Callable[[], float | None], use: Use) -> Any:
        """Receive from a peer whose channel this member has not opened yet."""
        while (channel := peer.incoming()) is None:
            if peer.has_ended() and peer.incoming() is None:
                raise peer.death_error("receive")
            if remaining() == 0:
                raise Empty
            time.sleep(POLL_INTERVAL_S)
        return peer.take(channel, remaining(), use)

    def receive_any(self, timeout: float | None) -> tuple[Any, int]:
        remaining = countdown(timeout)
        for source, started in self._started.items():
            self.progress(source, lambda: 0.0)
            if started:
                raise GroupError(
                    f"receive_any: earlier receives must be complete, but the receive from rank {source} is "
                    "still in progress; wait for its handle first"
                )
        others = {rank: self.peer(rank) for rank in range(self._size) if rank != self._rank}
        while True:
            # Find the members that have sent their last message.
            ended = {rank for rank, peer in others.items() if peer.has_ended()}
            died = {rank for rank in ended if not others[rank].has_left()}
            over = died or (ended if len(ended) == len(others) else set())
            opened = self._opened(others)
            wait = 0.0 if over else remaining()
            # Poll if some members have neither ended nor opened a channel, because their first message may
            # still arrive.
            if not others.keys() <= opened.keys() | ended:
                wait = POLL_INTERVAL_S if wait is None else min(POLL_INTERVAL_S, wait)
            if (found := self._from_one(opened, opened.keys() - ended, wait)) is not None:
                return found
            if over:
                raise others[min(over)].death_error("receive_any")
            if remaining() == 0:
                raise TimeoutError(f"receive_any: no member sent anything to rank {self._rank} in time")

    def _opened(self, peers: dict[int, Peer]) -> dict[int, Any]:
        """Return the channels that peers have opened to this member so far."""
        channels = {}
        for rank, peer in peers.items():
            with contextlib.suppress(MemberDied):
                if (channel := peer.incoming()) is not None:
                    channels[rank] = channel
        return channels

    def _from_one(
        self, channels: dict[int, Any], local: set[int], wait: float | None
    ) -> tuple[Any, int] | None:
        """Return a message from any of the channels, or wait for a message in a channel of ``local``."""
        for rank in _random.sample(list(channels), len(channels)):
            # Do not use a ``with`` block: its exit is a call, and the message would be lost if Ctrl-C
            # interrupted that call.
            try:
                return self._peers[rank].take(channels[rank], 0.0, unchanged), rank
            except (Empty, Drained, Broken):
                continue
        ranks = _random.sample(sorted(local), min(len(local), CHANNELS_OF_ONE_SELECT))
        if ranks:
            with contextlib.suppress(NothingReady, Broken):
                wait = wait if len(ranks) == len(local) else POLL_INTERVAL_S
                # Only wait: a message that select received would be lost if Ctrl-C came right after the call.
                found = select(ready=[_channel(channels[rank]) for rank in ranks], timeout=wait)
                if not found.channel.drained:
                    return None  # the caller tries again and receives the message
        if wait != 0:
            time.sleep(POLL_INTERVAL_S)  # poll: select cannot wait for a member's end or first message
        return None


def take(again: list[Any], channel: Any, timeout: float | None, use: Use) -> Any:
    """Receive a message and return ``use(message)``, without losing it to a Ctrl-C.

    If an interrupt or a lack of memory ends the call, the message goes back into ``again``. Callers must
    return the result without another call, because Python handles signals only at calls.

    Args:
        again: Messages to return before the messages in the channel.
        channel: A channel or port.
        timeout: Seconds to wait; None means no limit.
        use: Called with the message.

    Returns:
        The result of ``use``.
    """
    taken: list[Any] = []
    try:
        if again:
            with contextlib.suppress(IndexError):  # another thread may have taken the message
                append_result(taken, again.pop, 0)
        if not taken:
            append_result(taken, channel.get, timeout)
        return use(taken[0])
    except BaseException as error:
        if taken and (lacks(error) or is_interrupt(error)):
            again.insert(0, taken[0])
        raise


def _channel(end: In[Any] | Channel[Any]) -> Channel[Any]:
    return end.channel if isinstance(end, In) else end


class SharedMember(Protocol):
    """Methods of a single-host group's member that this module calls.

    ``_ranks`` lists the ranks that errors show.
    """

    _ranks: Sequence[int]

    @property
    def rank(self) -> int: ...
    def _see(self, member: int) -> tuple[int, int, int, int, bool, bool, bool, bool]: ...
    def _channel_from(self, member: int) -> tuple[int, int, int] | None: ...
    def _publish_channel(self, to: int, at: int, inode: int) -> None: ...


class LocalPeers:
    """The other members on this host, by their index in the group's memory."""

    def __init__(self, member: SharedMember) -> None:
        self._member = weakref.proxy(member)  # weak, so that an unused member is closed at once
        self._known: dict[int, SameHostPeer] = {}

    def peer(self, index: int) -> SameHostPeer:
        return self._known.setdefault(index, SameHostPeer(self._member, index))

    def close(self, wait: bool = True) -> None:
        """Close the channels, after all live receivers have opened them."""
        for peer in [*self._known.values()]:
            peer.close(wait)


class SameHostPeer:
    """Another member on this host. ``index`` is its index in the group of ``member``."""

    def __init__(self, member: SharedMember, index: int) -> None:
        self._member, self._index = member, index
        self._made: Out[Any] | None = None
        self._out: Out[Any] | None = None  # set to _made when the channel is published
        # True once the receiver has opened the channel. From then on, the receiver's exit breaks the channel.
        self._is_found = False
        self._in: list[In[Any]] = []
        self._again: list[Any] = []  # messages that interrupted calls have put back
        self._lock = threading.Lock()  # held while the channel is created or opened (once each)

    def send(self, x: Any, timeout: float | None) -> None:
        port = self._out or self._show()
        try:
            self._is_found = self._is_found or self._is_open(port)
            if self._is_found:
                port.put(x, timeout)
            else:
                self._put_unfound(port, x, timeout)
        except (Broken, Closed) as error:
            raise self.death_error("send") from error

    def _show(self) -> Out[Any]:
        """Create and publish the channel.

        If Ctrl-C interrupts the call before the channel is published, the next send publishes it.
        """
        with self._lock:
            if self._made is None:
                made: Channel[Any] = Channel(across="processes")
                self._made = made.writer()
            channel = self._made.channel
            at = channel._fd + _PACKED * (channel._socket + 1)
            self._member._publish_channel(self._index, at, os.fstat(channel._fd).st_ino)
            self._out = self._made
        return self._out

    def _put_unfound(self, port: Out[Any], x: Any, timeout: float | None) -> None:
        """Put a message for a receiver that has not opened the channel yet.

        If such a receiver ends, the channel does not break. The receiver's state is therefore checked here.
        If the channel is full, wait until the receiver opens it, because each new attempt would serialise the
        message again.
        """
        remaining = countdown(timeout)
        if self.has_ended():
            raise self.death_error("send")
        try:
            port.put(x, 0.0)
            return
        except Full:
            pause = POLL_INTERVAL_S
            while not self._is_open(port):
                if self.has_ended():
                    raise self.death_error("send") from None
                if remaining() == 0:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_INTERVAL_S)
        port.put(x, remaining())

    def incoming(self) -> In[Any] | None:
        """Open the channel of messages from this peer.

        Returns:
            The reading port, or None if the peer has sent nothing.

        Raises:
            MemberDied: The channel can no longer be opened.
        """
        if self._in:
            return self._in[0]
        if (where := self._member._channel_from(self._index)) is not None:
            pid, at, inode = where
            socket, fd = divmod(at, _PACKED)
            with self._lock:
                try:
                    if not self._in:
                        channel = arrive(Borrowed(pid, fd, socket - 1, inode), "")
                        # Store the port in the same call that creates it: if Ctrl-C dropped the port, the
                        # sender's channel would break.
                        append_result(self._in, In, channel)
                except (Broken, OSError) as error:
                    raise self.death_error("receive") from error
        return self._in[0] if self._in else None

    def take(self, channel: Any, timeout: float | None, use: Use) -> Any:
        return take(self._again, channel, timeout, use)

    def close(self, wait: bool) -> None:
        with self._lock:
            made, self._made, self._out = self._made, None, None
        if made is not None:
            while wait and not self._is_open(made) and not self.has_ended():
                time.sleep(POLL_INTERVAL_S)
            made.close()
        for port in self._in:
            port.close()
        self._in = []

    @staticmethod
    def _is_open(port: Out[Any]) -> bool:
        stats = port.channel.stats()
        return bool(stats.readers or stats.items_out) or port.closed

    def has_ended(self) -> bool:
        _, status, _, _, _, alive, *_ = self._member._see(self._index)
        return bool(status) or not alive

    def has_left(self) -> bool:
        return bool(self._member._see(self._index)[1] == _LEFT)

    def death_error(self, call: str) -> GroupError:
        if self._member._see(self._member.rank)[-1]:
            return GroupError(f"{call} failed: this member has left the group")
        kind, how = (MemberLeft, "has left") if self.has_left() else (MemberDied, "died")
        rank = self._member._ranks[self._index]
        return kind(f"{call} failed: rank {rank} {how}", (rank,), call)

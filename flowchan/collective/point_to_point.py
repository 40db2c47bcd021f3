"""Messages between two members, received in the order in which they were sent.

The first message from one member to another creates a channel for all messages that follow. On one host the
sender publishes the channel in the group's memory, and the receiver opens it there. Between hosts a
connection joins two channels (``messages_remote.py``). Both kinds are received in the same way, so a member
can wait for all others.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flowchan.channel.channel import Channel, In, Out
from flowchan.channel.channel import _arrive as arrive
from flowchan.channel.select import NothingReady, select
from flowchan.collective.deadline import countdown
from flowchan.errors import Broken, Closed, Drained, Empty, Full, GroupError, MemberDied, MemberLeft
from flowchan.transport.descriptors import Borrowed
from flowchan.transport.interrupts import append_result

POLL_INTERVAL_S, LONGEST_INTERVAL_S = 0.001, 0.02
CHANNELS_OF_ONE_SELECT = 128
_PACKED = 1 << 32
_LEFT = 1  # number in the core
_random = random.Random()  # leaves the program's random state unchanged


class Peer(Protocol):
    """Another member, as the sender or receiver of messages."""

    def send(self, x: Any, timeout: float | None) -> None: ...
    def incoming(self) -> Any:
        """Return the channel of its messages, or None if it has sent none."""

    def take(self, channel: Any, timeout: float | None) -> Any:
        """Receive a value from that channel."""

    def loads(self, item: Any) -> Any:
        """Return the value of an item of that channel."""

    def is_gone(self) -> bool:
        """Return whether its channel will get no further messages."""

    def has_left(self) -> bool:
        """Return whether a member that is gone left the group, as far as this member knows."""

    def gone(self, call: str) -> GroupError:
        """Return the error for a call with a member that is gone."""


class Messages:
    """The messages of member ``rank`` of ``size``. ``peer`` makes the object for another member."""

    def __init__(self, rank: int, size: int, peer: Callable[[int], Peer]) -> None:
        self._rank, self._size, self._peer_of = rank, size, peer
        self._peers: dict[int, Peer] = {}
        self._lock = threading.Lock()

    def peer(self, rank: int) -> Peer:
        if rank not in self._peers:
            with self._lock:
                self._peers.setdefault(rank, self._peer_of(rank))
        return self._peers[rank]

    def send(self, x: Any, to: int, timeout: float | None) -> None:
        peer = self._peers.get(to) or self.peer(to)
        peer.send(x, timeout)

    def receive(self, source: int, timeout: float | None) -> Any:
        peer = self._peers.get(source) or self.peer(source)
        try:
            if (channel := peer.incoming()) is not None:
                return peer.take(channel, timeout)
            return self._receive_first(peer, countdown(timeout))
        except Empty:
            raise TimeoutError(f"receive: rank {source} sent nothing to rank {self._rank} in time") from None
        except (Broken, Drained) as error:
            raise peer.gone("receive") from error

    def _receive_first(self, peer: Peer, left: Callable[[], float | None]) -> Any:
        """Receive from a peer whose channel this member has not opened yet."""
        while (channel := peer.incoming()) is None:
            if peer.is_gone() and peer.incoming() is None:
                raise peer.gone("receive")
            if left() == 0:
                raise Empty
            time.sleep(POLL_INTERVAL_S)
        return peer.take(channel, left())

    def receive_any(self, timeout: float | None) -> tuple[Any, int]:
        left = countdown(timeout)
        others = {rank: self.peer(rank) for rank in range(self._size) if rank != self._rank}
        while True:
            # they have sent all their messages
            gone = {rank for rank, peer in others.items() if peer.is_gone()}
            died = {rank for rank in gone if not others[rank].has_left()}
            over = died or (gone if len(gone) == len(others) else set())
            opened = self._opened(others)
            wait = 0.0 if over else left()
            if not others.keys() <= opened.keys() | gone:  # one of these may open its channel
                wait = POLL_INTERVAL_S if wait is None else min(POLL_INTERVAL_S, wait)
            if (found := self._from_one(opened, opened.keys() - gone, wait)) is not None:
                return found
            if over:
                raise others[min(over)].gone("receive_any")
            if left() == 0:
                raise TimeoutError(f"receive_any: no member sent anything to rank {self._rank} in time")

    def _opened(self, peers: dict[int, Peer]) -> dict[int, Any]:
        """Return the channels of the peers that have one."""
        channels = {}
        for rank, peer in peers.items():
            with contextlib.suppress(MemberDied):
                if (channel := peer.incoming()) is not None:
                    channels[rank] = channel
        return channels

    def _from_one(
        self, channels: dict[int, Any], here: set[int], wait: float | None
    ) -> tuple[Any, int] | None:
        """Return an item that any of the channels has, or wait for the channels of the ranks in ``here``."""
        for rank in _random.sample(list(channels), len(channels)):
            with contextlib.suppress(Empty, Drained, Broken):
                return self._peers[rank].take(channels[rank], 0.0), rank
        ranks = _random.sample(sorted(here), min(len(here), CHANNELS_OF_ONE_SELECT))
        if ranks:
            with contextlib.suppress(NothingReady, Drained, Broken):
                wait = wait if len(ranks) == len(here) else POLL_INTERVAL_S
                done = select([channels[rank] for rank in ranks], timeout=wait)
                (rank,) = (rank for rank in ranks if channels[rank] is done.channel)
                return self._peers[rank].loads(done.item), rank
        if wait != 0:
            time.sleep(POLL_INTERVAL_S)  # until a member is gone or sends its first message
        return None


class SharedMember(Protocol):
    """The methods of a member on one host that messages use. ``_ranks`` are the ranks in errors."""

    _ranks: Sequence[int]

    @property
    def rank(self) -> int: ...
    def _see(self, member: int) -> tuple[int, int, int, int, bool, bool, bool, bool]: ...
    def _lane_from(self, member: int) -> tuple[int, int, int] | None: ...
    def _show_lane(self, to: int, at: int, inode: int) -> None: ...


class LocalPeers:
    """The other members on one host, by their number in the group's memory."""

    def __init__(self, member: SharedMember) -> None:
        self._member = weakref.proxy(member)  # dropping a member must close it at once
        self._known: dict[int, SameHostPeer] = {}

    def peer(self, place: int) -> SameHostPeer:
        return self._known.setdefault(place, SameHostPeer(self._member, place))

    def close(self, wait: bool = True) -> None:
        """Close the channels, after waiting for live receivers that have not opened theirs."""
        for peer in [*self._known.values()]:
            peer.close(wait)


class SameHostPeer:
    """Another member on this host, number ``place`` in the group of ``member``."""

    def __init__(self, member: SharedMember, place: int) -> None:
        self._member, self._place = member, place
        self._made: Out[Any] | None = None
        self._out: Out[Any] | None = None  # the same port, once the channel is published
        self._is_found = False  # the receiver has opened the channel, so its end breaks the channel
        self._in: list[In[Any]] = []
        self._lock = threading.Lock()  # a channel is created once and opened once

    def send(self, x: Any, timeout: float | None) -> None:
        port = self._out or self._show()
        try:
            self._is_found = self._is_found or self._is_open(port)
            if self._is_found:
                port.put(x, timeout)
            else:
                self._put_unfound(port, x, timeout)
        except (Broken, Closed) as error:
            raise self.gone("send") from error

    def _show(self) -> Out[Any]:
        """Create and publish the channel. If Ctrl-C comes before it is published, the next send publishes
        it."""
        with self._lock:
            if self._made is None:
                made: Channel[Any] = Channel(across="processes")
                self._made = made.writer()
            channel = self._made.channel
            at = channel._fd + _PACKED * (channel._socket + 1)
            self._member._show_lane(self._place, at, os.fstat(channel._fd).st_ino)
            self._out = self._made
        return self._out

    def _put_unfound(self, port: Out[Any], x: Any, timeout: float | None) -> None:
        """Put a message for a receiver that has not opened the channel.

        The end of such a receiver does not break the channel, so its state is checked. If the channel is
        full, wait until the receiver opens it, because each try to put would serialize the item again.
        """
        left = countdown(timeout)
        if self.is_gone():
            raise self.gone("send")
        try:
            port.put(x, 0.0)
            return
        except Full:
            pause = POLL_INTERVAL_S
            while not self._is_open(port):
                if self.is_gone():
                    raise self.gone("send") from None
                if left() == 0:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_INTERVAL_S)
        port.put(x, left())

    def incoming(self) -> In[Any] | None:
        """Return the channel of its messages, or None.

        Raises:
            MemberDied: The channel can no longer be opened.
        """
        if self._in:
            return self._in[0]
        if (where := self._member._lane_from(self._place)) is not None:
            pid, at, inode = where
            socket, fd = divmod(at, _PACKED)
            with self._lock:
                try:
                    if not self._in:
                        channel = arrive(Borrowed(pid, fd, socket - 1, inode), "")
                        # Store the port in the same call that creates it: a port dropped by Ctrl-C would
                        # break the sender's channel.
                        append_result(self._in, In, channel)
                except (Broken, OSError) as error:
                    raise self.gone("receive") from error
        return self._in[0] if self._in else None

    def take(self, channel: Any, timeout: float | None) -> Any:
        return channel.get(timeout)

    def loads(self, item: Any) -> Any:
        return item

    def close(self, wait: bool) -> None:
        with self._lock:
            made, self._made, self._out = self._made, None, None
        if made is not None:
            while wait and not self._is_open(made) and not self.is_gone():
                time.sleep(POLL_INTERVAL_S)
            made.close()
        for port in self._in:
            port.close()
        self._in = []

    @staticmethod
    def _is_open(port: Out[Any]) -> bool:
        stats = port.channel.stats()
        return bool(stats.readers or stats.items_out) or port.closed

    def is_gone(self) -> bool:
        _, gone, _, _, _, alive, *_ = self._member._see(self._place)
        return bool(gone) or not alive

    def has_left(self) -> bool:
        return bool(self._member._see(self._place)[1] == _LEFT)

    def gone(self, call: str) -> GroupError:
        if self._member._see(self._member.rank)[-1]:
            return GroupError(f"{call} failed: this member has left the group")
        kind, how = (MemberLeft, "has left") if self.has_left() else (MemberDied, "died")
        rank = self._member._ranks[self._place]
        return kind(f"{call} failed: rank {rank} {how}", (rank,), call)

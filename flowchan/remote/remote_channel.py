"""Implement remote channels: channels across hosts that another process owns (C16).

Algorithm. Items pass through rings in this process, which a link to the owner fills and empties. Many items
can be in transit at a time, so calls do not wait for a round trip. ``reader()`` and ``writer()`` return
ports, each with a separate ring. Calls on the channel itself (*plain calls*: ``put``, ``get`` and ``select``)
share two rings, one in each direction. The ports of these rings open at the first use, but count neither as
readers nor as writers. Plain calls are native and find the ring in C++, so ``KeyboardInterrupt`` cannot cause
an item to be lost between the ring and its receiver.

Invariants. The owner sends items to plain calls only while one of them waits. After a few milliseconds, it
takes back the items that no call has received. The owner allows only as many plain puts as its channel has
room for. The channel therefore keeps its capacity, unless two processes use the same room at the same time. A
call that times out asks the owner once more before it fails, because an item may be in transit. The page
docs/remote_channels.md lists the differences from a local channel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import threading
import time
import weakref
from typing import Any, NamedTuple, NoReturn, TypeVar

from flowchan import _core
from flowchan.channel import awaiting
from flowchan.channel.channel import Channel, ChannelStats, beside_packed, hears_aborts
from flowchan.channel.ports import In, Out
from flowchan.channel.transports import HOSTS
from flowchan.errors import Broken, ChannelError, Closed, FlowchanError, HostError
from flowchan.items.arguments import flag, refuses_misspelt, secret_bytes
from flowchan.native import need_native
from flowchan.remote.channel_server import server_at, server_of
from flowchan.remote.connection import PEER_TIMEOUT_S, Connection, using
from flowchan.remote.messages import Reply, sealed_cause
from flowchan.remote.pending_calls import Unanswered
from flowchan.remote.remote_ports import RemoteIn, RemoteOut, seconds
from flowchan.transport import descriptors
from flowchan.transport.addresses import channel_address, mark_of, number_in, place_in

T = TypeVar("T")
R = TypeVar("R")


class _Snapshot(NamedTuple):
    closed: bool
    broken: bool
    stats: ChannelStats


TRANSIT_TIMEOUT_S = 1.0
"""Seconds to wait for items that the owner has sent."""
NO_STATS = Channel(1).stats()
"""Counts for a port that is not open."""


class RemoteChannel(Channel[T]):
    """Channel across hosts that another process owns.

    ``flowchan.hosts.open_channel`` returns remote channels, and channels in received items are remote as
    well.
    """

    across = HOSTS.name
    is_remote = True

    def __init__(
        self, at: tuple[str, bytes, bool], connection: Connection, within: float | None = None
    ) -> None:
        capacity, max_bytes, name = connection.open(number_in(at[0]), within)
        _core.Channel.__init__(  # this ring stays empty, because items use other rings
            self, capacity=capacity, processes=False, max_bytes=max_bytes or 2**64 - 1, name=name
        )
        self._elsewhere = True  # makes native calls use the rings from `_open_port`
        self._at, self._link = at, connection  # address, secret, TLS
        self._number = number_in(at[0])
        self._opening = threading.RLock()
        # Ports for plain calls; the key True is for the reading port.
        self._ports: dict[bool, RemoteIn[T] | RemoteOut[T]] = {}

    @property
    def _connection(self) -> Connection:
        if self._link.pid != os.getpid():  # a forked child needs its own connection
            with using(place_in(self._at[0]), *self._at[1:]) as link:
                link.open(self._number)
                link.register(self._number, self)
            self._link = link
            self._opening, self._ports = threading.RLock(), {}
        return self._link

    def _request(self, what: str, *arguments: Any) -> Any:
        return self._connection.ask(self._number, what, *arguments)

    def _two_round_trips(self) -> float:
        return 0.002 + self._connection.two_round_trips()

    # --- items ---

    def _open_port(self, reads: bool) -> Channel[T]:
        """Return the ring for this process's plain calls. The core calls this at the first use."""
        connection = self._connection
        with self._opening:
            if reads not in self._ports:
                self._ports[reads] = self._port(RemoteIn if reads else RemoteOut, reads, counted=False)
            assert self._link is connection
            return self._ports[reads]._stream.ring

    def _ask_again(self, reads: bool) -> tuple[bool, int]:
        """Ask the owner for its current state. The core calls this method before a call gives up.

        Returns:
            Two values: True if the call may succeed now or the channel has ended, and the owner's total
            number of puts and gets.
        """
        connection, stream = self._connection, self._ports[reads]._stream
        try:
            if reads:
                sent, ended, moves = self._offer(1, stream.ring.stats().items_out)
                return ended or sent > stream.ring.stats().items_out, moves
            within = connection.answered_within(0)
            room, ended, moves = connection.ask(self._number, "room", stream.number, within=within)
            has_room = room > stream.ring.stats().items_in
            if has_room:
                stream.ring._allow(room)
            return ended or has_room, moves
        except Unanswered:
            return False, 0
        except Broken:
            return True, 0  # the ring is broken as well, and its next call raises the reason

    def _offer(self, most: int, got: int | None = None) -> tuple[int, bool, int]:
        """Make the owner send up to ``most`` items of the channel; see ``ClientSession``.

        The items may include some that this process has put and that are still in transit to the owner.
        """
        connection, ports = self._connection, self._ports
        number, put = 0, 0
        if False in ports:
            number, put = ports[False]._stream.number, ports[False]._stream.ring.stats().items_in
        within = connection.answered_within(0)
        what = ports[True]._stream.number, most, got, number, put
        offered: tuple[int, bool, int] = connection.ask(self._number, "offer", *what, within=within)
        return offered

    def _fetch(self, most: int) -> None:
        """Fetch up to ``most`` more items from the owner. The core calls this method before ``get_many``."""
        ring = self._ports[True]._stream.ring
        with contextlib.suppress(Unanswered, Broken):  # the next call on the ring raises the error
            sent, _, _ = self._offer(most)
            give_up = time.monotonic() + TRANSIT_TIMEOUT_S
            while ring.stats().items_in < sent and not ring.closed and time.monotonic() < give_up:
                time.sleep(0.0001)

    async def aput(self, item: T) -> None:
        """Put an item from a coroutine. A cancelled call does not put the item."""
        await awaiting.aput(self._open_port(False), item)

    async def aget(self) -> T:
        """Take an item from a coroutine. A cancelled call does not take an item."""
        return await awaiting.aget(self._open_port(True))

    async def __anext__(self) -> T:
        return await awaiting.anext_item(self._open_port(True))

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the owner has received all items that this process put with plain calls.

        Raises the same errors as ``flush`` of a writing end.
        """
        seconds(timeout)
        if (port := self._open_ports().get(False)) is not None:
            assert isinstance(port, RemoteOut)
            port.flush(timeout)

    def _open_ports(self) -> dict[bool, RemoteIn[T] | RemoteOut[T]]:
        """Return this process's ports for plain calls.

        Ports from before a fork belong to the parent and do not count.
        """
        return self._ports if self._link.pid == os.getpid() else {}

    def loan(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ``ChannelError``, because the channel's memory is on another host."""
        raise ChannelError(
            f"{self!r} can't lend memory, because its memory is on another host; put an array instead"
        )

    # --- the channel ---

    def close(self) -> None:
        """Close the channel, after the owner has received this process's items or rejected them."""
        with contextlib.suppress(Closed, Broken):
            self.flush()
        self._request("close")
        if (port := self._open_ports().get(False)) is not None:
            port.close()

    def abort(self, cause: BaseException | None = None) -> None:
        """Break the channel. All later calls, of any user, raise ``Broken`` from ``cause``."""
        if cause is not None and not isinstance(cause, BaseException):
            raise TypeError(f"abort: cause must be an exception or None, got {cause!r}")
        if (report := hears_aborts.get()) is not None:
            report(self, cause)
        with contextlib.suppress(Broken):  # the owner may be lost
            self._request("abort", sealed_cause(cause))
        for port in self._open_ports().values():
            _core.Channel.abort(port._stream.ring, cause)

    def reader(self) -> In[T]:
        """Open a reading end that prefetches items; the owner counts it."""
        return self._port(RemoteIn, True, counted=True)  # type: ignore[no-any-return]

    def writer(self) -> Out[T]:
        """Open a writing end that sends items in the background; the owner counts it."""
        return self._port(RemoteOut, False, counted=True)  # type: ignore[no-any-return]

    def _port(self, kind: Any, reads: bool, counted: bool) -> Any:
        name = self._name or f"at {self.address}"
        stream = self._connection.new_stream(name, self.max_bytes, reads, counted)
        port = kind(self if counted else weakref.proxy(self), stream)
        stream.port = weakref.ref(port)
        self._connection.open_stream(stream, self._number)
        return port

    def _snapshot(self) -> _Snapshot:
        ports = dict(self._open_ports())  # copied, because another thread may open a port during the request
        numbers = [ports[reads]._stream.number if reads in ports else 0 for reads in (True, False)]
        closed, broken, stats, reads, writes = self._request("look", *numbers)
        reading = ports[True]._stream.ring.stats() if True in ports else NO_STATS
        writing = ports[False]._stream.ring.stats() if False in ports else NO_STATS
        prefetched = reads["taken"] - reading.items_out
        in_transit = 0 if closed else writing.items_in - writes["used"]
        return _Snapshot(
            closed,
            broken,
            dataclasses.replace(
                stats,
                items_in=stats.items_in + in_transit,
                items_out=stats.items_out - prefetched,
                inside=0 if broken else stats.inside + prefetched + in_transit,
                leased=stats.leased - reads["ahead"],
                waiting_readers=stats.waiting_readers - reads["standing"] + reading.waiting_readers,
                waiting_writers=stats.waiting_writers - writes["standing"] + writing.waiting_writers,
                selecting=stats.selecting + reading.selecting + writing.selecting,
                awaiting=stats.awaiting + reading.awaiting + writing.awaiting,
            ),
        )

    def __len__(self) -> int:
        return self._snapshot().stats.inside

    @property
    def closed(self) -> bool:
        """Return whether the channel is closed, so that no more items can be put."""
        return self._snapshot().closed

    @property
    def drained(self) -> bool:
        """Return whether the channel is closed and empty."""
        snapshot = self._snapshot()
        nothing = snapshot.stats.inside == snapshot.stats.leased == 0
        return snapshot.closed and nothing and not snapshot.broken

    @property
    def broken(self) -> bool:
        """Return whether the channel has failed."""
        try:
            return self._snapshot().broken
        except Broken:
            return True

    def stats(self) -> ChannelStats:
        """Return the owner's current counts.

        Items in transit to or from this process count as items in the channel.
        """
        return self._snapshot().stats

    @property
    def address(self) -> str:
        """Return the channel's address."""
        return self._at[0]

    @property
    def secret(self) -> bytes:
        """Return the secret, which clients must prove to know."""
        return self._at[1]

    def __repr__(self) -> str:
        return f"<Channel({self.capacity}, across={self.across!r}) at {self.address}>"

    def item_done(self) -> None:
        """Tell the owner that this process has finished an item that contained the channel.

        The owner keeps the channel for the item until this call.
        """
        self._connection.notify("item_done", self._number)

    def _another(self, capacity: int) -> Channel[Any]:
        connection = self._connection
        return make_remote(connection, place_in(self.address), *self._at[1:], capacity)

    def __reduce__(self) -> tuple[Any, ...]:
        if (packed := beside_packed(self)) is not None:
            return packed
        sent, parcel = False, descriptors.now.packing
        if parcel is not None:
            # Ignore the loss of the owner here, because the receiver will get an error.
            with contextlib.suppress(Broken, HostError):
                # The owner must count the item before it is sent, because this process may be killed at any
                # moment.
                sent = self._connection.send(self._number)
        if parcel is not None and sent:
            parcel.counted.append(functools.partial(_item_done, weakref.ref(self._link), self._number))
        server_id = self._link.server_id
        return unpickle_channel, (*self._at, server_id, sent and mark_of(server_id, self._number))


def _item_done(link: weakref.ref[Connection], number: int) -> None:
    if (connection := link()) is not None:
        connection.notify("item_done", number)


def unpickle_channel(
    address: str, secret: bytes, tls: bool, server_id: str, sent: str | bool
) -> Channel[Any]:
    """Return the channel with this address, for pickle.

    Args:
        address: Address of the channel.
        secret: Secret of the channel.
        tls: True if the connection is encrypted.
        server_id: ID of the channel's server.
        sent: Mark of an item that the owner counts; False if it does not count the item. The owner keeps the
            channel until a counted item is finished.

    Returns:
        The channel; in its owner, the original object.
    """
    server = server_of(server_id)
    try:
        if server is not None and server.is_here(number_in(address)):
            found = server.find(number_in(address))
            if sent:
                server.keep(found, number_in(address))
                _core._when_finished(functools.partial(server.item_done, number_in(address)))
            return found
        remote = remote_channel(address, secret, tls, PEER_TIMEOUT_S)
        if sent:
            _core._when_finished(remote.item_done)
        return remote
    except FlowchanError as error:
        raise Broken(f"the channel at {address} can't be received: {error}") from error
    except OSError as error:
        lacking = descriptors.shortage(f"the channel at {address}", error)
        if lacking is None:
            raise
        raise lacking from error


def remote_channel(
    address: str, secret: bytes, tls: bool, timeout: float, give_up: float | None = None
) -> RemoteChannel[Any]:
    """Return this process's object for a remote channel.

    Args:
        address: Address of the channel.
        secret: Secret of the channel.
        tls: True if the connection is encrypted.
        timeout: Seconds to wait for a connection, unless this process is already connected to the owner.
        give_up: Monotonic time at which to stop waiting for the owner's reply (default: never).

    Returns:
        The object, shared by all callers in this process.
    """
    with using(place_in(address), secret, tls, timeout) as connection:
        known: RemoteChannel[Any] | None = connection.user(number_in(address))
        if known is not None:
            return known
        within = None if give_up is None else max(0.0, give_up - time.monotonic())
        opened: RemoteChannel[Any] = RemoteChannel((address, secret, tls), connection, within)
        adopted: RemoteChannel[Any] = connection.register(opened._number, opened)
        return adopted


def make_remote(
    connection: Connection, place: str, secret: bytes, tls: bool, capacity: int
) -> RemoteChannel[Any]:
    """Make a new channel at the owner of this connection."""

    def drop(reply: Reply) -> None:
        if reply.error is None:
            connection.notify("drop", reply.value)

    number = connection.ask(0, "make", capacity, late=drop)
    try:
        made: RemoteChannel[Any] = RemoteChannel((channel_address(place, number), secret, tls), connection)
        connection.register(number, made)
        return made
    except BaseException:
        connection.notify("drop", number)  # let the owner release the new channel
        raise


@refuses_misspelt("open_channel")
def open_channel(
    address: str, secret: bytes, *, tls: bool = False, timeout: float = PEER_TIMEOUT_S
) -> Channel[Any]:
    """Open a channel that another program has made with ``Channel(across="hosts")``.

    Args:
        address: Value of ``channel.address`` in that program.
        secret: Value of ``channel.secret`` in that program.
        tls: True if the connection is encrypted; must match the ``tls`` that the other program passed to
            ``serve`` (default: False).
        timeout: Seconds to wait for the owner (default: 10); None means no limit.

    Returns:
        The channel. In one process, all calls with the same address return the same object.

    Raises:
        HostError: The owner is unreachable, rejected the secret, or has released the channel.
        ValueError: The address, the secret or the timeout is invalid.
        TypeError: ``secret`` is not bytes, or ``tls`` is not a bool.

    Example:
        >>> from flowchan import Channel, hosts
        >>> channel = Channel(across="hosts")
        >>> address, secret = channel.address, channel.secret  # give these to the other program
        >>> hosts.open_channel(address, secret).put("a")
        >>> channel.get()
        'a'
    """
    place, number = place_in(address), number_in(address)
    need_native("open_channel: a channel across hosts is not available")
    secret_bytes("open_channel", secret, "pass the secret of the owner, channel.secret")
    flag("open_channel", "tls", tls)
    wait = seconds(timeout)
    server = server_at(place, secret)
    try:
        if server is not None:
            return server.find(number)
        if wait is None:
            return remote_channel(address, secret, tls, math.inf)
        return remote_channel(address, secret, tls, wait, time.monotonic() + wait)
    except ChannelError as error:
        raise HostError(str(error), address) from None

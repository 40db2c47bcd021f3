"""Channels across hosts in a process that has not made them (C16).

Algorithm. Items go through rings of this process, which a link to home fills and empties: many are under way
at a time, and no call waits for home. ``reader()`` and ``writer()`` give ports with a ring each. The plain
calls ``put``, ``get`` and ``select`` share two rings, one for each direction. Their ports are opened at the
first use and do not count as a reader or a writer. These calls are native and look up the ring themselves, so
a ``KeyboardInterrupt`` cannot come between an item and its receiver.

Invariants. Home sends items only while a call waits for one here, and takes back what was not taken for some
milliseconds. It says how many items may be put in all, which is what it has and has room for; so the channel
keeps its capacity as long as no two processes use the same room at a time. Before a call gives up at its
timeout it asks home once, so that it never fails because news were under way.
docs/hosts.md says what differs from a channel of this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import numbers
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from flowchan import _core
from flowchan.channel import awaiting
from flowchan.channel.channel import Channel, ChannelStats, beside_packed, hears_aborts
from flowchan.channel.ports import In, Out, moved
from flowchan.channel.transports import HOSTS
from flowchan.errors import Broken, ChannelError, Closed, Empty, FlowchanError, Full, HostError
from flowchan.items.arguments import flag, refuses_misspelt, secret_bytes
from flowchan.remote.channel_server import home_at, home_of
from flowchan.remote.connection import PEER_TIMEOUT_S, Connection, RemotePort, using
from flowchan.remote.messages import Reply, sealed_cause
from flowchan.remote.pending_calls import Unanswered
from flowchan.transport import descriptors
from flowchan.transport.addresses import channel_address, mark_of, number_in, place_in

T = TypeVar("T")
R = TypeVar("R")


class _RemoteEnd(Generic[T]):
    """What both ends of a channel whose home is elsewhere have in common."""

    def __init__(self, far: RemoteChannel[T], line: RemotePort) -> None:
        super().__init__(line.ring)  # type: ignore[call-arg]  # the port that stands beside it
        self._far, self._line = far, line
        self.is_open = True

    @property
    def channel(self) -> RemoteChannel[T]:
        """The channel whose port it is."""
        return self._far

    def close(self) -> None:
        """Leave. Returns when home knows it, and has all that was put."""
        self.__exit__(None, None, None)

    def leave(self) -> None:
        """Close it without a wait for home."""
        self.is_open = False
        super().close()  # type: ignore[misc]

    def __exit__(self, *how: Any) -> None:
        """As ``close``; of a reading end that is left by an exception, home has the items in hand again."""
        self.is_open = False
        super().__exit__(*how)  # type: ignore[misc]
        self._line.finished.wait()

    def __reduce__(self) -> tuple[Any, ...]:
        return moved(self)  # type: ignore[arg-type]


class RemoteIn(_RemoteEnd[T], In[T]):
    """A reading end of a channel whose home is elsewhere."""

    def get(self, timeout: float | None = None) -> T:
        """As every port's; but an item that is at home now has two round trips, however short the time."""
        return self._in_two_round_trips(super().get, timeout)

    def get_many(self, max: int, timeout: float | None = None) -> list[T]:
        """As every port's, with the same difference."""
        return self._in_two_round_trips(functools.partial(super().get_many, max), timeout)

    def get_nowait(self) -> T:
        """As ``get`` with no time at all."""
        return self.get(0)

    def _in_two_round_trips(self, call: Callable[[float | None], R], timeout: float | None) -> R:
        try:
            return call(timeout)
        except Empty:
            assert timeout is not None
            rest = self._far._two_round_trips() - timeout
            if rest <= 0:
                raise
        return call(rest)


class RemoteOut(_RemoteEnd[T], Out[T]):
    """A writing end of a channel whose home is elsewhere."""

    def flush(self, timeout: float | None = None) -> None:
        """Wait until home has all that was put here. Raises ``Full`` when ``timeout`` seconds are over first,
        and ``Closed`` or ``Broken`` when the channel has ended and home has not taken all."""
        wait = _seconds(timeout)
        count = self._line.ring.stats().items_in
        used = self._far._connection.await_used(self._line, count, wait)
        if used is None:
            raise Full(f"the channel of {self._far.address} had no room for all items within {wait:g} s")
        if not used:
            self._line.ring.put_nowait(None)  # raises why: it has ended, so nothing gets in


class _Looked(NamedTuple):
    closed: bool
    broken: bool
    stats: ChannelStats


ON_ITS_WAY = 0.1
"""Seconds for which items that home has sent are awaited at most."""
NOTHING = Channel(1).stats()
"""Of a port that is not open."""


class RemoteChannel(Channel[T]):
    """A channel across hosts that was made in another process. ``flowchan.hosts.open_channel`` and items that
    hold one give it."""

    across = HOSTS.name
    is_elsewhere = True

    def __init__(
        self, at: tuple[str, bytes, bool], connection: Connection, within: float | None = None
    ) -> None:
        capacity, max_bytes, name = connection.open(number_in(at[0]), within)
        _core.Channel.__init__(  # it stays empty: items go through other rings
            self, capacity=capacity, processes=False, max_bytes=max_bytes or 2**64 - 1, name=name
        )
        self._elsewhere = True  # so native calls ask `_open_port` for these
        self._at, self._link = at, connection  # `at`: address, secret, TLS
        self._number = number_in(at[0])
        self._opening = threading.RLock()
        self._ports: dict[bool, RemoteIn[T] | RemoteOut[T]] = {}  # of the plain calls; True: for reading

    @property
    def _connection(self) -> Connection:
        if self._link.pid != os.getpid():  # a forked child has one of its own
            with using(place_in(self._at[0]), *self._at[1:]) as link:
                link.open(self._number)
                link.adopt(self._number, self)
            self._link = link
            self._opening, self._ports = threading.RLock(), {}
        return self._link

    def _ask(self, what: str, *arguments: Any) -> Any:
        return self._connection.ask(self._number, what, *arguments)

    def _two_round_trips(self) -> float:
        return 0.002 + self._connection.two_round_trips()

    # --- items ---

    def _open_port(self, reads: bool) -> Channel[T]:
        """Give the ring that plain calls of this process read or write. The core calls this at first use."""
        connection = self._connection
        with self._opening:
            if reads not in self._ports:
                self._ports[reads] = self._port(RemoteIn if reads else RemoteOut, reads, counted=False)
            assert self._link is connection
            return self._ports[reads]._line.ring

    def _ask_again(self, reads: bool) -> tuple[bool, int]:
        """Ask home what is possible now, before a call gives up. Whether there is an item, or room, or the
        end; and how often an item has gone in or out there. The core calls this."""
        connection, line = self._connection, self._ports[reads]._line
        try:
            if reads:
                sent, ended, moves = self._offer(1)
                return ended or sent > line.ring.stats().items_out, moves
            within = connection.answered_within(0)
            room, ended, moves = connection.ask(self._number, "room", line.number, within=within)
            has_room = room > line.ring.stats().items_in
            if has_room:
                line.ring._allow(room)
            return ended or has_room, moves
        except Unanswered:
            return False, 0
        except Broken:
            return True, 0  # the ring is broken by then, and says why

    def _offer(self, most: int) -> tuple[int, bool, int]:
        """Have home send up to ``most`` items that it has, also of those that are on their way there from
        here. See ``ClientSession``."""
        connection, ports = self._connection, self._ports
        number, put = 0, 0
        if False in ports:
            number, put = ports[False]._line.number, ports[False]._line.ring.stats().items_in
        within = connection.answered_within(0)
        what = ports[True]._line.number, most, number, put
        offered: tuple[int, bool, int] = connection.ask(self._number, "offer", *what, within=within)
        return offered

    def _fetch(self, most: int) -> None:
        """Have up to ``most`` more items come here, if home has them. The core calls this before it takes
        several at a time."""
        ring = self._ports[True]._line.ring
        with contextlib.suppress(Unanswered, Broken):  # the ring says why
            sent, _, _ = self._offer(most)
            give_up = time.monotonic() + ON_ITS_WAY
            while ring.stats().items_in < sent and not ring.closed and time.monotonic() < give_up:
                time.sleep(0.0001)

    async def aput(self, item: T) -> None:
        """As ``put``, for coroutines. A cancelled call has put nothing."""
        await awaiting.aput(self._open_port(False), item)

    async def aget(self) -> T:
        """As ``get``, for coroutines. A cancelled call has taken nothing."""
        return await awaiting.aget(self._open_port(True))

    async def __anext__(self) -> T:
        return await awaiting.anext_item(self._open_port(True))

    def flush(self, timeout: float | None = None) -> None:
        """Wait until home has all that ``put`` has taken in this process."""
        _seconds(timeout)
        if (port := self._open_ports().get(False)) is not None:
            assert isinstance(port, RemoteOut)
            port.flush(timeout)

    def _open_ports(self) -> dict[bool, RemoteIn[T] | RemoteOut[T]]:
        """Those of this process, not those of its parent."""
        return self._ports if self._link.pid == os.getpid() else {}

    def loan(self, *_: Any, **__: Any) -> NoReturn:
        """Memory of home can't be lent."""
        raise ChannelError(f"{self!r} has its memory on another host: put an array of your own")

    # --- the channel ---

    def close(self) -> None:
        """As every channel's. Returns when home has all that was put here, if it takes it."""
        with contextlib.suppress(Closed, Broken):
            self.flush()
        self._ask("close")
        if (port := self._open_ports().get(False)) is not None:
            port.close()

    def abort(self, cause: BaseException | None = None) -> None:
        """As every channel's."""
        if cause is not None and not isinstance(cause, BaseException):
            raise TypeError(f"abort: cause must be an exception or None, not {cause!r}")
        if (hear := hears_aborts.get()) is not None:
            hear(self, cause)
        with contextlib.suppress(Broken):  # home is lost
            self._ask("abort", sealed_cause(cause))
        for port in self._open_ports().values():
            _core.Channel.abort(port._line.ring, cause)

    def reader(self) -> In[T]:
        """A counted reading end, with many items under way at a time."""
        return self._port(RemoteIn, True, counted=True)  # type: ignore[no-any-return]

    def writer(self) -> Out[T]:
        """A counted writing end, with many items under way at a time."""
        return self._port(RemoteOut, False, counted=True)  # type: ignore[no-any-return]

    def _port(self, kind: Any, reads: bool, counted: bool) -> Any:
        name = self._name or f"of {self.address}"
        line = self._connection.new_line(name, self.max_bytes, reads, counted)
        port = kind(self if counted else weakref.proxy(self), line)
        line.port = weakref.ref(port)
        self._connection.open_line(line, self._number)
        return port

    def _look(self) -> _Looked:
        ports = self._open_ports()
        numbers = [ports[reads]._line.number if reads in ports else 0 for reads in (True, False)]
        closed, broken, stats, reads, writes = self._ask("look", *numbers)
        reading = ports[True]._line.ring.stats() if True in ports else NOTHING
        writing = ports[False]._line.ring.stats() if False in ports else NOTHING
        prefetched = reads["taken"] - reading.items_out
        coming = 0 if closed else writing.items_in - writes["used"]
        return _Looked(
            closed,
            broken,
            dataclasses.replace(
                stats,
                items_in=stats.items_in + coming,
                items_out=stats.items_out - prefetched,
                inside=0 if broken else stats.inside + prefetched + coming,
                leased=stats.leased - reads["ahead"],
                waiting_readers=stats.waiting_readers - reads["standing"] + reading.waiting_readers,
                waiting_writers=stats.waiting_writers - writes["standing"] + writing.waiting_writers,
                selecting=stats.selecting + reading.selecting + writing.selecting,
                awaiting=stats.awaiting + reading.awaiting + writing.awaiting,
            ),
        )

    def __len__(self) -> int:
        return self._look().stats.inside

    @property
    def closed(self) -> bool:
        """Whether nobody can put any more."""
        return self._look().closed

    @property
    def drained(self) -> bool:
        """Whether it is closed and nothing more can be got."""
        looked = self._look()
        nothing = looked.stats.inside == looked.stats.leased == 0
        return looked.closed and nothing and not looked.broken

    @property
    def broken(self) -> bool:
        """Whether it ended by failure."""
        try:
            return self._look().broken
        except Broken:
            return True

    def stats(self) -> ChannelStats:
        """Counts of this moment: home's, where what is under way to and from this process is inside."""
        return self._look().stats

    @property
    def address(self) -> str:
        """Where it is reached."""
        return self._at[0]

    @property
    def secret(self) -> bytes:
        """What has to be proved there."""
        return self._at[1]

    def __repr__(self) -> str:
        return f"<Channel({self.capacity}, across={self.across!r}) of {self.address}>"

    def came(self) -> None:
        """An item that it was in is finished here. The server keeps it for that item until then."""
        self._connection.tell("come", self._number)

    def _another(self, capacity: int) -> Channel[Any]:
        connection = self._connection
        return make_elsewhere(connection, place_in(self.address), *self._at[1:], capacity)

    def __reduce__(self) -> tuple[Any, ...]:
        if (beside := beside_packed(self)) is not None:
            return beside
        sent, parcel = False, descriptors.now.packing
        if parcel is not None:
            with contextlib.suppress(Broken, HostError):  # home is lost: who receives it is told
                # Before the item is anywhere: we may be killed then.
                sent = self._connection.send(self._number)
        if parcel is not None and sent:
            parcel.counted.append(functools.partial(_come, weakref.ref(self._link), self._number))
        home = self._link.home
        return arrive, (*self._at, home, sent and mark_of(home, self._number))


def _come(link: weakref.ref[Connection], number: int) -> None:
    if (connection := link()) is not None:
        connection.tell("come", number)


def arrive(address: str, secret: bytes, tls: bool, home: str, sent: str | bool) -> Channel[Any]:
    """The channel of that address: the one that was made here, if it was. ``sent``: a mark, if it has come in
    an item, for which its home keeps it until that is finished."""
    here = home_of(home)
    try:
        if here is not None and here.is_here(number_in(address)):
            found = here.find(number_in(address))
            if sent:
                here.keep(found, number_in(address))
                _core._when_finished(functools.partial(here.come, number_in(address)))
            return found
        far = remote_channel(address, secret, tls, PEER_TIMEOUT_S)
        if sent:
            _core._when_finished(far.came)
        return far
    except FlowchanError as error:
        raise Broken(f"the channel of {address} can't be received: {error}") from error
    except OSError as error:
        lacking = descriptors.shortage(f"the channel of {address}", error)
        if lacking is None:
            raise
        raise lacking from error


def remote_channel(
    address: str, secret: bytes, tls: bool, timeout: float, give_up: float | None = None
) -> RemoteChannel[Any]:
    """That of this process for a channel whose home is elsewhere. ``timeout``: for a home that this process
    does not know yet. ``give_up``: when to, whether it knows it or not."""
    with using(place_in(address), secret, tls, timeout) as connection:
        known: RemoteChannel[Any] | None = connection.user(number_in(address))
        if known is not None:
            return known
        within = None if give_up is None else max(0.0, give_up - time.monotonic())
        opened: RemoteChannel[Any] = RemoteChannel((address, secret, tls), connection, within)
        adopted: RemoteChannel[Any] = connection.adopt(opened._number, opened)
        return adopted


def make_elsewhere(
    connection: Connection, place: str, secret: bytes, tls: bool, capacity: int
) -> RemoteChannel[Any]:
    """A new channel whose home is there."""

    def drop(answer: Reply) -> None:
        if answer.wrong is None:
            connection.tell("drop", answer.value)

    number = connection.ask(0, "make", capacity, late=drop)
    try:
        made: RemoteChannel[Any] = RemoteChannel((channel_address(place, number), secret, tls), connection)
        connection.adopt(number, made)
        return made
    except BaseException:
        connection.tell("drop", number)  # home keeps what it has made until then
        raise


@refuses_misspelt("open_channel")
def open_channel(
    address: str, secret: bytes, *, tls: bool = False, timeout: float = PEER_TIMEOUT_S
) -> Channel[Any]:
    """The channel that another program made by ``Channel(across="hosts")``, by its ``address`` and ``secret``
    there. ``tls``: as that program has said in ``serve``. Raises :class:`HostError` when it is not reached
    within ``timeout`` seconds."""
    place, number = place_in(address), number_in(address)
    secret_bytes("open_channel", secret, "it is what channel.secret says")
    flag("open_channel", "tls", tls)
    wait = _seconds(timeout)
    here = home_at(place, secret)
    try:
        if here is not None:
            return here.find(number)
        if wait is None:
            return remote_channel(address, secret, tls, math.inf)
        return remote_channel(address, secret, tls, wait, time.monotonic() + wait)
    except ChannelError as error:
        raise HostError(str(error), address) from None


def _seconds(timeout: Any) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, numbers.Real) and not isinstance(timeout, bool) and float(timeout) >= 0:
        return float(timeout) if float(timeout) < 1e9 else None
    raise ValueError(f"timeout must be None (wait for ever) or a number of seconds >= 0, not {timeout!r}")

"""The channel: a bounded, closable FIFO with one contract on every transport.

The contract, C1 to C15, is in docs/explanation/contract.md; ``tests/contract/`` tests each clause.
``put`` and ``get`` and their kin are native methods inherited from the core; here are the checks of
arguments, the statistics, and how a channel reaches another process.
"""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import flowchan.items.codec  # tells the core how to serialise  # noqa: F401
from flowchan import _core
from flowchan.channel import awaiting
from flowchan.channel.ports import In, Out
from flowchan.channel.transports import TRANSPORTS, Across, Transport
from flowchan.errors import Broken, ChannelError
from flowchan.items import arrays
from flowchan.items.arguments import is_whole, refuses_misspelt, whole
from flowchan.transport.descriptors import (
    Beside,
    Handle,
    Inherited,
    Sent,
    hand_over,
    now,
    shortage,
    take_over,
)

__all__ = ["Channel", "ChannelStats", "Holder", "In", "Out"]

T = TypeVar("T")

hears_aborts: ContextVar[Callable[[Channel[Any], BaseException | None], None] | None]
"""Who hears of a channel that is about to be aborted in this thread or task: what runs a stage sets it."""
hears_aborts = ContextVar("hears_aborts", default=None)

_NO_LIMIT = 2**64 - 1
LARGEST = 10**15
_UNBOUNDED = 2 * LARGEST  # more than memory holds; no number that somebody gives
_MOST_BY_DEFAULT = 16 << 30


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that keeps ``blocks`` of a channel's memory, ``bytes`` in all: by arrays, tensors and memory
    views that it got and still has, or that it has on loan."""

    pid: int
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ChannelStats:
    """One moment of a channel (C15). Counts are items since its creation; ``read_wait`` and ``write_wait``
    are the seconds that all its readers and writers together have spent waiting, those waiting now included;
    ``turn_wait`` is the part of ``write_wait`` in which ordered writers waited for their turn while nothing
    was inside;
    ``readers_waiting_for`` and ``writers_waiting_for`` are the seconds for which somebody has been waiting
    without a break until now. ``selecting``: waiters that something else may release (``select``, ``await``,
    a timeout), ``awaiting`` of them coroutines of this process; ``woken``: signalled, not yet running.
    ``bytes_inside`` counts against ``max_bytes``; ``short_of_bytes``: somebody waits to put for those and not
    for a place. ``holders`` are the processes that keep blocks."""

    items_in: int
    items_out: int
    bytes_in: int
    inside: int
    leased: int
    waiting_readers: int
    waiting_writers: int
    readers: int
    writers: int
    read_wait: float
    write_wait: float
    turn_wait: float
    readers_waiting_for: float
    writers_waiting_for: float
    selecting: int
    woken: int
    awaiting: int
    bytes_inside: int
    short_of_bytes: bool
    holders: tuple[Holder, ...] = ()


class Reached(Protocol):
    """Where a channel across hosts is reached, and what stands for it elsewhere."""

    address: str
    secret: bytes

    def reduced(self) -> tuple[Any, ...]:
        """What pickle makes of the channel."""

    def another(self, capacity: int) -> Channel[Any]:
        """A new channel that is reached there, too."""


def most_bytes() -> int:
    """How many bytes may be inside a channel between processes where nobody has said it."""
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, _MOST_BY_DEFAULT)


class Channel(_core.Channel[T]):
    """A bounded FIFO of items with any number of writers and readers: open, then closed, then drained; or
    broken.

    ``capacity``: how many items may be inside before ``put`` waits; ``None``, between threads: any number.
    ``across``: ``"threads"`` passes references within one process, ``"processes"`` passes copies through
    shared memory, and ``"hosts"`` does so, too, and lets programs elsewhere open it (docs/hosts.md).
    ``max_bytes``: how many bytes may be inside; the default is none for threads, and else half of the
    machine's memory, at most 16 GiB (memory is taken as it is needed, and used again).

    Raises ``ValueError`` or ``TypeError`` for wrong arguments, ``OSError`` when there is no memory.
    """

    @refuses_misspelt("Channel")
    def __init__(
        self,
        capacity: int | None = 64,
        across: Across = "threads",
        max_bytes: int | None = None,
    ) -> None:
        transport = TRANSPORTS.get(across)
        if transport is None:
            raise ValueError(f"across must be {' or '.join(map(repr, TRANSPORTS))}, not {across!r}")
        capacity = _places(capacity, transport)
        if max_bytes is not None:
            whole("Channel", "max_bytes", max_bytes, 1, LARGEST)
        else:
            max_bytes = most_bytes() if transport.copies else _NO_LIMIT
        super().__init__(capacity=capacity, processes=transport.copies, max_bytes=max_bytes, name="")
        if transport.copies:
            _known[os.fstat(self._fd).st_ino] = self
        if transport.reached_by:
            self._hosts = True
            self._reached: Reached = importlib.import_module(transport.reached_by).let_in(self)

    @property
    def transport(self) -> Transport:
        """What it is made of, and what follows from that."""
        return TRANSPORTS[self.across]

    @property
    def address(self) -> str:
        """Where ``flowchan.hosts.open_channel`` finds a channel across hosts."""
        return self._where().address

    @property
    def secret(self) -> bytes:
        """What has to be proved there. Whoever knows it may run code in this process: keep it out of
        arguments and environments."""
        return self._where().secret

    def _where(self) -> Reached:
        if not self.transport.reached_by:
            raise ChannelError(f"{self!r} has no address; make it with across='hosts'")
        return self._reached

    def _another(self, capacity: int) -> Channel[Any]:
        """A new channel for those who have this one: made of the same, and with the same home."""
        if self.transport.reached_by:
            return self._reached.another(capacity)
        return Channel(capacity, across=self.across)

    def reader(self) -> In[T]:
        """A counted reading end. When the last one is closed, writers get Closed."""
        return In(self)

    def writer(self) -> Out[T]:
        """A counted writing end. When the last one is closed, the channel is closed."""
        return Out(self)

    def abort(self, cause: BaseException | None = None) -> None:
        """Break the channel: what is inside is discarded, and every waiting or later call raises Broken from
        ``cause``. In a graph it ends the run, with that cause."""
        if cause is not None and not isinstance(cause, BaseException):
            raise TypeError(f"abort: cause must be an exception or None, not {cause!r}")
        if (hear := hears_aborts.get()) is not None:
            hear(self, cause)
        super().abort(cause)

    loan = arrays.loan
    aput = awaiting.aput
    aget = awaiting.aget
    __aiter__ = awaiting.aiter_items
    __anext__ = awaiting.anext_item

    def stats(self) -> ChannelStats:
        """Counts of this moment, taken together under the channel's lock."""
        stats = self._stats()
        held = stats.pop("holders")
        return ChannelStats(**stats, holders=tuple(Holder(*one) for one in held))

    def __repr__(self) -> str:
        name = f"{self._name!r}, " if self._name else ""
        capacity = None if self.capacity == _UNBOUNDED else self.capacity
        limit = "" if self.max_bytes is None else f", max_bytes={self.max_bytes}"
        state = (
            "broken" if self.broken else "drained" if self.drained else "closed" if self.closed else "open"
        )
        return f"<Channel({name}{capacity}, across={self.across!r}{limit}) {state}, {len(self)} inside>"

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.transport.copies:
            raise TypeError(f"{self!r} can't be sent to another process; make it with across='processes'")
        if self.transport.reached_by:
            return beside_packed(self) or self._reached.reduced()
        return _arrive, (hand_over(self._fd, self._socket, self), self._name)


def _places(capacity: int | None, transport: Transport) -> int:
    """How many items the queue is made for."""
    if capacity is None:
        if transport.copies:
            raise ValueError(
                "Channel: capacity=None, any number of items, is for across='threads'; between processes "
                "items take shared memory, which max_bytes bounds: give a number, such as capacity=10**9"
            )
        return _UNBOUNDED
    if is_whole(capacity) and capacity == 0:
        raise ValueError(
            "Channel: capacity must be at least 1, not 0: a put does not wait until somebody has the item; "
            "let the reader answer on another channel, put((item, answers)), where that matters"
        )
    return whole("Channel", "capacity", capacity, 1, LARGEST)


# The channels of this process by the inode of their memory: one that arrives here again is the same object.
_known: weakref.WeakValueDictionary[int, Channel[Any]] = weakref.WeakValueDictionary()


def _arrive(handle: Handle, name: str) -> Channel[Any]:
    if not isinstance(handle, Inherited) and (known := _known.get(handle.inode)) is not None:
        return known  # no need of descriptors
    if isinstance(handle, Beside):
        return _from_beside(handle.place, name)
    try:
        fd, socket = take_over(handle)
    except OSError as error:
        if (short := shortage(f"channel {name!r}", error)) is not None:
            raise short from error
        if isinstance(handle, Sent):
            raise Broken(f"channel {name!r} can't be received: {error.strerror}") from error
        raise Broken(
            f"channel {name!r} was sent by a process that has ended before it was received"
        ) from error
    inode = os.fstat(fd).st_ino
    known = _known.get(inode)
    if known is not None:
        _close(fd, socket)
        return known
    channel: Channel[Any] = Channel.__new__(Channel)
    try:
        _core.Channel.__init__(channel, fd=fd, socket=socket, name=name)
    except BaseException as error:
        _close(fd, socket)
        if isinstance(error, OSError) and (short := shortage(f"channel {name!r}", error)) is not None:
            raise short from error
        raise
    _known[inode] = channel
    return channel


def beside_packed(channel: Channel[Any]) -> tuple[Any, ...] | None:
    """What to pickle in place of a channel across hosts, where it stands beside what is packed just now: so
    it lasts as long as that, however often that is unpacked."""
    if now.packing is None or not now.packing.keeps_far:
        return None
    now.packing.kept.append(channel)
    return _from_beside, (len(now.packing.kept) - 1, channel._name)


def _from_beside(place: int, name: str) -> Channel[Any]:
    if now.beside is None:
        raise Broken(f"channel {name!r} stands beside what was packed: use unpack, and not pickle")
    beside: Channel[Any] = now.beside[place]
    return beside


def _close(*descriptors: int) -> None:
    for fd in descriptors:
        if fd >= 0:
            os.close(fd)

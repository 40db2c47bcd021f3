"""The channel: a bounded, closable FIFO with the same contract on every transport.

The contract, C1 to C16, is in docs/explanation/contract.md; ``tests/contract/`` tests each clause. Methods
such as ``put`` and ``get`` are inherited from the native core. This module checks constructor arguments,
builds statistics, and moves channels to other processes.
"""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import flowchan.items.codec  # the import registers the serialiser with the core
import flowchan.items.sampled_item  # the import registers a class with the core # noqa: F401
from flowchan import _core
from flowchan.channel import awaiting
from flowchan.channel.green_threads import refuse_green_threads
from flowchan.channel.ports import In, Out
from flowchan.channel.transports import TRANSPORTS, Across, Transport
from flowchan.errors import Broken, ChannelError
from flowchan.items import arrays
from flowchan.items.arguments import is_whole, refuses_misspelt, whole
from flowchan.public import public
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
"""Function to call before this thread or task aborts a channel; the stage's runner sets it."""
hears_aborts = ContextVar("hears_aborts", default=None)

_NO_LIMIT = 2**64 - 1
LARGEST = 10**15
_BY_TRANSPORT: Any = object()
"""Default of ``capacity``. The default cannot be ``None``, because ``None`` means no limit."""
_UNBOUNDED = 2 * LARGEST  # more items than memory can hold, and more than a caller may request
_MOST_BY_DEFAULT = 16 << 30


@public
@dataclass(frozen=True, slots=True)
class Holder:
    """Process that holds arrays, tensors or memory views in the memory of a channel.

    The process still refers to objects that it received, or it has objects on loan.

    Attributes:
        pid: Process ID.
        blocks: Number of memory blocks that the process keeps in use.
        bytes: Total size of these blocks.

    Example:
        >>> import numpy
        >>> from flowchan import Channel
        >>> channel = Channel(across="processes")
        >>> channel.put(numpy.ones(1_000_000))
        >>> array = channel.get()
        >>> [holder.blocks for holder in channel.stats().holders]
        [1]
    """

    pid: int
    blocks: int
    bytes: int


@public
@dataclass(frozen=True, slots=True)
class ChannelStats:
    """Statistics of a channel at one moment (C15).

    Times are in seconds. ``read_wait`` and ``write_wait`` are totals over all readers or writers, including
    those waiting now.

    Attributes:
        items_in: Items put since the channel was created.
        items_out: Items taken since the channel was created.
        bytes_in: Bytes put since the channel was created.
        inside: Items in the channel now.
        leased: Items taken through a port but not yet finished.
        waiting_readers: Readers that are waiting now.
        waiting_writers: Writers that are waiting now.
        readers: Open reading ends.
        writers: Open writing ends.
        read_wait: Total time that readers have waited.
        write_wait: Total time that writers have waited.
        turn_wait: Part of ``write_wait`` that ordered writers spent waiting for their turn while the channel
            was empty.
        readers_waiting_for: Seconds for which at least one reader has been waiting continuously.
        writers_waiting_for: Seconds for which at least one writer has been waiting continuously.
        selecting: Waiters that another event may also wake: those in ``select`` or ``await``, or with a
            timeout.
        woken: Waiters that have been woken but are not running yet.
        awaiting: Waiters in ``selecting`` that are coroutines in this process.
        bytes_inside: Bytes in the channel that count against ``max_bytes``.
        short_of_bytes: True if a writer waits because of ``max_bytes`` rather than ``capacity``.
        holders: Processes that keep memory blocks of the channel in use.

    Example:
        >>> from flowchan import Channel
        >>> channel = Channel()
        >>> channel.put_many("abc")
        >>> stats = channel.stats()
        >>> stats.items_in, stats.items_out, stats.inside
        (3, 0, 3)
    """

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
    """Access to a channel across hosts: its address, settings and pickled form."""

    address: str
    secret: bytes
    tls: bool

    def reduced(self) -> tuple[Any, ...]:
        """Return what pickle stores in place of the channel."""

    def another(self, capacity: int) -> Channel[Any]:
        """Create a channel with the same owner."""


def most_bytes() -> int:
    """Return the default ``max_bytes`` of channels between processes."""
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, _MOST_BY_DEFAULT)


@public
class Channel(_core.Channel[T]):
    """Bounded FIFO of items with any number of writers and readers.

    A channel is first open, then closed and finally drained. A channel that fails is broken instead. All
    transports fulfil the same contract (docs/explanation/contract.md).

    Args:
        capacity: Number of items at which ``put`` waits (default: 4,096 for threads, otherwise 64). ``None``
            sets no limit and is allowed only for threads.
        across: ``"threads"`` (the default) passes references within one process. ``"processes"`` passes
            copies through shared memory. ``"hosts"`` also passes copies, and lets programs on other hosts
            open the channel (docs/remote_channels.md).
        max_bytes: Number of bytes at which ``put`` waits (default: no limit for threads; otherwise half of
            the machine's memory, but at most 16 GiB). Memory is allocated on demand.

    Raises:
        ValueError: An argument is out of range, or ``across`` is unknown.
        TypeError: An argument has the wrong type, or its name is unknown.
        OSError: The machine lacks memory or file descriptors.
        RuntimeError: gevent or eventlet has replaced Python's threads.

    Example:
        >>> from flowchan import Channel
        >>> channel = Channel(capacity=2)
        >>> channel.put("a")
        >>> channel.close()
        >>> list(channel)
        ['a']
    """

    @refuses_misspelt("Channel")
    def __init__(
        self,
        capacity: int | None = _BY_TRANSPORT,
        across: Across = "threads",
        max_bytes: int | None = None,
    ) -> None:
        transport = TRANSPORTS.get(across)
        if transport is None:
            raise ValueError(f"Channel: across must be {' or '.join(map(repr, TRANSPORTS))}, got {across!r}")
        if not transport.copies:
            refuse_green_threads()
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
        """Return the channel's transport."""
        return TRANSPORTS[self.across]

    @property
    def address(self) -> str:
        """Return the address that ``flowchan.hosts.open_channel`` needs to open this channel.

        Returns:
            The address, a string.

        Raises:
            ChannelError: The channel was not created with ``across="hosts"``.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel(across="hosts")
            >>> channel.address.startswith("127.0.0.1:")
            True
        """
        return self._where().address

    @property
    def secret(self) -> bytes:
        """Return the secret that programs on other hosts need to open the channel.

        A program that knows the secret can run code in this process. Keep the secret out of command lines
        and environment variables.

        Returns:
            The secret, as bytes for ``open_channel``.

        Raises:
            ChannelError: The channel was not created with ``across="hosts"``.
        """
        return self._where().secret

    def _where(self) -> Reached:
        if not self.transport.reached_by:
            raise ChannelError(f"{self!r} has no address; create it with across='hosts'")
        return self._reached

    def _another(self, capacity: int) -> Channel[Any]:
        """Create a channel with the same transport and owner."""
        if self.transport.reached_by:
            return self._reached.another(capacity)
        return Channel(capacity, across=self.across)

    def reader(self) -> In[T]:
        """Open a reading end; the channel counts its open ends.

        Puts raise ``Closed`` once the last reading end is closed.

        Returns:
            The reading end; leaving its ``with`` block closes it.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel()
            >>> channel.put("a")
            >>> with channel.reader() as reader:
            ...     reader.get()
            'a'
        """
        return In(self)

    def writer(self) -> Out[T]:
        """Open a writing end; the channel counts its open ends.

        The channel closes when the last writing end is closed.

        Returns:
            The writing end; leaving its ``with`` block closes it.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel()
            >>> with channel.writer() as writer:
            ...     writer.put("a")
            >>> channel.closed
            True
        """
        return Out(self)

    def abort(self, cause: BaseException | None = None) -> None:
        """Break the channel and discard the items in it.

        All waiting and later calls raise ``Broken`` from ``cause``. In a stage of a graph, this also ends the
        run, with the same cause.

        Args:
            cause: The cause of the ``Broken`` errors (default: none).

        Raises:
            TypeError: ``cause`` is not an exception.

        Example:
            >>> from flowchan import Broken, Channel
            >>> channel = Channel()
            >>> channel.abort(ValueError("bad input"))
            >>> try:
            ...     channel.get()
            ... except Broken as error:
            ...     print(error.__cause__)
            bad input
        """
        if cause is not None and not isinstance(cause, BaseException):
            raise TypeError(f"abort: cause must be an exception or None, got {cause!r}")
        if (report_abort := hears_aborts.get()) is not None:
            report_abort(self, cause)
        super().abort(cause)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the owner of a remote channel has received every item that this process has put.

        A remote channel (``flowchan.hosts.open_channel``) sends items in the background. On a local channel,
        ``flush`` returns immediately, because ``put`` itself delivers the item.

        Args:
            timeout: Seconds to wait (default: no limit).

        Raises:
            Full: The owner had no room for all items within ``timeout``.
            Closed: The channel was closed before the owner received all items.
            Broken: The channel was aborted, or its owner was lost.

        Example:
            >>> from flowchan import Channel
            >>> from flowchan.hosts import open_channel
            >>> letters = Channel(across="hosts")
            >>> remote = open_channel(letters.address, letters.secret)  # usually in another program
            >>> remote.put("a")
            >>> remote.flush()
            >>> len(letters)
            1
        """

    loan = arrays.loan
    aput = awaiting.aput
    aget = awaiting.aget
    __aiter__ = awaiting.aiter_items
    __anext__ = awaiting.anext_item

    def stats(self) -> ChannelStats:
        """Return the channel's current statistics.

        The values are read under the channel's lock, so they are consistent with each other.

        Returns:
            The counts of items, bytes and waiters, and the waiting times.

        Example:
            >>> from flowchan import Channel
            >>> channel = Channel()
            >>> channel.put("a")
            >>> channel.stats().inside
            1
        """
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
            raise TypeError(f"{self!r} can't be sent to another process; create it with across='processes'")
        if self.transport.reached_by:
            return beside_packed(self) or self._reached.reduced()
        return _arrive, (hand_over(self._fd, self._socket, self), self._name)


def _places(capacity: int | None, transport: Transport) -> int:
    """Check ``capacity``, and return the number of items for which the queue reserves room."""
    if capacity is _BY_TRANSPORT:
        return transport.capacity
    if capacity is None:
        if transport.copies:
            raise ValueError(
                f"Channel: capacity must be an int with across={transport.name!r}, got None; to limit only "
                "the bytes, use max_bytes= and capacity=10**9"
            )
        return _UNBOUNDED
    if is_whole(capacity) and capacity == 0:
        raise ValueError(
            "Channel: capacity must be at least 1, got 0; to learn when an item is read, send an "
            "answer channel with it: put((item, answers))"
        )
    return whole("Channel", "capacity", capacity, 1, LARGEST)


# Channels of this process, by the inode of their memory. Receiving a channel again returns the same object.
_known: weakref.WeakValueDictionary[int, Channel[Any]] = weakref.WeakValueDictionary()


def _arrive(handle: Handle, name: str) -> Channel[Any]:
    if not isinstance(handle, Inherited) and (known := _known.get(handle.inode)) is not None:
        return known  # this process already has the descriptors of the channel
    if isinstance(handle, Beside):
        return _from_beside(handle.place, name)
    try:
        fd, socket = take_over(handle)
    except OSError as error:
        if (short := shortage(f"channel {name!r}", error)) is not None:
            raise short from error
        if isinstance(handle, Sent):
            raise Broken(f"channel {name!r} can't be received: {error.strerror}") from error
        raise Broken(f"channel {name!r} can't be received: its sender has ended") from error
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
    """Return the form in which a packed value refers to a cross-host channel, and keep the channel alive.

    A packed value can be unpacked any number of times, and needs the channel each time. Return None if the
    value is not being packed.
    """
    if now.packing is None or not now.packing.keeps_far:
        return None
    now.packing.kept.append(channel)
    return _from_beside, (len(now.packing.kept) - 1, channel._name)


def _from_beside(place: int, name: str) -> Channel[Any]:
    if now.beside is None:
        raise Broken(f"pickle can't restore channel {name!r} from these bytes; use flowchan.unpack")
    beside: Channel[Any] = now.beside[place]
    return beside


def _close(*descriptors: int) -> None:
    for fd in descriptors:
        if fd >= 0:
            os.close(fd)

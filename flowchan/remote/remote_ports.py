"""Define the ports of remote channels: the users' ends, and the rings between these ends and the link."""

from __future__ import annotations

import functools
import numbers
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, cast

from flowchan.channel.channel import Channel
from flowchan.channel.latch import Latch
from flowchan.channel.ports import In, Out, moved
from flowchan.errors import Empty, Full
from flowchan.transport.link_events import AHEAD, BEHIND

T = TypeVar("T")
R = TypeVar("R")


class RemotePort:
    """Local side of a port that this process has opened at a channel's owner.

    The local side consists of a ring, the user's end and the link's end.

    Args:
        number: Number of the stream.
        name: Name of the ring, for error messages.
        max_bytes: The channel's limit on the size of one item.
        reads: True if the user reads from the ring; False if the user writes.
        counted: True if the user opened the port. Otherwise, the port serves this process's plain calls, and
            its ring accepts only as many items as the owner allows.
    """

    def __init__(self, number: int, name: str, max_bytes: int | None, reads: bool, counted: bool) -> None:
        self.number, self.reads, self.counted = number, reads, counted
        places = AHEAD if reads else BEHIND
        self.ring: Channel[Any] = Channel(places, across="processes", max_bytes=max_bytes)
        self.ring._name, self.ring._hosts = name, True
        self.end: In[Any] | Out[Any] = self.ring.writer() if reads else self.ring.reader()
        self.arrived = 0  # number of items that the owner has put, known once the stream is finished
        if not reads and not counted:
            self.ring._allow(0)
        self.finished = Latch()
        self.port: weakref.ref[Any] | None = None

    def is_open(self) -> bool:
        """Return whether the user can still put or get."""
        port = None if self.port is None else self.port()
        return port is not None and port.is_open

    def leave(self) -> None:
        """Close the user's end without waiting, because the process is about to exit."""
        port = None if self.port is None else self.port()
        if port is not None:
            port.leave()

    def undelivered(self) -> int:
        """Return how many items in the ring have not reached the owner yet."""
        stats = self.ring.stats()
        return 0 if self.reads else stats.inside + stats.leased


class OwnedElsewhere(Protocol):
    """Methods of a remote channel that its ports use."""

    @property
    def address(self) -> str:
        """Return the channel's address."""

    @property
    def _connection(self) -> Any: ...

    def _two_round_trips(self) -> float: ...


class _RemoteEnd(Generic[T]):
    """Methods shared by :class:`RemoteIn` and :class:`RemoteOut`."""

    def __init__(self, remote: OwnedElsewhere, stream: RemotePort) -> None:
        super().__init__(stream.ring)  # type: ignore[call-arg]  # In or Out
        self._remote, self._stream = remote, stream
        self.is_open = True

    @property
    def channel(self) -> Channel[T]:
        """Return this port's channel."""
        return cast(Channel[T], self._remote)

    def close(self) -> None:
        """Close the port. Return when the owner has received all items and closed its side."""
        self.__exit__(None, None, None)

    def leave(self) -> None:
        """Close the port without waiting for the owner."""
        self.is_open = False
        super().close()  # type: ignore[misc]

    def __exit__(self, *how: Any) -> None:
        """Close the port as ``close`` does.

        If an exception leaves the ``with`` block of a reading end, unfinished items go back to the owner.
        """
        self.is_open = False
        super().__exit__(*how)  # type: ignore[misc]
        self._stream.finished.wait()

    def __reduce__(self) -> tuple[Any, ...]:
        return moved(self)  # type: ignore[arg-type]


class RemoteIn(_RemoteEnd[T], In[T]):
    """Reading end of a remote channel."""

    def get(self, timeout: float | None = None) -> T:
        """Return the next item, or raise ``Empty`` after ``timeout`` seconds.

        If the owner has an item, ``get`` receives it even if ``timeout`` is shorter than two round trips.
        """
        return self._in_two_round_trips(super().get, timeout)

    def get_many(self, max: int, timeout: float | None = None) -> list[T]:
        """Return up to ``max`` items, or raise ``Empty`` after ``timeout`` seconds.

        If the owner has items, ``get_many`` receives them even if ``timeout`` is shorter than two round
        trips.
        """
        return self._in_two_round_trips(functools.partial(super().get_many, max), timeout)

    def get_nowait(self) -> T:
        """Return the next item, or raise ``Empty`` if none arrives within two round trips."""
        return self.get(0)

    def _in_two_round_trips(self, call: Callable[[float | None], R], timeout: float | None) -> R:
        try:
            return call(timeout)
        except Empty:
            assert timeout is not None
            rest = self._remote._two_round_trips() - timeout
            if rest <= 0:
                raise
        return call(rest)


class RemoteOut(_RemoteEnd[T], Out[T]):
    """Writing end of a remote channel."""

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the owner has received all items put through this port; see ``Out.flush``."""
        wait = seconds(timeout)
        count = self._stream.ring.stats().items_in
        used = self._remote._connection.await_used(self._stream, count, wait)
        if used is None:
            raise Full(f"the channel at {self._remote.address} had no room for all items within {wait:g} s")
        if not used:
            self._stream.ring.put_nowait(None)  # raises the error that ended the channel


def seconds(timeout: Any) -> float | None:
    """Return a timeout in seconds, or None for no limit.

    Raises:
        ValueError: The timeout is negative or not a number.
    """
    if timeout is None:
        return None
    if isinstance(timeout, numbers.Real) and not isinstance(timeout, bool) and float(timeout) >= 0:
        return float(timeout) if float(timeout) < 1e9 else None
    raise ValueError(f"timeout must be None or at least 0 seconds, got {timeout!r}")

"""Define ``select``, which performs exactly one of several channel operations (C10)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from flowchan import _core
from flowchan.channel.channel import Channel, In, Out
from flowchan.channel.sides import Readable, Writable
from flowchan.errors import Drained, Empty, Full
from flowchan.items.text import short
from flowchan.public import public

T = TypeVar("T")
U = TypeVar("U")
T_co = TypeVar("T_co", covariant=True)


@public
@dataclass(frozen=True, slots=True)
class Selected(Generic[T_co]):
    """Result of :func:`select`: the operation that was performed.

    Attributes:
        channel: Channel or port of the operation that was performed.
        item: Item that was taken or put; None if ``channel`` is one of ``ready``.
        put: True for a put.

    Example:
        >>> from flowchan import Channel, select
        >>> channel = Channel()
        >>> done = select(puts=[(channel, "a")])
        >>> done.item, done.put, done.channel is channel
        ('a', True, True)
    """

    channel: Any
    item: T_co
    put: bool


@public
class NothingReady(Empty, Full):
    """None of the operations of a ``select`` became possible within ``timeout`` seconds.

    Example:
        >>> from flowchan import Channel, NothingReady, select
        >>> try:
        ...     select([Channel(), Channel()], timeout=0)
        ... except NothingReady:
        ...     print("nothing yet")
        nothing yet
    """


@overload
def select(gets: Iterable[Readable[T]], *, timeout: float | None = None) -> Selected[T]: ...
@overload
def select(*, puts: Iterable[tuple[Writable[U], U]], timeout: float | None = None) -> Selected[U]: ...
@overload
def select(
    gets: Iterable[Readable[T]], puts: Iterable[tuple[Writable[U], U]], timeout: float | None = None
) -> Selected[T | U]: ...
@overload
# Channels with different item types need this overload, because mypy infers one common type for the list.
def select(
    gets: Iterable[Readable[object]],
    puts: Iterable[tuple[Writable[U], U]] = (),
    timeout: float | None = None,
) -> Selected[object]: ...
@overload
def select(
    gets: Iterable[Readable[Any]] = (),
    puts: Iterable[tuple[Writable[U], U]] = (),
    timeout: float | None = None,
    *,
    ready: Iterable[Channel[Any]],
) -> Selected[Any]: ...
@public
def select(
    gets: Iterable[Readable[Any]] = (),
    puts: Iterable[tuple[Writable[Any], Any]] = (),
    timeout: float | None = None,
    ready: Iterable[Channel[Any]] = (),
) -> Selected[Any]:
    """Perform exactly one of several operations as soon as one is possible.

    If several operations are possible, ``select`` picks one of them at random. The channels and ports may
    have different transports.

    Args:
        gets: Channels or ports from which to take an item. Drained channels are ignored.
        puts: Pairs of a channel or port and the item to put.
        timeout: Seconds to wait. Default: no limit.
        ready: Channels to wait for without taking an item. A channel is ready when a get would return at
            once, because the channel has an item or is drained. Closing an empty channel therefore ends all
            selects that are waiting for it.

    Returns:
        The operation that was performed.

    Raises:
        Drained: All channels in ``gets`` are drained, and ``puts`` and ``ready`` are empty.
        NothingReady: No operation became possible within ``timeout`` seconds. This error is both an ``Empty``
            and a ``Full``.
        Closed: ``select`` chose a put whose channel is closed.
        Broken: ``select`` chose an operation whose channel is broken.
        TypeError: ``gets`` or ``ready`` is not a list of channels, or ``puts`` is not a list of pairs.

    Example:
        >>> from flowchan import Channel, select
        >>> numbers, words = Channel(), Channel()
        >>> words.put("a")
        >>> select([numbers, words]).item
        'a'
    """
    if isinstance(gets, Channel | In):  # iterating over a channel would take its items
        raise TypeError(f"select: gets must be a list of channels and ports, got {gets!r}; write select([…])")
    reading, looking = list(gets), _channels(ready)
    # Copy the list, because the caller may change it during the wait.
    writing = [pair if type(pair) is tuple and len(pair) == 2 else _pair(pair) for pair in _listed(puts)]
    index, item = _core._select(reading, writing, timeout, looking)
    if index == -2:
        raise Drained("select: all channels in gets are drained")
    if index < 0:
        raise NothingReady(
            f"select: none of {len(reading) + len(writing) + len(looking)} operations was possible within "
            f"{timeout} s"
        )
    if index < len(reading):
        return Selected(reading[index], item, put=False)
    if index < len(reading) + len(writing):
        channel, item = writing[index - len(reading)]
        return Selected(channel, item, put=True)
    return Selected(looking[index - len(reading) - len(writing)], None, put=False)


def _listed(puts: Iterable[Any]) -> Iterable[Any]:
    if isinstance(puts, Channel | In | Out):  # iterating over a channel would take its items
        raise TypeError(f"select: puts must be a list of pairs (channel, item), got {puts!r}")
    return puts


def _pair(pair: Any) -> tuple[Writable[Any], Any]:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise TypeError(f"select: puts must be pairs (channel, item), got {short(pair)}")
    channel, item = pair
    return channel, item


def _channels(ready: Iterable[Channel[Any]]) -> list[Channel[Any]]:
    """Check ``ready`` and return its channels as a list.

    Ports are rejected, because the next get from a port also finishes the previous item.
    """
    looking: list[Channel[Any]] = [] if isinstance(ready, Channel | In) else list(ready)
    if isinstance(ready, Channel | In) or not all(isinstance(channel, Channel) for channel in looking):
        raise TypeError(f"select: ready must be a list of channels, got {ready!r}")
    return looking

"""``select``: exactly one of several operations on channels, as soon as one can be done (C10)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

from flowchan import _core
from flowchan.channel.channel import Channel, In
from flowchan.channel.sides import Readable, Writable
from flowchan.errors import Drained, Empty, Full

T = TypeVar("T")
U = TypeVar("U")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Selected(Generic[T_co]):
    """What :func:`select` did: ``item`` came out of ``channel``, or went into it if ``put`` is true. Of one
    that is only ``ready``, ``item`` is None."""

    channel: Any
    item: T_co
    put: bool


class NothingReady(Empty, Full):
    """None of the operations could be done *now*, or within ``timeout`` seconds."""


@overload
def select(gets: Iterable[Readable[T]], *, timeout: float | None = None) -> Selected[T]: ...
@overload
def select(*, puts: Iterable[tuple[Writable[U], U]], timeout: float | None = None) -> Selected[U]: ...
@overload
def select(
    gets: Iterable[Readable[T]], puts: Iterable[tuple[Writable[U], U]], timeout: float | None = None
) -> Selected[T | U]: ...
@overload
def select(  # mypy looks for one type in a list, and finds none but this for channels of several
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
def select(
    gets: Iterable[Readable[Any]] = (),
    puts: Iterable[tuple[Writable[Any], Any]] = (),
    timeout: float | None = None,
    ready: Iterable[Channel[Any]] = (),
) -> Selected[Any]:
    """Does one of the operations and no other: a get from one of ``gets``, or one of ``puts``, pairs of a
    channel and an item. They may be channels or ports of any transports. Of several that can be done one is
    chosen
    at random.

    ``ready`` are channels of which nothing is taken: one is chosen when a get from it would not wait, because
    an item is inside or because it is drained. So closing an empty channel ends any number of selects that
    have it there.

    Channels of ``gets`` that are drained are left out; when nothing else is left, ``Drained`` is raised. It
    raises what the operation raises: ``Closed`` for a put into a closed channel, ``Broken`` for an aborted
    one. When ``timeout`` seconds are over it raises :class:`NothingReady`, which is an ``Empty`` and a
    ``Full``.
    """
    if isinstance(gets, Channel | In):  # iterating over it would take its items
        raise TypeError(f"select takes a list of channels and ports to get from, here [{gets!r}]")
    reading, looking = list(gets), _channels(ready)
    writing = [(channel, item) for channel, item in puts]  # ours: the pairs may change while this waits
    targets: tuple[Any, ...] = (*reading, *(channel for channel, _ in writing), *looking)
    far = next(filter(is_elsewhere, targets), None)
    choose = _core._select if far is None else far._select
    index, item = choose(reading, writing, timeout, looking)
    if index == -2:
        raise Drained("select: every channel to get from is drained")
    if index < 0:
        raise NothingReady(
            f"select: none of {len(reading) + len(writing) + len(looking)} operations could be done within "
            f"{timeout} s"
        )
    if index < len(reading):
        return Selected(reading[index], item, put=False)
    if index < len(reading) + len(writing):
        channel, item = writing[index - len(reading)]
        return Selected(channel, item, put=True)
    return Selected(looking[index - len(reading) - len(writing)], None, put=False)


def is_elsewhere(target: Any) -> bool:
    """Whether this channel has its home in another process, over a connection."""
    return getattr(target, "is_elsewhere", False)


def _channels(ready: Iterable[Channel[Any]]) -> list[Channel[Any]]:
    """No ports: what one has in hand, its next get would finish, and looking must not."""
    looking: list[Channel[Any]] = [] if isinstance(ready, Channel | In) else list(ready)
    if isinstance(ready, Channel | In) or not all(isinstance(channel, Channel) for channel in looking):
        raise TypeError(f"select: ready takes a list of channels, not {ready!r}")
    return looking

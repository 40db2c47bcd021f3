"""Define the messages between the owner of remote channels and a client process.

The messages are sent over the control stream (stream 0) of the link between both processes. Both sides have
proved that they know the secret, so messages are pickled like items. The messages never contain items,
because each port has a separate stream for its items.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowchan.channel.channel import LARGEST, Channel
from flowchan.errors import ChannelError
from flowchan.items.codec import Opening, Sealed, pack_to_pass_on
from flowchan.items.shared_tensors import is_storage
from flowchan.items.text import short

PLAIN = (bool, int, float, str, bytes, type(None))
"""Types of items that are sent unsealed, because unpickling them runs no user code."""


def control_ring() -> Channel[Any]:
    """Return the ring for one direction of a control stream.

    The ring accepts items of any size that a channel accepts.
    """
    return Channel(1024, across="processes", max_bytes=LARGEST)


@dataclass(frozen=True, slots=True)
class CallRequest:
    """Request to perform operation ``what`` on channel number ``channel``.

    :class:`ClientSession` implements each operation.
    """

    number: int
    channel: int
    what: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """Announces that the caller no longer waits for a call. The call still gets a reply."""

    number: int


class CallCancelled(ChannelError):
    """Reply to a call that was cancelled before it had any effect."""


@dataclass(frozen=True, slots=True)
class RaisedError:
    """Type, arguments and cause of an exception that a call raised at the owner."""

    kind: type[BaseException]
    arguments: tuple[Any, ...]
    cause: Sealed | None

    def exception(self) -> BaseException:
        """Return the exception that the caller must raise."""
        error = self.kind(*self.arguments)
        if self.cause is not None:
            error.__cause__ = cause_in(self.cause)
        return error


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of a call: a value or an exception."""

    number: int
    value: Any = None
    error: RaisedError | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """Announces that a stream carries no more items in either direction.

    Attributes:
        stream: Number of the stream.
        broken: True if the channel that the stream writes to is broken.
        cause: The cause of the break, or None.
        used: Total number of items from the client that the owner has put.
    """

    stream: int
    broken: bool = False
    cause: Sealed | None = None
    used: int = 0


@dataclass(frozen=True, slots=True)
class ServerClosed:
    """Announces that the owner has closed its server.

    Attributes:
        why: The reason, for the message of ``Broken``.
        ended: Numbers of the streams whose channels ended without a failure.
    """

    why: str
    ended: tuple[int, ...] = ()


def sealed(item: Any) -> Any:
    """Pack an item for sending.

    Args:
        item: Any item.

    Returns:
        The item itself if its type is in ``PLAIN``, otherwise the packed item.

    Raises:
        TypeError: Something in the item cannot leave this machine.
    """
    if type(item) in PLAIN:
        return item
    packed, take_back = pack_to_pass_on(item)
    if isinstance(packed, list) and any(isinstance(part, Channel) for part in packed):
        take_back()
        raise TypeError(
            f"can't send {short(item)} to another host: the item contains a channel that only processes on "
            "one machine can share; create the channel with across='hosts'"
        )
    if isinstance(packed, list) and any(map(is_storage, packed)):
        take_back()
        raise TypeError(
            f"can't send {short(item)} to another host: the item contains a tensor in memory that only "
            "processes on one machine can share; send tensor.clone()"
        )
    return Sealed(packed)


def for_put(item: Any) -> Any:
    """Return the object to put into a channel for an item from :func:`sealed`."""
    return Opening(item.packed) if isinstance(item, Sealed) else item


def sealed_cause(cause: BaseException | None) -> Sealed | None:
    """Pack the cause of an error for sending; keep only its text if it cannot be pickled."""
    if cause is None:
        return None
    try:
        found = sealed(cause)
    except Exception:
        found = sealed(RuntimeError(f"{type(cause).__name__}: {cause}"))
    assert isinstance(found, Sealed)
    return found


def packed_in(value: Any) -> Iterator[bytes]:
    """Yield the pickles of all sealed items in ``value``, which may be a nested list."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from packed_in(one)
    elif isinstance(value, Sealed):
        parts = value.packed if isinstance(value.packed, list) else [value.packed]
        yield from (part for part in parts if isinstance(part, bytes))


def cause_in(cause: Sealed | None) -> BaseException | None:
    """Return the exception in ``cause``, or None if there is none."""
    if cause is None:
        return None
    try:
        found = cause.value()
    except Exception as error:  # unpickling runs code of the exception's class, which may raise anything
        return ChannelError(f"the cause can't be received here: {error}")
    return found if isinstance(found, BaseException) else None


def describe_error(error: BaseException) -> RaisedError:
    """Describe an exception for a reply."""
    arguments = error.args if isinstance(error, ChannelError | ValueError | TypeError) else (str(error),)
    known = isinstance(error, CallCancelled) or type(error).__module__ in ("flowchan", "builtins")
    kind = type(error) if known else ChannelError
    return RaisedError(kind, arguments, sealed_cause(error.__cause__))

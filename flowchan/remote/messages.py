"""What a process that has channels of another host open says to their home over the control line of its link
(line 0), and what home answers. Both have proved the secret by then, so these values are pickled as any items
are. The users' items are not among them: those go through ports, over lines of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flowchan.channel.channel import LARGEST, Channel
from flowchan.errors import ChannelError
from flowchan.items.codec import Opening, Sealed, pack_to_pass_on
from flowchan.items.shared_tensors import is_storage
from flowchan.items.text import short

PLAIN = (bool, int, float, str, bytes, type(None))
"""Of what needs no seal: nobody's code runs when it is unpickled."""


def control_ring() -> Channel[Any]:
    """For what goes one way over a control line. It takes every item that any channel takes."""
    return Channel(1024, across="processes", max_bytes=LARGEST)


@dataclass(frozen=True, slots=True)
class CallRequest:
    """``what`` is to be done with the channel of this number; see ``ClientSession`` for what there is."""

    number: int
    channel: int
    what: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """The caller waits no more. The call is answered all the same."""

    number: int


class Recalled(ChannelError):
    """The answer to a call that was cancelled before anything was done."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """What the call raised at home: the error's type and arguments, and its cause."""

    kind: type[BaseException]
    arguments: tuple[Any, ...]
    cause: Sealed | None

    def error(self) -> BaseException:
        error = self.kind(*self.arguments)
        if self.cause is not None:
            error.__cause__ = cause_in(self.cause)
        return error


@dataclass(frozen=True, slots=True)
class Reply:
    number: int
    value: Any = None
    wrong: Wrong | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing more goes through the port that this line carries, in either direction. ``broken``: what it
    writes to is, by ``cause``. ``used``: how many items of the client have been put in all."""

    line: int
    broken: bool = False
    cause: Sealed | None = None
    used: int = 0


@dataclass(frozen=True, slots=True)
class ServerClosed:
    """The server is no more, and why. ``ended``: the lines whose channel has come to its clean end."""

    why: str
    ended: tuple[int, ...] = ()


def sealed(item: Any) -> Any:
    """As what an item travels. Raises ``TypeError`` where it can't leave its machine."""
    return seal(item)[0]


def seal(item: Any) -> tuple[Any, Callable[[], None]]:
    """As what an item travels, and what to call if it does not."""
    if type(item) in PLAIN:
        return item, lambda: None
    packed, take_back = pack_to_pass_on(item)
    if isinstance(packed, list) and any(isinstance(part, Channel) for part in packed):
        take_back()
        raise TypeError(
            f"can't send {short(item)} to another host: it holds a channel that only processes of one "
            "machine can share; make it with across='hosts'"
        )
    if isinstance(packed, list) and any(map(is_storage, packed)):
        take_back()
        raise TypeError(
            f"can't send {short(item)} to another host: it holds a tensor in memory that only processes of "
            "one machine can share; send tensor.clone()"
        )
    return Sealed(packed), take_back


def to_put(item: Any) -> Any:
    """What to put at home for an item that came as :func:`sealed` made it."""
    return Opening(item.packed) if isinstance(item, Sealed) else item


def sealed_cause(cause: BaseException | Sealed | None) -> Sealed | None:
    """Of one that can't be sent, its text."""
    if cause is None or isinstance(cause, Sealed):  # in a call whose items stay sealed, this does, too
        return cause
    try:
        found = sealed(cause)
    except Exception:
        found = sealed(RuntimeError(f"{type(cause).__name__}: {cause}"))
    assert isinstance(found, Sealed)
    return found


def packed_in(value: Any) -> Iterator[bytes]:
    """The pickles of all items that are still sealed in what a call is answered."""
    if isinstance(value, list | tuple):
        for one in value:
            yield from packed_in(one)
    elif isinstance(value, Sealed):
        parts = value.packed if isinstance(value.packed, list) else [value.packed]
        yield from (part for part in parts if isinstance(part, bytes))


def cause_in(cause: Sealed | None) -> BaseException | None:
    if cause is None:
        return None
    try:
        found = cause.value()
    except Exception as error:  # its own making may raise anything
        return ChannelError(f"the cause can't be received here: {error}")
    return found if isinstance(found, BaseException) else None


def wrong(error: BaseException) -> Wrong:
    arguments = error.args if isinstance(error, ChannelError | ValueError | TypeError) else (str(error),)
    known = isinstance(error, Recalled) or type(error).__module__ in ("flowchan", "builtins")
    kind = type(error) if known else ChannelError
    return Wrong(kind, arguments, sealed_cause(error.__cause__))

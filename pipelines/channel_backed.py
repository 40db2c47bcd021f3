"""What patterns share that are made of channels and know more than their channels do.

An object of :class:`Shared` crosses to another process by its channels. In each process there is one object
for one set of channels, however often it arrives, and what it knows of its own process is made anew in a
forked child.
"""

from __future__ import annotations

import abc
import os
import weakref
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

from flowchan import Channel, In

Among = Literal["processes", "hosts"]
"""Between whom a pattern holds: processes of one machine, or of several."""


def check_among(pattern: str, across: object) -> None:
    """For those that are made of what is copied, so not of channels between threads."""
    if across not in get_args(Among):
        allowed = " or ".join(map(repr, get_args(Among)))
        raise ValueError(f"{pattern}: across must be {allowed}, not {across!r}")


class Shared(abc.ABC):
    """Base of what is made of ``channels`` and crosses to other processes with them."""

    channels: tuple[Channel[Any], ...]

    def _open(self, channels: tuple[Channel[Any], ...]) -> None:
        """Every object begins here: the maker's own, and the one that arrives in another process."""
        self.channels = channels
        self._renew()
        _known[id(channels[0])] = self  # no other object can have this id while we hold the channel

    @abc.abstractmethod
    def _renew(self) -> None:
        """Makes what belongs to this process: at the beginning, and again in a forked child."""

    def _another(self, capacity: int) -> Channel[Any]:
        """A new channel for those who have these; it lives where these do, whoever asks for it."""
        return self.channels[0]._another(capacity)

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, (type(self), self.channels)


class Held(abc.ABC):
    """What is acquired and released, and may be used in a ``with``."""

    @abc.abstractmethod
    def acquire(self) -> bool: ...
    @abc.abstractmethod
    def release(self) -> None: ...

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.release()


S = TypeVar("S", bound=Shared)


def arrive(kind: type[S], channels: tuple[Channel[Any], ...]) -> S:
    """This process's object for the channels."""
    known = _known.get(id(channels[0]))
    if isinstance(known, kind):
        return known
    made = kind.__new__(kind)
    made._open(channels)
    return made


_known: weakref.WeakValueDictionary[int, Shared] = weakref.WeakValueDictionary()


def _after_fork() -> None:
    for shared in list(_known.values()):
        shared._renew()


os.register_at_fork(after_in_child=_after_fork)


class _NotDone(Exception):
    """Leaving a reading port by an exception gives back what it has in hand."""


def give_back(port: In[Any]) -> None:
    """Closes a reading port, and what it has in hand is in the channel again, at the front. One step: whoever
    is killed during it has either done it or has the channel do it."""
    port.__exit__(_NotDone, _NotDone(), None)

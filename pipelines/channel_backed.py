"""Base classes of patterns that consist of channels and keep further state in each process.

An object of :class:`Shared` is sent to another process as its channels. Each process has one object for one
set of channels, however often the object arrives. A forked child creates the state of its process again.
"""

from __future__ import annotations

import abc
import os
import weakref
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

from flowchan import Channel, In

Among = Literal["processes", "hosts"]
"""Scope of a pattern: the processes of one machine, or of several."""


def check_among(pattern: str, across: object) -> None:
    """Check the scope of a pattern, which cannot consist of channels between threads."""
    if across not in get_args(Among):
        allowed = " or ".join(map(repr, get_args(Among)))
        raise ValueError(f"{pattern}: across must be {allowed}, got {across!r}")


class Shared(abc.ABC):
    """Base class of an object that consists of ``channels`` and is sent to other processes with them."""

    channels: tuple[Channel[Any], ...]

    def _open(self, channels: tuple[Channel[Any], ...]) -> None:
        """Initialise an object, both the original and one that arrives in another process."""
        self.channels = channels
        self._renew()
        # No other object can have this id while this object holds the channel.
        _known[id(channels[0])] = self

    @abc.abstractmethod
    def _renew(self) -> None:
        """Create the state of this process, at first and again in a forked child."""

    def _another(self, capacity: int) -> Channel[Any]:
        """Return a new channel with the same owner as these channels."""
        return self.channels[0]._another(capacity)

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, (type(self), self.channels)


class Held(abc.ABC):
    """Base class of an object that is acquired and released, and works in a ``with`` statement."""

    @abc.abstractmethod
    def acquire(self) -> bool:
        """Acquire the object, and return whether this succeeded."""

    @abc.abstractmethod
    def release(self) -> None:
        """Release the object."""

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.release()


S = TypeVar("S", bound=Shared)


def arrive(kind: type[S], channels: tuple[Channel[Any], ...]) -> S:
    """Return this process's object for the channels."""
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
    """Exception that makes a reading port return the items that it has on lease."""


def give_back(port: In[Any]) -> None:
    """Close a reading port and return its items on lease to the front of the channel.

    This is one step. If the process is killed during the step, either the step is complete or the channel
    completes it.
    """
    port.__exit__(_NotDone, _NotDone(), None)

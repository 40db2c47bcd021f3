"""Define base classes for patterns that consist of channels and some state in each process.

When an object of :class:`Shared` is sent to another process, only its channels are sent. Each process has one
object per set of channels, even if it receives the object several times. A forked child creates new state.
"""

from __future__ import annotations

import abc
import os
import weakref
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

from flowchan import Channel, In

Among = Literal["processes", "hosts"]
"""Scope of a pattern: the processes on one machine, or on several hosts."""


def check_among(pattern: str, across: object) -> None:
    """Raise ``ValueError`` unless ``across`` is ``"processes"`` or ``"hosts"``."""
    if across not in get_args(Among):
        allowed = " or ".join(map(repr, get_args(Among)))
        raise ValueError(f"{pattern}: across must be {allowed}, got {across!r}")


class Shared(abc.ABC):
    """Base class of objects that consist of ``channels``.

    A pickle of the object contains only these channels.
    """

    channels: tuple[Channel[Any], ...]

    def _open(self, channels: tuple[Channel[Any], ...]) -> None:
        """Initialise this object, which is the original or was received from another process."""
        self.channels = channels
        self._renew()
        # While this object holds the channel, no other object can have the same id.
        _known[id(channels[0])] = self

    @abc.abstractmethod
    def _renew(self) -> None:
        """Create this process's state. A forked child calls this method again."""

    def _another(self, capacity: int) -> Channel[Any]:
        """Return a new channel with the same owner as the existing channels."""
        return self.channels[0]._another(capacity)

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, (type(self), self.channels)


class Held(abc.ABC):
    """Base class of locks and similar objects, which support ``acquire``, ``release`` and ``with``."""

    @abc.abstractmethod
    def acquire(self) -> bool:
        """Acquire the object, and return True on success."""

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
    """Return this process's object for the channels, and create the object if there is none yet."""
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
    """Raised inside the ``with`` block of a reading port, so that the port returns its leased items."""


def give_back(port: In[Any]) -> None:
    """Close a reading port and return its leased items to the front of the channel.

    The return is one atomic step: if the process is killed halfway, the channel completes the step.
    """
    port.__exit__(_NotDone, _NotDone(), None)

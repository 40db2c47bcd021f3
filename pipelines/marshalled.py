"""An object that is serialised once and read many times, by any thread of any process that has it.

The serialised object is the one item of a channel in shared memory. Reading takes it on lease and gives it
back, so a reader that is killed has not taken it away.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from flowchan import Channel, Drained
from flowchan.pipelines.channel_backed import give_back

T = TypeVar("T")


class Marshalled(Generic[T]):
    """What :func:`marshal` gives. It can be an argument of a process and an item of a channel."""

    def __init__(self, obj: T) -> None:
        self._channel: Channel[T] = Channel(1, across="processes")
        self._channel.put(obj)
        self._channel.close()

    def read(self) -> T:
        """A new copy of the object. Readers take turns. Raises ``Closed`` after :meth:`close`."""
        port = self._channel.reader()
        try:
            item: T = port.get()
        finally:
            give_back(port)
        return item

    def close(self) -> None:
        """Gives the memory free, for all who have it; nobody can read it any more. May be called again."""
        try:
            self._channel.get()
        except Drained:
            pass  # somebody has closed it

    def __repr__(self) -> str:
        return f"<Marshalled object{', closed' if self._channel.drained else ''}>"


def marshal(obj: T) -> Marshalled[T]:
    """Serialises ``obj`` once; every ``read()`` of the handle gives a copy of its own.

    Anything that can be an item of a channel between processes can be marshalled: lambdas, closures and NumPy
    arrays too. Raises ``TypeError`` naming the part that can't be.
    """
    return Marshalled(obj)

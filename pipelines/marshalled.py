"""Serialise an object once, so that any process can read it many times.

The serialised object is the only item of a channel in shared memory. A reader leases the item and then gives
it back. A reader that dies therefore does not remove the object.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from flowchan import Channel, Drained
from flowchan.pipelines.channel_backed import give_back
from flowchan.public import public

T = TypeVar("T")


@public
class Marshalled(Generic[T]):
    """Handle of a serialised object, returned by :func:`marshal`.

    The handle can be passed to a process as an argument, or put into a channel.

    Args:
        obj: Object to serialise.

    Example:
        >>> from flowchan.pipelines import marshal
        >>> table = marshal({"a": 1})
        >>> table.read()
        {'a': 1}
        >>> table.close()
    """

    def __init__(self, obj: T) -> None:
        self._channel: Channel[T] = Channel(1, across="processes")
        self._channel.put(obj)
        self._channel.close()

    def read(self) -> T:
        """Return a new copy of the object.

        Only one reader at a time can copy the object; other readers wait.

        Returns:
            The copy.

        Raises:
            Closed: The handle was closed.
        """
        port = self._channel.reader()
        try:
            item: T = port.get()
        finally:
            give_back(port)
        return item

    def close(self) -> None:
        """Free the object's memory in all processes.

        Later reads raise ``Closed``. Further calls have no effect.
        """
        try:
            self._channel.get()
        except Drained:
            pass  # already closed

    def __repr__(self) -> str:
        return f"<Marshalled object{', closed' if self._channel.drained else ''}>"


@public
def marshal(obj: T) -> Marshalled[T]:
    """Serialise an object once. Each call of the handle's ``read()`` then returns a new copy.

    Args:
        obj: Any value that a channel between processes accepts, including lambdas, closures and NumPy arrays.

    Returns:
        The handle.

    Raises:
        TypeError: A part of ``obj`` cannot be serialised; the message names that part.

    Example:
        >>> from flowchan.pipelines import map, marshal
        >>> table = marshal({1: "a", 2: "b"})
        >>> map(2, lambda table, worker: table.read()[worker], table, on="process").join()
        ['a', 'b']
    """
    return Marshalled(obj)

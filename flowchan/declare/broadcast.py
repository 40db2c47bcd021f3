"""Define values that the program can change while workers read them: ``graph.broadcast(initial)``.

The program keeps a broadcast value as a plain attribute. Each worker process reads it from shared memory
(``items/latest_value.py``).

Invariants. While a worker's function processes one item, every read of a value returns the version that the
first read found. The worker records these versions in a table and clears it before the next call. The table
is a context variable, because the workers of an async stage share one thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar, cast

from flowchan.items.latest_value import LatestValue, LatestValueReader, Versioned, parts_of
from flowchan.public import public

T = TypeVar("T")
Key = tuple[str, str, int]
"""Name of the graph, the line that creates it, and the value's number in the graph. If a worker imports the
user's module again, the key stays the same."""


@public
class Broadcast(Generic[T]):
    """Value that the program sets and all workers of a graph read.

    Create a value with :meth:`Graph.broadcast`. Refer to it in a stage's function, or pass it as an argument.

    Only the program can set the value, from its own code or from stages on threads. A stage in another
    process can put the new value into a stream. A ``sink`` on a thread, at the end of that stream, can then
    set the value.

    While a stage's function processes one item, all its reads return the same version. The next call, or a
    retry, reads the current version. Sources and stages with ports have no call per item, so each of their
    reads returns the latest version.

    Example:
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> factor = graph.broadcast(10)
        >>> products = graph.source([1, 2]).map(lambda n: (n * factor.get(), factor.version)).collect()
        >>> graph.run()[products]
        [(10, 0), (20, 0)]
        >>> factor.set(100)
        1
        >>> graph.run()[products]
        [(100, 1), (200, 1)]
    """

    def __init__(self, key: Key, initial: T) -> None:
        self._key = key
        self._id = os.urandom(8)
        self._pid: int | None = os.getpid()  # process that created this object; None if it was received
        self._latest: Versioned | None = Versioned(0, initial)
        self._shared: LatestValue | LatestValueReader | None = None
        self._lock = threading.Lock()

    def get(self) -> T:
        """Return the value.

        In a worker process, arrays are read-only views of memory that all workers share. Threads get the very
        object that was set. Do not modify the value.

        Returns:
            The current value.

        Raises:
            Broken: The program has ended.
            RuntimeError: The caller is neither the program nor a worker of the value's graph.

        Example:
            >>> from flowchan import Graph
            >>> Graph().broadcast("a").get()
            'a'
        """
        pins = _pins.get()  # repeats _read() here to save a function call
        found = None if pins is None else pins.get(self)
        value: T = (self._read() if found is None else found).value
        return value

    @property
    def version(self) -> int:
        """Number of the current version: 0 for the initial value, and one more after each :meth:`set`."""
        return self._read().version

    def read(self) -> tuple[T, int]:
        """Return the value and its version as one consistent pair.

        Returns:
            The value, and its number as in :attr:`version`.

        Raises:
            Broken: The program has ended.
            RuntimeError: The caller is neither the program nor a worker of the value's graph.

        Example:
            >>> from flowchan import Graph
            >>> Graph().broadcast("a").read()
            ('a', 0)
        """
        found = self._read()
        return cast(T, found.value), found.version

    def set(self, value: T) -> int:
        """Set the value for all workers of the graph, in this and later runs.

        The call does not wait for any worker. A worker that is using the old value keeps it until its
        function returns. If this method raises, the value does not change.

        Args:
            value: The new value, which must be picklable if the graph has worker processes.

        Returns:
            The version of the new value.

        Raises:
            OSError: There is not enough memory for the value.
            RuntimeError: The caller is not the program.
            TypeError: A part of the value cannot be sent to a worker process.

        Example:
            >>> from flowchan import Graph
            >>> value = Graph().broadcast("a")
            >>> value.set("b"), value.get()
            (1, 'b')
        """
        if self._latest is None or not self._is_own():
            raise RuntimeError(
                f"{self!r}: set must be called in the program; put the new value into a stream, and call "
                "set in a sink on a thread"
            )
        with self._lock:
            latest = Versioned(self._latest.version + 1, value)
            if (shared := self._own_shared()) is not None:
                shared.publish(latest)
            self._latest = latest
        return latest.version

    def _read(self) -> Versioned:
        pins = _pins.get()
        if pins is None:
            return self._in_force()
        found = pins.get(self)
        if found is None:
            found = pins[self] = self._in_force()
        return found

    def _in_force(self) -> Versioned:
        if self._latest is not None and self._is_own():
            return self._latest
        id, reader = (_readers or {}).get(self._key, (b"", None))
        # If a worker imports the module that creates the value, the import creates a second object for the
        # value, with another id.
        if reader is not None and (id == self._id or self._pid == os.getpid()):
            return reader.latest()
        raise RuntimeError(
            f"{self!r} must be read in the program or in a worker of its graph; this process is neither"
        )

    def _is_own(self) -> bool:
        """Return whether this process is the program that owns the value.

        If the code of a worker runs another graph, the worker owns the values of that graph.
        """
        return _readers is None or (self._pid == os.getpid() and self._key not in _readers)

    def _check(self) -> None:
        """Raise ``TypeError`` if the value cannot be sent to a worker process."""
        if self._latest is not None:
            parts_of(self._latest.value)

    def _share(self) -> None:
        """Publish the value for worker processes, unless it is already published."""
        with self._lock:
            if self._latest is not None and self._own_shared() is None:
                self._shared = LatestValue(self._latest)

    def _own_shared(self) -> LatestValue | None:
        """Return the value's shared memory, or None if this process did not create it."""
        shared = self._shared
        return shared if isinstance(shared, LatestValue) and shared.pid == os.getpid() else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._key, self._id, self._shared)

    def __repr__(self) -> str:
        graph, _, number = self._key
        return f"<Broadcast {number} of graph {graph!r}>"


def _received(key: Key, id: bytes, shared: LatestValueReader | None) -> Broadcast[Any]:
    value: Broadcast[Any] = Broadcast(key, None)
    value._id, value._shared, value._pid, value._latest = id, shared, None, None
    return value


_pins: ContextVar[dict[Broadcast[Any], Versioned] | None] = ContextVar("flowchan versions", default=None)
_readers: dict[Key, tuple[bytes, LatestValueReader]] | None = None  # None in the program itself


def begin_reading(values: Iterable[Broadcast[Any]]) -> None:
    """Make a graph's broadcast values readable in this worker process before any user code is loaded."""
    global _readers
    _readers = {
        value._key: (value._id, value._shared.opened()) for value in values if value._shared is not None
    }


def pinning(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that a call sees the same version of each value until it returns."""
    pins: dict[Broadcast[Any], Versioned] = {}
    _pins.set(pins)

    def call(*args: Any) -> Any:
        pins.clear()
        return function(*args)

    return call


def end_pinning() -> None:
    """Release the versions that the current worker has read."""
    _pins.set(None)

"""Share a dictionary between processes, for settings and results.

Each access copies the whole dictionary. A shared dictionary is therefore not suitable for large data. The
dictionary is the only item in a channel, and changes are made under a
:class:`~flowchan.pipelines.locks.Lock`. A change appends the new dictionary to the channel and then removes
the old one. If a process dies between the two steps, the change is valid, and the next process to access the
dictionary removes the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from pickle import PickleBuffer
from typing import Any, TypeVar

from flowchan import Channel, pack, unpack
from flowchan.items.arguments import refuses_misspelt
from flowchan.pipelines.channel_backed import Among, Shared, arrive, check_among, give_back
from flowchan.pipelines.locks import Lock
from flowchan.public import public

K = TypeVar("K")
V = TypeVar("V")


@public
class SharedDict(Shared, MutableMapping[K, V]):
    """Dictionary that several processes share. Each operation is atomic.

    To combine several operations into one atomic step, use ``with mapping.lock:``. Reading returns a copy of
    the value. To change the value, assign to the key again, or use a nested ``SharedDict``. Keys and values
    must be picklable by pickle or cloudpickle. Some values are shared and not copied: channels, patterns made
    of channels, and tensors after ``share_memory_()``. If ``across`` is ``"hosts"``, the dictionary works
    only while the process that created it is alive.

    Args:
        items: Initial items, a mapping or pairs (default: none).
        across: ``"processes"`` on one machine (default), or ``"hosts"``.

    Raises:
        ValueError: ``across`` is unknown.

    Example:
        >>> from flowchan.pipelines import SharedDict, map
        >>> def work(counts, worker):
        ...     counts.increment("done")
        >>> counts = SharedDict({"done": 0})
        >>> results = map(4, work, counts, on="process").join()
        >>> counts.copy()
        {'done': 4}
    """

    @refuses_misspelt("SharedDict")
    def __init__(
        self, items: Mapping[K, V] | Iterable[tuple[K, V]] = (), *, across: Among = "processes"
    ) -> None:
        check_among("SharedDict", across)
        cell: Channel[Any] = Channel(2, across=across)
        cell.put({key: _packed(value) for key, value in dict(items).items()})
        self.lock = Lock(across=across)
        self._open((cell, *self.lock.channels))
        cell.reader()._remain()  # keeps the channel open when its last reader exits

    def _renew(self) -> None:
        self._cell, token = self.channels
        self.lock = arrive(Lock, (token,))

    def _read(self) -> dict[K, Any]:
        with self.lock:
            while len(self._cell) == 2:
                # Remove the old dictionary: a process appended the new one, but was killed or interrupted
                # before this step.
                self._cell.get_nowait()
            port = self._cell.reader()
            try:
                found: dict[K, Any] = port.get()
            finally:
                give_back(port)
        return found

    def _change(self, change: Callable[[dict[K, Any]], object]) -> None:
        """Replace the dictionary with a modified copy, unless ``change``, which modifies the copy, raises."""
        with self.lock:
            changed = self._read()
            change(changed)
            self._cell.put(changed)
            self._cell.get_nowait()

    def __getitem__(self, key: K) -> V:
        value: V = unpack(self._read()[key])
        return value

    def __setitem__(self, key: K, value: V) -> None:
        self.update({key: value})

    def __delitem__(self, key: K) -> None:
        self._change(lambda items: items.__delitem__(key))

    def __iter__(self) -> Iterator[K]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __contains__(self, key: object) -> bool:
        return key in self._read()

    def copy(self) -> dict[K, V]:
        """Return a consistent snapshot of all items as a plain dictionary."""
        return {key: unpack(value) for key, value in self._read().items()}

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update several items in one step, like ``dict.update``.

        Args:
            *args: A mapping or an iterable of pairs.
            **kwargs: Items with string keys.

        Example:
            >>> from flowchan.pipelines import SharedDict
            >>> ages = SharedDict()
            >>> ages.update({"Ada": 36}, Alan=41)
            >>> ages["Ada"], ages["Alan"]
            (36, 41)
        """
        packed = {key: _packed(value) for key, value in dict(*args, **kwargs).items()}
        self._change(lambda items: items.update(packed))

    def increment(self, key: K, by: Any = 1) -> Any:
        """Add to a number in one atomic step.

        Args:
            key: Key of the number. A new key starts at 0.
            by: Number to add (default: 1).

        Returns:
            The new value.

        Raises:
            TypeError: The value of the key is not a number.

        Example:
            >>> from flowchan.pipelines import SharedDict
            >>> counts = SharedDict()
            >>> counts.increment("done"), counts.increment("done", by=2)
            (1, 3)
        """
        found: list[Any] = []

        def add(items: dict[K, Any]) -> None:
            found.append((unpack(items[key]) if key in items else 0) + by)
            items[key] = _packed(found[0])

        self._change(add)
        return found[0]

    def clear(self) -> None:
        """Remove all items.

        Example:
            >>> from flowchan.pipelines import SharedDict
            >>> ages = SharedDict({"Ada": 36})
            >>> ages.clear()
            >>> len(ages)
            0
        """
        self._change(lambda items: items.clear())

    def pop(self, *args: Any) -> Any:
        """Remove a key and return its value, like ``dict.pop``.

        Args:
            *args: Key, and optionally the value to return for a missing key.

        Returns:
            The value of the key, or the default.

        Raises:
            KeyError: The key is missing, and no default is given.

        Example:
            >>> from flowchan.pipelines import SharedDict
            >>> ages = SharedDict({"Ada": 36})
            >>> ages.pop("Ada"), ages.pop("Alan", None)
            (36, None)
        """
        with self.lock:
            return super().pop(*args)

    def popitem(self) -> tuple[K, V]:
        """Remove and return one item, like ``dict.popitem``, in no particular order.

        Returns:
            The key and its value.

        Raises:
            KeyError: The dictionary is empty.

        Example:
            >>> from flowchan.pipelines import SharedDict
            >>> SharedDict({"Ada": 36}).popitem()
            ('Ada', 36)
        """
        with self.lock:
            return super().popitem()

    def setdefault(self, *args: Any) -> Any:
        """Return the value of a key, like ``dict.setdefault``. A missing key is first set to the default.

        Args:
            *args: Key, and the value to set for a missing key (default: None).

        Returns:
            The value of the key.

        Example:
            >>> from flowchan.pipelines import SharedDict
            >>> ages = SharedDict({"Ada": 36})
            >>> ages.setdefault("Ada", 0), ages.setdefault("Alan", 41)
            (36, 41)
        """
        with self.lock:
            return super().setdefault(*args)

    def __repr__(self) -> str:
        return f"SharedDict({self.copy()!r})"


def _packed(value: Any) -> Any:
    """Pack a value. Readers copy even arrays on each access, so that each reader owns its copy."""
    packed = pack(value)
    if isinstance(packed, bytes):
        return packed
    return [bytearray(part) if isinstance(part, PickleBuffer) else part for part in packed]

"""A dictionary that several processes share, for settings and results, not for masses of data: each access
copies it whole.

The dictionary is the one item of a channel, changed under a :class:`~flowchan.pipelines.locks.Lock`. A change
puts the new dictionary beside the old one and then takes the old one out; whoever dies between the two has
made the change, and the next one finishes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from pickle import PickleBuffer
from typing import Any, TypeVar

from flowchan import Channel, pack, unpack
from flowchan.items.arguments import refuses_misspelt
from flowchan.pipelines.channel_backed import Among, Shared, arrive, check_among, give_back
from flowchan.pipelines.locks import Lock

K = TypeVar("K")
V = TypeVar("V")


class SharedDict(Shared, MutableMapping[K, V]):
    """A mapping between processes; with ``across="hosts"`` between those of several machines, as long as the
    process lives that made it. Each operation is done as a whole; do several as one under ``with
    mapping.lock:``.

    What is read is a copy: to change a value within, assign it again, or store a ``SharedDict`` in it. Keys
    and values are whatever can be pickled, by cloudpickle where plain pickle cannot; channels too, what is
    made of them, and tensors after ``share_memory_()``, all of which stay shared.
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
        cell.reader()._remain()  # the last reader's exit would end the channel for those who write

    def _renew(self) -> None:
        self._cell, token = self.channels
        self.lock = arrive(Lock, (token,))

    def _read(self) -> dict[K, Any]:
        with self.lock:
            while len(self._cell) == 2:
                self._cell.get_nowait()  # somebody died after the change, or was interrupted
            port = self._cell.reader()
            try:
                found: dict[K, Any] = port.get()
            finally:
                give_back(port)
        return found

    def _change(self, change: Callable[[dict[K, Any]], object]) -> None:
        """Lets ``change`` work on a copy that then takes the place of what is there; if it raises, nothing is
        changed."""
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
        """All of it at one moment, as a plain dictionary."""
        return {key: unpack(value) for key, value in self._read().items()}

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As ``dict.update``, and all of it at once."""
        packed = {key: _packed(value) for key, value in dict(*args, **kwargs).items()}
        self._change(lambda items: items.update(packed))

    def increment(self, key: K, by: Any = 1) -> Any:
        """Adds to a number, which is 0 if the key is new, in one step that no other process comes between.
        Gives the new value."""
        found: list[Any] = []

        def add(items: dict[K, Any]) -> None:
            found.append((unpack(items[key]) if key in items else 0) + by)
            items[key] = _packed(found[0])

        self._change(add)
        return found[0]

    def clear(self) -> None:
        """Takes everything out."""
        self._change(lambda items: items.clear())

    def pop(self, *args: Any) -> Any:
        """As ``dict.pop``."""
        with self.lock:
            return super().pop(*args)

    def popitem(self) -> tuple[K, V]:
        """As ``dict.popitem``, without promising which one."""
        with self.lock:
            return super().popitem()

    def setdefault(self, *args: Any) -> Any:
        """As ``dict.setdefault``."""
        with self.lock:
            return super().setdefault(*args)

    def __repr__(self) -> str:
        return f"SharedDict({self.copy()!r})"


def _packed(value: Any) -> Any:
    """Arrays too are copied at each access, so that what is read belongs to who reads it."""
    packed = pack(value)
    if isinstance(packed, bytes):
        return packed
    return [bytearray(part) if isinstance(part, PickleBuffer) else part for part in packed]

"""A dictionary that several processes share, for settings and results, not for masses of data: each access copies it whole.

The dictionary is the one item of a channel, changed under a :class:`~flowchan.pipelines.locks.Lock`. A change puts the new
dictionary beside the old one and then takes the old one out; whoever dies between the two has made the change, and the
next one finishes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

from flowchan import Channel
from flowchan.pipelines.locks import Lock
from flowchan.pipelines.sharing import Shared, give_back

K = TypeVar("K")
V = TypeVar("V")
R = TypeVar("R")


class SharedDict(Shared, MutableMapping[K, V]):
    """A mapping between processes. Each operation is done as a whole; do several as one under ``with mapping.lock:``.

    What is read is a copy: to change a value within, assign it again, or store a ``SharedDict`` in it. Keys and values
    are whatever can be an item of a channel between processes.
    """

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        cell: Channel[Any] = Channel(2, across="processes")
        cell.put(dict(items))
        self.lock = Lock()
        self._open((cell, *self.lock.channels))

    def _renew(self) -> None:
        self._cell, token = self.channels
        self.lock = Lock._arrive((token,))
        self._stay = self._cell.reader()  # the last reader's exit would end the channel for those who write

    def _read(self) -> dict[K, V]:
        with self.lock:
            if len(self._cell) == 2:
                self._cell.get_nowait()  # somebody died after the change
            port = self._cell.reader()
            try:
                found: dict[K, V] = port.get()
            finally:
                give_back(port)
        return found

    def _change(self, change: Callable[[dict[K, V]], R]) -> R:
        """Lets ``change`` work on a copy that then takes the place of what is there; if it raises, nothing is changed."""
        with self.lock:
            changed = self._read()
            result = change(changed)
            self._cell.put(changed)
            self._cell.get_nowait()
        return result

    def __getitem__(self, key: K) -> V:
        return self._read()[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._change(lambda items: items.__setitem__(key, value))

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
        return self._read()

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As ``dict.update``, and all of it at once."""
        self._change(lambda items: items.update(*args, **kwargs))

    def clear(self) -> None:
        """Takes everything out."""
        self._change(lambda items: items.clear())

    def pop(self, *args: Any) -> Any:
        """As ``dict.pop``."""
        return self._change(lambda items: items.pop(*args))

    def popitem(self) -> tuple[K, V]:
        """As ``dict.popitem``."""
        return self._change(lambda items: items.popitem())

    def setdefault(self, *args: Any) -> Any:
        """As ``dict.setdefault``."""
        return self._change(lambda items: items.setdefault(*args))

    def __repr__(self) -> str:
        return f"SharedDict({self._read()!r})"

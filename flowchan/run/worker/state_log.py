"""State for each key of a keyed stage, which outlives the death of a worker.

Algorithm. Each worker has a write-ahead log in an in-memory file of the program. Before an item's lease ends,
the worker appends one record: the item's number, its key, and the state of the key after the item. A
replacement reads the log. It ignores and removes the records of its first item and of later numbers.

Why this is exact. A worker takes its items in the order of their numbers, one at a time. Let n be the number
of the first item that the replacement takes.

- If the worker died before the record of n was complete, the log ends with the items before n.
- If the worker died later, but before the lease of n ended, the record of n is removed. The replacement calls
  the function again with the state before n, and the channel discards outputs that it already has.
- If the lease of an item has ended, its record is in the log, because the record precedes the end of the
  lease. The number of the item is less than n.

Invariants. A record is valid if its checksum matches. A worker that is killed while it writes leaves at most
one invalid record, at the end. If more than half of a log is out of date, the worker writes a copy of the
current states into a second file. One write of eight bytes then makes this file the log. A call that raises
does not change the state of its key.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from flowchan.channel.ports import In
from flowchan.declare.callables import is_async
from flowchan.declare.values import Stage
from flowchan.errors import Broken
from flowchan.items.codec import dumps_in_one
from flowchan.items.keyed_state import MISSING, KeyedState
from flowchan.items.text import shown
from flowchan.run.policy.failures import OwnEnd
from flowchan.run.worker.program_file import ProgramFile

MIN_COMPACTED_BYTES = 1 << 20
"""A log with fewer bytes is not copied."""
_RECORD = struct.Struct("<IIQ")  # checksum of the rest, size of the contents, number of the item plus one
_START = struct.Struct("<Q")


class StateLog:
    """Two files of the program, one of which holds the log of a worker."""

    def __init__(self) -> None:
        self.files = (ProgramFile("flowchan state"), ProgramFile("flowchan state"))


def log_of(stage: Stage) -> StateLog | None:
    """Return a new log for one worker of a stage, or None if the stage has no state."""
    return StateLog() if "state" in stage.options else None


class KeyedStates:
    """States of all keys of one worker.

    Args:
        stage: The keyed stage.
        log: Log of the worker.
        reader: Port from which the worker takes its items.
    """

    def __init__(self, stage: Stage, log: StateLog, reader: In[Any]) -> None:
        self._make, self._log, self._reader = stage.options["state"], log, reader
        self._values: dict[Hashable, Any] = {}
        self._places: dict[Hashable, tuple[int, int]] = {}  # offset and size of each key's record
        self._active = self._end = self._live = 0
        self._is_read = False

    @contextmanager
    def of(self, key: Hashable) -> Iterator[KeyedState[Any]]:
        """Yield the state of a key for the current item, and store it unless an error is raised."""
        number = self._reader._number
        if not self._is_read:
            self.read_before(number)
        state = KeyedState(key, self._values.get(key, MISSING), self._make)
        try:
            yield state
            if state._used:
                self._store(number, key, state._value)
        except BaseException:
            if state._used:
                self._restore(key)
            raise

    def skip(self) -> None:
        """Leave the states as they were before the current item, which fails without a call."""
        if not self._is_read:
            self.read_before(self._reader._number)

    def read_before(self, number: int) -> None:
        """Read the records of all items before item ``number``, and remove the others."""
        try:
            header = os.pread(self._log.files[0].fd, _START.size, 0)
            self._active = _START.unpack(header)[0] if header else 0
            self._end, size = _START.size, os.fstat(self._file).st_size
        except Broken as end:
            raise OwnEnd from end
        self._is_read = True
        if size > self._end:
            with mmap.mmap(self._file, size, access=mmap.ACCESS_READ) as data:
                self._read(data, number)
        os.ftruncate(self._file, self._end)

    def _read(self, data: mmap.mmap, number: int) -> None:
        """Read the valid records of the items before item ``number``."""
        while self._end + _RECORD.size <= len(data):
            checksum, size, next_number = _RECORD.unpack_from(data, self._end)
            start, end = self._end + _RECORD.size, self._end + _RECORD.size + size
            if next_number > number or checksum != zlib.crc32(data[self._end + 4 : end]):
                return
            entry = pickle.loads(data[start:end])
            self._put(entry[0], entry[1] if len(entry) == 2 else MISSING, end - self._end)

    @property
    def _file(self) -> int:
        return self._log.files[self._active].fd

    def _store(self, number: int, key: Hashable, value: Any) -> None:
        if self._end > MIN_COMPACTED_BYTES and self._end > 2 * self._live:
            self._compact()
        if value is not MISSING or key in self._places:
            record = _record(number + 1, (key,) if value is MISSING else (key, value))
            _write(self._file, record, self._end)
            self._put(key, value, len(record))

    def _put(self, key: Hashable, value: Any, size: int) -> None:
        """Note the value of a key, whose record is the next one in the log."""
        self._live -= self._places.pop(key, (0, 0))[1]
        if value is MISSING:
            self._values.pop(key, None)
        else:
            self._values[key], self._places[key] = value, (self._end, size)
            self._live += size
        self._end += size

    def _restore(self, key: Hashable) -> None:
        """Undo changes of a value that the function may have made in place."""
        self._values.pop(key, None)
        if key in self._places:
            offset, size = self._places[key]
            self._values[key] = pickle.loads(os.pread(self._file, size, offset)[_RECORD.size :])[1]

    def _compact(self) -> None:
        """Write the current states into the other file, and make it the log."""
        old, other = self._file, 1 - self._active
        new, end = self._log.files[other].fd, _START.size
        os.ftruncate(new, end)
        for key, (offset, size) in self._places.items():
            contents = os.pread(old, size, offset)[_RECORD.size :]
            _write(new, _framed(0, contents), end)
            self._places[key] = end, size
            end += size
        os.pwrite(self._log.files[0].fd, _START.pack(other), 0)
        self._active, self._end = other, end
        os.ftruncate(old, _START.size)


def _record(next_number: int, entry: tuple[Any, ...]) -> bytes:
    return _framed(next_number, dumps_in_one(entry))


def _framed(next_number: int, contents: bytes) -> bytes:
    rest = _RECORD.pack(0, len(contents), next_number)[4:] + contents
    return zlib.crc32(rest).to_bytes(4, "little") + rest


def _write(fd: int, data: bytes, offset: int) -> None:
    """Write all bytes. Raise ``OSError`` if memory is exhausted."""
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def with_key(function: Callable[..., Any], stage: Stage, states: KeyedStates | None) -> Callable[..., Any]:
    """Return a function that takes an item, for the function of a keyed stage.

    It calls the key function. If the stage has state, it passes the state of the key to ``function``.
    """

    def key_of(item: Any) -> Hashable:
        key: Hashable = stage.options["key"](item)
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(
                f"stage {stage.name!r}: key must return hashable values such as str or tuple, got "
                f"{shown(key)} ({error})"
            ) from None
        return key

    def call(item: Any) -> Any:
        key = key_of(item)
        if states is None:
            return function(item)
        with states.of(key) as state:
            return function(item, state)

    async def call_later(item: Any) -> Any:
        key = key_of(item)
        if states is None:
            return await function(item)
        with states.of(key) as state:
            return await function(item, state)

    def elements(item: Any) -> Iterator[Any]:
        assert states is not None
        with states.of(key_of(item)) as state:
            yield from function(item, state)

    if states is not None and stage.operator.iterates:
        return elements
    if is_async(function) and not stage.operator.iterates:
        return call_later
    return call

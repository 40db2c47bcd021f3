"""Preserve the states of a keyed stage when one of its workers dies.

Algorithm. Each worker has a write-ahead log in an in-memory file of the program. Before an item's lease ends,
the worker appends a record: the item's number, its key, and the key's state after the item. A replacement
reads the log. The replacement removes the record of its first item and any later records.

The states are exact, because a worker takes its items one at a time, in the order of their numbers. Let n be
the number of the replacement's first item.

- If the worker died before its record of n was complete, the log ends with the items before n.
- If it died later, but before the lease of n ended, the replacement removes the record of n. The replacement
  calls the function again with the state from before n, and the channel discards the outputs that it already
  has.
- If the lease of an item has ended, the log contains its record, because the worker writes the record first.
  The number of this item is less than n.

Invariants. A record is valid if its checksum matches. A worker that is killed while writing leaves at most
one invalid record, at the end. When more than half of a log is out of date, the worker copies the current
states into a second file. Writing eight bytes then makes this file the log in a single step. A call that
raises leaves the key's state unchanged.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import zlib
from collections.abc import Hashable
from typing import Any

from flowchan.channel.ports import In
from flowchan.declare.values import Stage
from flowchan.errors import Broken
from flowchan.items.codec import dumps_in_one
from flowchan.items.keyed_state import MISSING, KeyedState
from flowchan.items.program_file import ProgramFile
from flowchan.run.policy.failures import OwnEnd

MIN_COMPACTED_BYTES = 1 << 20
"""A log below this size is not compacted."""
_RECORD = struct.Struct("<IIQ")  # checksum, size of the contents, number of the item plus one
_START = struct.Struct("<Q")


class StateLog:
    """Pair of in-memory files. One of them is a worker's current log."""

    def __init__(self) -> None:
        self.files = (ProgramFile("flowchan state"), ProgramFile("flowchan state"))


def log_of(stage: Stage) -> StateLog | None:
    """Create the log of one worker, or return None if the stage keeps no state or runs on threads."""
    return StateLog() if "state" in stage.options and stage.placement.own_process else None


class KeyedStates:
    """Keeps the states of all keys of one worker.

    Args:
        stage: The keyed stage.
        log: Log of the worker. A thread has None, because it dies only with the program.
        reader: Port from which the worker takes its items.
    """

    def __init__(self, stage: Stage, log: StateLog | None, reader: In[Any]) -> None:
        self._make, self._log, self._reader = stage.options["state"], log, reader
        self._values: dict[Hashable, Any] = {}
        self._pickled: dict[Hashable, bytes] = {}  # for each key, the pickled pair of key and value
        self._active = self._end = self._live = 0
        self._is_read = log is None

    def begin(self, key: Hashable) -> KeyedState[Any]:
        """Return the state of a key, for use with the current item."""
        self.skip()
        return KeyedState(key, self._values.get(key, MISSING), self._make)

    def commit(self, state: KeyedState[Any]) -> None:
        """Store the state after the current item, if the function has used it."""
        key, value = state.key, state._value
        if state._used and (value is not MISSING or key in self._pickled):
            contents = dumps_in_one((key,) if value is MISSING else (key, value))
            if self._log is not None:
                self._append(self._log, contents)
            self._put(key, value, contents)

    def undo(self, state: KeyedState[Any]) -> None:
        """Discard changes that the function made to a mutable value before it raised."""
        if state._used:
            self._values.pop(state.key, None)
            if state.key in self._pickled:
                self._values[state.key] = pickle.loads(self._pickled[state.key])[1]

    def skip(self) -> None:
        """Restore, before the worker's first item, the states that the dead worker has logged."""
        if not self._is_read:
            assert self._log is not None
            self._read_before(self._reader._number, self._log)
            self._is_read = True

    def _read_before(self, number: int, log: StateLog) -> None:
        """Read the records of all items before ``number``, and remove all later ones from the log."""
        try:
            header = os.pread(log.files[0].fd, _START.size, 0)
            self._active = _START.unpack(header)[0] if header else 0
            file = log.files[self._active].fd
        except Broken as end:
            raise OwnEnd from end
        self._end, size = _START.size, os.fstat(file).st_size
        if size > self._end:
            with mmap.mmap(file, size, access=mmap.ACCESS_READ) as data:
                self._read(data, number)
        os.ftruncate(file, self._end)

    def _read(self, data: mmap.mmap, number: int) -> None:
        """Read the valid records of all items before ``number``."""
        while self._end + _RECORD.size <= len(data):
            checksum, size, next_number = _RECORD.unpack_from(data, self._end)
            start = self._end + _RECORD.size
            contents = data[start : start + size]
            if next_number > number or len(contents) < size or checksum != _checksum(next_number, contents):
                return
            entry = pickle.loads(contents)
            self._put(entry[0], entry[1] if len(entry) == 2 else MISSING, contents)
            self._end = start + size

    def _put(self, key: Hashable, value: Any, contents: bytes) -> None:
        self._live -= len(self._pickled.pop(key, b""))
        if value is MISSING:
            self._values.pop(key, None)
        else:
            self._values[key], self._pickled[key] = value, contents
            self._live += len(contents)

    def _append(self, log: StateLog, contents: bytes) -> None:
        """Append a record for the current item."""
        live = self._live + len(self._pickled) * _RECORD.size
        if self._end > MIN_COMPACTED_BYTES and self._end > 2 * live:
            self._compact(log)
        record = _framed(self._reader._number + 1, contents)
        _write(log.files[self._active].fd, record, self._end)
        self._end += len(record)

    def _compact(self, log: StateLog) -> None:
        """Write the current states into the other file, and make that file the log."""
        old, other, end = log.files[self._active].fd, 1 - self._active, _START.size
        new = log.files[other].fd
        os.ftruncate(new, end)
        for contents in self._pickled.values():
            _write(new, _framed(0, contents), end)
            end += _RECORD.size + len(contents)
        os.pwrite(log.files[0].fd, _START.pack(other), 0)
        self._active, self._end = other, end
        os.ftruncate(old, _START.size)


def _framed(next_number: int, contents: bytes) -> bytes:
    return _RECORD.pack(_checksum(next_number, contents), len(contents), next_number) + contents


def _checksum(next_number: int, contents: bytes) -> int:
    # If the initial value were 0, a record of all zeros would count as valid.
    return zlib.crc32(contents, next_number + 1 & 0xFFFFFFFF)


def _write(fd: int, data: bytes, offset: int) -> None:
    """Write all bytes, or raise ``OSError`` if memory runs out."""
    while (written := os.pwrite(fd, data, offset)) < len(data):
        data, offset = data[written:], offset + written

"""Publish the latest version of a value to other processes on this machine through shared memory.

Algorithm. The program writes each version into a new in-memory file. In a single step (``dup3``), this file
takes over the descriptor number of the previous version. The program then stores the version number in a word
that all processes have mapped. A reader compares this word with the version that it has. If the two versions
differ, the reader opens the file by its path in ``/proc``, maps the file and unpickles the value. Arrays stay
in the mapped file.

Invariants. A file never changes after it has received its descriptor number. A reader therefore always gets a
complete version. The word never refers to a version newer than the file. The program does not wait for
readers. The kernel frees an old version when no process maps it any more. The program owns everything, so a
reader that is killed at any point leaves nothing behind.
"""

from __future__ import annotations

import copy
import ctypes
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowchan import _core
from flowchan.errors import Broken
from flowchan.items.codec import pack_away, unpack
from flowchan.items.program_file import ProgramFile
from flowchan.items.text import shown
from flowchan.transport.interrupts import interrupts_deferred

_HEADER = struct.Struct("QQ")  # version and number of parts; the size of each part follows
_SIZE = struct.Struct("Q")
_ALIGNMENT = 64
_MAP_NORESERVE = 0x4000  # MAP_NORESERVE on Linux, which the mmap module lacks before Python 3.13


@dataclass(frozen=True, slots=True)
class Versioned:
    """A value with its version number."""

    version: int
    value: Any


class LatestValue:
    """Publishes the latest version of a value, in the program that owns it.

    Args:
        first: The first version.

    Raises:
        TypeError: The value cannot be sent to another process.
    """

    def __init__(self, first: Versioned) -> None:
        parts = parts_of(first.value)
        self._word_file = ProgramFile("flowchan version")
        os.ftruncate(self._word_file.fd, _SIZE.size)
        self._word = _mapped_word(self._word_file.fd)
        self._file = os.memfd_create("flowchan value")
        self._close = weakref.finalize(self, os.close, self._file)
        self._close.atexit = False  # threads may still publish versions at exit
        self.pid = os.getpid()
        self._path = f"/proc/{self.pid}/fd/{self._file}"
        _live.add(self)
        self._publish(first.version, parts)

    def publish(self, latest: Versioned) -> None:
        """Publish a new version. On an error, the previous version stays current.

        Args:
            latest: The new version.

        Raises:
            OSError: There is not enough memory.
            TypeError: The value cannot be sent to another process.
        """
        self._publish(latest.version, parts_of(latest.value))

    def _publish(self, version: int, parts: list[memoryview]) -> None:
        fd = os.memfd_create("flowchan value")
        try:
            _write(fd, version, parts)
            with interrupts_deferred():
                os.dup2(fd, self._file, inheritable=False)
                self._word[0] = version
        finally:
            os.close(fd)

    def opened(self) -> LatestValueReader:
        """Return a reader for this process, which was forked by the program."""
        return LatestValueReader(copy.copy(self._word_file), self._path)

    def __reduce__(self) -> tuple[Any, ...]:
        return LatestValueReader, (self._word_file, self._path)


_live: weakref.WeakSet[LatestValue] = weakref.WeakSet()


def close_inherited() -> None:
    """Close the files inherited through a fork, because they would keep old versions in memory."""
    for one in list(_live):
        if one.pid != os.getpid():
            one._close()


class LatestValueReader:
    """Reads the latest version of a value in another process.

    Args:
        word_file: File that contains the version number.
        file_path: Path of the file that contains the value.
    """

    def __init__(self, word_file: ProgramFile, file_path: str) -> None:
        self._word_file, self._file_path = word_file, file_path
        self._lock = threading.Lock()
        self._word: Any = (-1,)  # a placeholder; the first read opens the files
        self._last: Versioned | None = None

    def opened(self) -> LatestValueReader:
        """Return this reader. The method matches ``LatestValue.opened``."""
        return self

    def latest(self) -> Versioned:
        """Return the current version.

        Raise ``Broken`` if the program has exited or released the value. Exceptions from unpickling
        propagate.
        """
        last = self._last
        return last if last is not None and last.version == self._word[0] else self._read()

    def _read(self) -> Versioned:
        with self._lock:
            try:
                if self._last is None:
                    self._word = _mapped_word(self._word_file.fd)
                fd = os.open(self._file_path, os.O_RDONLY | os.O_CLOEXEC)
            except (Broken, FileNotFoundError) as error:
                raise Broken("the program that owns this value has exited or released the value") from error
            try:
                self._last = _read(fd)
            finally:
                os.close(fd)
            return self._last


def parts_of(value: Any) -> list[memoryview]:
    """Return the pickle of a value and its buffers, which refer to the arrays without copying them.

    Raise ``TypeError`` if the value cannot be pickled or contains a channel.
    """
    packed = pack_away(value)
    parts = [packed] if isinstance(packed, bytes) else packed
    if any(isinstance(part, _core.Channel) for part in parts):
        raise TypeError(f"value must not contain channels, got {shown(value)}; pass channels as items")
    # memoryview cannot cast an empty array.
    return [
        view.cast("B") if view.nbytes else memoryview(b"") for view in [memoryview(part) for part in parts]
    ]


def _mapped_word(fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, _SIZE.size)).cast("Q")


def _places(sizes: tuple[int, ...]) -> Iterator[int]:
    """Yield the offset of each part in the file."""
    end = _HEADER.size + _SIZE.size * len(sizes)
    for size in sizes:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        yield begin
        end = begin + size


def _write(fd: int, version: int, parts: list[memoryview]) -> None:
    sizes = tuple(part.nbytes for part in parts)
    os.pwrite(fd, _HEADER.pack(version, len(sizes)) + struct.pack(f"{len(sizes)}Q", *sizes), 0)
    for begin, part in zip(_places(sizes), parts, strict=True):
        while part:
            written = os.pwrite(fd, part, begin)
            part, begin = part[written:], begin + written


def _read(fd: int) -> Versioned:
    # The mapping must be writable, because torch has no read-only tensors. It is private, so a write copies
    # the page.
    memory = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    version, number = _HEADER.unpack_from(memory)
    sizes = struct.unpack_from(f"{number}Q", memory, _HEADER.size)
    (begin, *places), (size, *buffers) = _places(sizes), sizes
    pickled = memory[begin : begin + size]
    if not buffers:
        return Versioned(version, unpack(pickled))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    views = [_core.View.of(address + at, size, memory) for at, size in zip(places, buffers, strict=True)]
    return Versioned(version, unpack([pickled, *views]))

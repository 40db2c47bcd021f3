"""File that records which source items have left the graph, so that a later run can skip them (R14).

Format. The first 48 bytes are the name of the format and a digest of the graph's shape. The other bytes are a
bit for each source item, in the order of ``lineage``; a set bit means that the item is finished.

Invariants. Bits are only ever set, and each of them is valid without the others. So the file is valid after
every prefix of its writes: a crash loses at most bits, and the items of lost bits are processed again. Each
report is written to the file before the worker that sent it takes its next item, or soon after for a worker
process; the operating system keeps what was written if the program is killed. The file is flushed to the disk
only when the run ends. The lock belongs to the process, so the workers that it forks do not hold it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Mapping

from flowchan.declare.blueprint import Blueprint
from flowchan.errors import GraphError, Problem
from flowchan.items.text import shown
from flowchan.run.policy.lineage import FinishedItems, Lineage, Marks
from flowchan.run.policy.resumable import finished_by_stage, refuse_unless_resumable, shape_digest

FORMAT = b"flowchan resume1"
HEADER_BYTES = 48

MOST_BYTES = 4096
"""Maximum number of bytes in one write that also covers unchanged bytes."""

_open_files: dict[int, tuple[int, int]] = {}
"""Device and inode of the files that this process has locked, because the lock does not exclude it."""
_opening = threading.Lock()


class ResumeFile:
    """Open and locked file of one run.

    Args:
        graph: Graph of the run.
        path: Path of the file. It is created if it does not exist.

    Attributes:
        path: The path.
        finished: Finished items of each source when the file was opened, by the name of the source.

    Raises:
        GraphError: A run of the graph cannot be resumed, the file belongs to another graph, or a source is
            shorter than in an earlier run.
        OSError: The file cannot be opened.
        RuntimeError: Another run uses the file.
        TypeError: ``path`` is not a path.
        ValueError: The file is not a resume file.
    """

    finished: Mapping[str, FinishedItems]

    def __init__(self, graph: Blueprint, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"run: resume must be a path or None, got {shown(path)}")
        refuse_unless_resumable(graph)
        self.path = os.fspath(path)
        self._lineage, self._lock = Lineage(), threading.Lock()
        self._file = _open_alone(self.path)
        self._release = weakref.finalize(self, _release, self._file)
        try:
            self._bits = bytearray(_read_bits(graph, path, self._file))
            self.finished = finished_by_stage(graph, bytes(self._bits))
        except BaseException:
            self._release()
            raise

    def record(self, marks: Marks, parts: int) -> None:
        """Take in the report that an item with these marks has left the graph, or was split into ``parts``.

        Any thread may call this method. It has no effect after :meth:`close`.
        """
        with self._lock:
            numbers = self._lineage.finished(marks, parts)
            if numbers and self._release.alive:
                self._write(numbers)

    def _write(self, numbers: list[int]) -> None:
        bits = self._bits
        bits.extend(bytes(max(0, max(numbers) // 8 + 1 - len(bits))))
        places = set()
        for number in numbers:
            place, bit = divmod(number, 8)
            bits[place] |= 1 << bit
            places.add(place)
        first, last = min(places), max(places)
        spans = [(first, last)] if last - first < MOST_BYTES else zip(places, places, strict=True)
        for first, last in spans:
            data = memoryview(bits)[first : last + 1]
            with data:
                if os.pwrite(self._file, data, HEADER_BYTES + first) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Flush the file to the disk and release it. Later calls have no effect."""
        with self._lock:
            if self._release.alive:
                try:
                    os.fdatasync(self._file)
                finally:
                    self._release()


def _open_alone(path: str | bytes) -> int:
    """Open and lock the file at ``path``, and return its descriptor."""
    in_use = RuntimeError(
        f"run: resume={os.fsdecode(path)!r} is used by another run; wait until it has ended, or resume from "
        "another path"
    )
    with _opening:
        # Any descriptor of the file that is closed ends the lock of this process, so look before opening.
        with contextlib.suppress(FileNotFoundError):
            if _identity(os.stat(path)) in _open_files.values():
                raise in_use
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(file)
            raise in_use from None
        except BaseException:
            os.close(file)
            raise
        _open_files[file] = _identity(os.fstat(file))
        return file


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _release(file: int) -> None:
    _open_files.pop(file, None)
    os.close(file)


def _read_bits(graph: Blueprint, path: str | os.PathLike[str], file: int) -> bytes:
    """Return the bits of the finished items. If the file is new, or its header is incomplete, write one."""
    header = FORMAT + shape_digest(graph)
    data = os.pread(file, os.fstat(file).st_size, 0)
    if len(data) < HEADER_BYTES and header.startswith(data):
        os.pwrite(file, header, 0)
    elif not data.startswith(FORMAT):
        raise ValueError(
            f"run: resume must be the path of a resume file or of a new file, got {os.fspath(path)!r}, which "
            "has other contents"
        )
    elif not data.startswith(header):
        raise GraphError(graph.name, [Problem("resume", "", graph.stages[0].where, _another_graph(path))])
    return data[HEADER_BYTES:]


def _another_graph(path: str | os.PathLike[str]) -> str:
    return (
        f"the file at resume={os.fspath(path)!r} belongs to a graph with other stage names, operators or "
        "streams; restore that graph, or resume from another path to begin with the first item"
    )

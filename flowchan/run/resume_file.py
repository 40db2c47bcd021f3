"""Record in a file which source items have left the graph, so that a later run can skip these items (R14).

Format. The first 48 bytes contain the format's name and a digest of the graph's shape. Each following bit
represents one source item, in the order that ``lineage`` defines, and is set if the item is finished. The
file may end with unused bits.

Algorithm. The program maps the file into memory and sets the bits there. Setting a bit needs no system call,
and the kernel keeps the bits even if the program is killed. Disk space is reserved before it is mapped, and
the file is flushed to disk only when the run ends.

Invariants. Bits are only ever set, and each bit is valid without the others. If the machine crashes, any bits
may be lost. The next run then processes their items again. The lock belongs to the process. Forked workers
therefore do not hold it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Mapping

from flowchan.declare.blueprint import Blueprint
from flowchan.errors import GraphError, Problem
from flowchan.items.text import shown
from flowchan.run.policy.failures import text_of
from flowchan.run.policy.lineage import FinishedItems, Lineage, Marks
from flowchan.run.policy.resumable import finished_by_stage, refuse_unless_resumable, shape_digest

FORMAT = b"flowchan resume1"
HEADER_BYTES = 48

PAGE_BYTES = 4096
"""File sizes are multiples of this number."""

_open_files: dict[int, tuple[int, int]] = {}
"""Device and inode of each file that this process has locked. The table is needed because a file lock
excludes only other processes."""
_opening = threading.Lock()


class _Refused(Exception):
    """Raised if the file cannot be used. The message continues a sentence that begins with the path."""


class ResumeFile:
    """Opens and locks the file that records the finished items of one run.

    Args:
        graph: Graph of the run.
        path: Path of the file. A missing file is created.

    Attributes:
        path: The path.
        finished: Items that earlier runs have finished, by source name.

    Raises:
        GraphError: The graph does not support resuming, or the file cannot be used. The file may be
            unreadable, have other contents, be in use, or belong to another graph. A source may also be
            shorter than in an earlier run.
        TypeError: ``path`` is not a path.
    """

    finished: Mapping[str, FinishedItems]

    def __init__(self, graph: Blueprint, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise TypeError(f"run: resume must be a path or None, got {shown(path)}")
        refuse_unless_resumable(graph)
        self.path = os.fspath(path)
        self._lineage, self._lock = Lineage(), threading.Lock()
        try:
            self._file = _open_alone(self.path)
            self._release = weakref.finalize(self, _release, self._file)
            try:
                _begin(graph, self._file)
                self._bytes = mmap.mmap(self._file, 0)
                self.finished = finished_by_stage(graph, self._bytes[HEADER_BYTES:].rstrip(b"\0"))
            except BaseException:
                self._release()
                raise
        except (OSError, _Refused) as error:
            unusable = f"could not be used: {text_of(error)}; use a path where this program can write"
            reason = str(error) if isinstance(error, _Refused) else unusable
            message = f"the file at resume={os.fsdecode(self.path)!r} {reason}"
            problem = Problem("resume", "", graph.stages[0].where, message)
            raise GraphError(graph.name, [problem]) from None

    def record(self, marks: Marks, parts: int) -> None:
        """Record that the item with these marks left the graph, or was split into ``parts``.

        Any thread may call this method. A call after :meth:`close` has no effect. Raise ``OSError`` if the
        disk is full.
        """
        with self._lock:
            numbers = self._lineage.finished(marks, parts)
            if not numbers or not self._release.alive:
                return
            end = HEADER_BYTES + max(numbers) // 8 + 1
            if end > len(self._bytes):
                self._bytes.resize(_reserve(self._file, end))
            for number in numbers:
                self._bytes[HEADER_BYTES + (number >> 3)] |= 1 << (number & 7)

    def close(self) -> None:
        """Flush the file to disk and release it. Later calls have no effect."""
        with self._lock:
            if self._release.alive:
                try:
                    self._bytes.flush()
                finally:
                    self._bytes.close()
                    self._release()


def _open_alone(path: str | bytes) -> int:
    """Open and lock the file at ``path``, and return its descriptor."""
    in_use = _Refused("is used by another run; wait until it has ended, or resume from another path")
    with _opening:
        # Check before opening, because closing any descriptor of the file releases this process's lock.
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


def _begin(graph: Blueprint, file: int) -> None:
    """Check the file's header. If the file is new or its header is incomplete, write the header."""
    header = FORMAT + shape_digest(graph)
    found = os.pread(file, HEADER_BYTES, 0)
    if len(found) < HEADER_BYTES and header.startswith(found):
        os.pwrite(file, header, 0)
    elif not found.startswith(FORMAT):
        raise _Refused("is not a resume file; resume from another path")
    elif found != header:
        raise _Refused(
            "belongs to a graph with different stage names, operators or streams; restore that graph, or "
            "pass another path to start from the first item"
        )
    _reserve(file, os.fstat(file).st_size)


def _reserve(file: int, length: int) -> int:
    """Reserve disk space for at least ``length`` bytes of the file, and return its new length."""
    total = -(-length // PAGE_BYTES) * PAGE_BYTES
    if sys.platform == "linux":
        os.posix_fallocate(file, 0, total)
    else:
        size = os.fstat(file).st_size
        os.pwrite(file, bytes(max(total - size, 0)), size)
    return total

"""Define an in-memory file, which the program creates and which its worker processes open by path."""

from __future__ import annotations

import os
import weakref
from typing import Any

from flowchan.errors import Broken


class ProgramFile:
    """In-memory file of the program, which outlives the workers that write to it.

    The pickle of a ``ProgramFile`` contains only its path. The receiving process opens the file when it first
    uses it.

    Args:
        name: Name that ``/proc`` shows for the file.
    """

    def __init__(self, name: str) -> None:
        self._fd = os.memfd_create(name)
        self._path, self._inode = f"/proc/{os.getpid()}/fd/{self._fd}", os.fstat(self._fd).st_ino
        _close_with(self, self._fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_later, (self._path, self._inode)

    @property
    def fd(self) -> int:
        """Return the file's descriptor in this process.

        Raises:
            Broken: The run has ended, and the program has closed the file.
        """
        if self._fd < 0:
            self._fd = self._open()
        return self._fd

    def _open(self) -> int:
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Broken("the run has ended") from error
        if os.fstat(fd).st_ino != self._inode:  # the program uses the descriptor number for another file now
            os.close(fd)
            raise Broken("the run has ended")
        _close_with(self, fd)
        return fd


def _close_with(file: ProgramFile, fd: int) -> None:
    """Close the descriptor when the file is freed, except at exit, because threads may still use it then."""
    weakref.finalize(file, os.close, fd).atexit = False


def _opened_later(path: str, inode: int) -> ProgramFile:
    file = object.__new__(ProgramFile)
    file._fd, file._path, file._inode = -1, path, inode
    return file

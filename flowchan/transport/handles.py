"""How a descriptor reaches another process: by inheritance while a child is being started, else out of the sender's
table under ``/proc``, which works for processes of the same user as long as the sender lives."""

from __future__ import annotations

import os
from multiprocessing import context, reduction
from typing import Any

Handle = Any


def duplicate(fd: int) -> Handle:
    """What to pickle in place of ``fd``."""
    if context.get_spawning_popen() is not None:
        return reduction.DupFd(fd)
    return os.getpid(), fd, os.fstat(fd).st_ino


def open_handle(handle: Handle) -> int:
    """A descriptor of this process for what :func:`duplicate` gave. Raises ``OSError`` when the sender has ended."""
    if not isinstance(handle, tuple):
        return int(handle.detach())
    pid, number, inode = handle
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(fd).st_ino != inode:
        os.close(fd)
        raise OSError(f"descriptor {number} of process {pid} is another file by now")
    return fd

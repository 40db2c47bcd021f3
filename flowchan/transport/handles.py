"""How a descriptor reaches another process: by inheritance while a child is being started, else out of the sender's
table under ``/proc``, which works for processes of the same user as long as the sender lives."""

from __future__ import annotations

import errno
import os
from multiprocessing import context, reduction
from typing import Any

Handle = Any

_SHORTAGES = {
    errno.EMFILE: "this process has as many descriptors open as it may. Close some, or allow more (ulimit -n)",
    errno.ENFILE: "this machine has as many descriptors open as it may. Close some, or allow more (sysctl fs.file-max)",
    errno.ENOMEM: "this process may not map so much memory. Free some, or allow more (ulimit -v)",
}


def shortage(what: str, error: OSError) -> OSError | None:
    """What to raise in place of ``error`` when this process just lacks something to receive ``what``; else None. Who
    gets this from unpickling finds the item in its channel again: the core puts it back."""
    reason = _SHORTAGES.get(error.errno or 0)
    return OSError(error.errno, f"{what} can't be received now, and stays where it is: {reason}") if reason else None


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

"""Handles of processes, where the kernel gives them."""

from __future__ import annotations

import errno
import os

_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when process ``pid`` ends; None where the kernel lacks such
    descriptors or a filter refuses them.

    Raises:
        ProcessLookupError: There is no such process.
        OSError: This process lacks descriptors or memory.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return None

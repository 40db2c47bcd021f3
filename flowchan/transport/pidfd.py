"""Open pidfds, on kernels that support them."""

from __future__ import annotations

import errno
import os

_REFUSED = (errno.EPERM, errno.EACCES, errno.ENOSYS)


def open_pidfd(pid: int) -> int | None:
    """Open a descriptor that becomes readable when a process ends.

    Args:
        pid: ID of the process.

    Returns:
        The descriptor; None if the kernel lacks pidfds or a seccomp filter forbids them.

    Raises:
        ProcessLookupError: The process does not exist.
        OSError: This process lacks descriptors or memory.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return None

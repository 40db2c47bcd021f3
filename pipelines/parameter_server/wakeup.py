"""Wait until another process changes a counter in shared memory."""

from __future__ import annotations

import ctypes
import mmap
import platform
import time

MOST_SECONDS = 0.1
"""Longest single wait in seconds. Callers then check again, so a missed wake-up costs at most this time."""

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE, _ALL = 0, 1, (1 << 31) - 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Wakeup:
    """Counter in shared memory. Processes can wait until it changes.

    Args:
        memory: Mapped memory.
        offset: Offset of the 32-bit counter in bytes.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._count = ctypes.c_uint32.from_buffer(memory, offset)

    @property
    def count(self) -> int:
        """Return the counter."""
        return self._count.value

    def wake(self) -> None:
        """Increment the counter, and wake all waiting threads."""
        self._count.value = (self._count.value + 1) & 0xFFFFFFFF
        if _FUTEX is not None:
            _libc.syscall(_FUTEX, ctypes.byref(self._count), _WAKE, _ALL, None, None, 0)

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep until the counter differs from ``seen``, for at most ``min(seconds, MOST_SECONDS)``."""
        seconds = min(seconds, MOST_SECONDS)
        if _FUTEX is None:
            time.sleep(min(seconds, 0.001))
            return
        limit = _Timespec(0, max(0, int(seconds * 1e9)))
        _libc.syscall(_FUTEX, ctypes.byref(self._count), _WAIT, seen, ctypes.byref(limit), None, 0)

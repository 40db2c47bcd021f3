"""Make the kernel refuse system calls to this process and its children, as container filters do."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

SUPPORTED = platform.machine() == "x86_64"
NUMBERS = {
    "futex_waitv": 449, "pidfd_open": 434, "memfd_create": 319, "fallocate": 285, "sched_setaffinity": 203,
}  # fmt: skip

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # load 32 bits, compare with a constant, return
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def refuse(call: str, error: int = errno.EPERM) -> None:
    """Make ``call`` fail with ``error`` from now on. This cannot be undone."""
    code = [
        (_LOAD, 0, 0, 0),  # the number of the system call
        (_JUMP_IF_EQUAL, 0, 1, NUMBERS[call]),
        (_RETURN, 0, 0, _ERRNO | error),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program = _Program(len(code), b"".join(struct.pack("HBBI", *instruction) for instruction in code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def without_proc() -> None:
    """Give this process its own view of the file system, with an empty /proc."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, mounts, private, recursive = 0x10000000, 0x00020000, 1 << 18, 1 << 14
    if (
        libc.unshare(mounts | (user if os.geteuid() else 0))
        or libc.mount(b"none", b"/", None, private | recursive, None)
        or libc.mount(b"none", b"/proc", b"tmpfs", 0, None)
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

"""Call functions before a process exits, and end a process together with its parent."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import multiprocessing.util
import os
import signal
from collections.abc import Callable

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_libc = ctypes.CDLL(None)  # loaded now, because a newly forked process must not load libraries


def die_with(parent: int) -> None:
    """Make the kernel kill this new child process when the thread of ``parent`` that forked it ends.

    If that thread has already ended, end this process at once.
    """
    _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def before_exit(function: Callable[[], object], priority: int) -> None:
    """Call a function before this process exits, if ``multiprocessing`` started the process.

    Such a process runs finalizers, highest priority first, but not ``atexit`` functions.
    """
    _before_exit(os.getpid(), function, priority)


@functools.cache
def _before_exit(_: int, function: Callable[[], object], priority: int) -> None:
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, function, exitpriority=priority)

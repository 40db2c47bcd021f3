"""Run functions before a process exits, and end a process together with its parent."""

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
    """Make the kernel kill this new child of ``parent`` when the thread that forked it ends.

    If that thread has already ended, this function ends the process at once.
    """
    _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def before_exit(function: Callable[[], object], priority: int) -> None:
    """Call a function before this process exits, if ``multiprocessing`` started the process.

    Such a process does not run ``atexit`` functions. It runs finalizers, the highest priority first.
    """
    _before_exit(os.getpid(), function, priority)


@functools.cache
def _before_exit(_: int, function: Callable[[], object], priority: int) -> None:
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, function, exitpriority=priority)

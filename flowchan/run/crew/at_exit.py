"""Call functions just before a process exits, and make a process die with its parent."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import multiprocessing.util
import os
import signal
from collections.abc import Callable

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_libc = ctypes.CDLL(None)  # load it now, because a newly forked process must not load libraries


def die_with(parent: int) -> None:
    """Make the kernel kill this new child process when the thread that forked it in ``parent`` ends.

    If that thread has already ended, exit at once.
    """
    _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def before_exit(function: Callable[[], object], priority: int) -> None:
    """Call a function before this process exits, if ``multiprocessing`` started the process.

    Such a process does not call ``atexit`` functions. Instead, the process runs the finalizers of
    ``multiprocessing``, highest priority first.
    """
    _before_exit(os.getpid(), function, priority)


@functools.cache
def _before_exit(_: int, function: Callable[[], object], priority: int) -> None:
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, function, exitpriority=priority)

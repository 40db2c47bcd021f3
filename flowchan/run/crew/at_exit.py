"""Runs functions before a process ends, and ends a process with its parent."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import multiprocessing.util
import os
import signal
from collections.abc import Callable

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_libc = ctypes.CDLL(None)  # now: a process that has just been forked loads nothing


def die_with(parent: int) -> None:
    """In a new child of ``parent``: the kernel kills it with the thread that has forked it. It ends here if
    that was too late."""
    _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def before_exit(function: Callable[[], object], priority: int) -> None:
    """Calls it before this process ends, if ``multiprocessing`` has started it: such a one runs its
    finalizers, the highest priority first, and none of ``atexit``."""
    _before_exit(os.getpid(), function, priority)


@functools.cache
def _before_exit(_: int, function: Callable[[], object], priority: int) -> None:
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, function, exitpriority=priority)

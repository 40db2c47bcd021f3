"""What a process does before it ends."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.util
import os
from collections.abc import Callable


def before_exit(function: Callable[[], object], priority: int) -> None:
    """Calls it before this process ends, if ``multiprocessing`` has started it: such a one runs its
    finalizers, the highest priority first, and none of ``atexit``."""
    _before_exit(os.getpid(), function, priority)


@functools.cache
def _before_exit(_: int, function: Callable[[], object], priority: int) -> None:
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, function, exitpriority=priority)

"""What the system tells of worker processes: how one ended, its memory, and its end for certain."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.process import BaseProcess

import psutil

PAGE = os.sysconf("SC_PAGE_SIZE")


def exit_text(code: int, memory: int) -> str:
    """What an exit code of a process means, in words, with the memory in bytes that it was last seen to
    have."""
    if code >= 0:
        return f"exited with code {code} without finishing"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code != signal.SIGKILL or not memory:
        return f"was killed by {name}"
    total = psutil.virtual_memory().total
    likely = ", likely for lack of memory" if memory > total / 4 else ""
    return (
        f"was killed by {name}{likely} (last known memory {memory / 2**20:,.0f} of {total / 2**20:,.0f} MiB)"
    )


def reap(process: BaseProcess) -> None:
    """Joins and closes. Another thread may be asking for the same child's exit code (``multiprocessing``
    itself does so whenever a process is started or listed); until it has noted it here, a join returns
    without one."""
    process.join()
    while process.exitcode is None:
        time.sleep(0.001)
    process.close()


def memory_of(pid: int | None) -> int:
    """The resident memory of a process in bytes, 0 when it can't be told."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * PAGE
    except (OSError, IndexError, ValueError):
        return 0

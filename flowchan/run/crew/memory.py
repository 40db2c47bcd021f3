"""Measure the memory of this machine: a run's budget, room for more processes, and out-of-memory kills.

All channels of a run share its budget.
"""

from __future__ import annotations

import os

from flowchan.check.rules import free_memory
from flowchan.run.observe.cgroups import group_files, text_of

VMSTAT = "/proc/vmstat"


def budget() -> int:
    """Return half of the memory available to this process, in bytes."""
    return available() // 2


def available() -> int:
    """Return the available memory of the machine or of this process's cgroup, whichever is less, in bytes."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    files = group_files("memory", "memory.max", "memory.limit_in_bytes")
    return min([physical, *(limit for file in files for limit in _number(file))])


def free_for_processes() -> float:
    """Return how many bytes new processes may use, so that a tenth of the memory stays free.

    File pages that the kernel can drop at once count as free.
    """
    rooms = [
        limit - used + _droppable(group)
        for file in group_files("memory", "memory.max", "memory.limit_in_bytes")
        for group in [os.path.dirname(file)]
        for limit in _number(file)
        for used in _number(f"{group}/memory.current") or _number(f"{group}/memory.usage_in_bytes")
    ]
    return min([free_memory(), *rooms]) - available() / 10


def resident(pid: int) -> int:
    """Return the resident memory of a process in bytes, or 0 if the process has ended."""
    try:
        return int(text_of(f"/proc/{pid}/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def oom_kills() -> int:
    """Return the number of processes that the kernel has killed so far for lack of memory.

    Count them in this process's cgroup or, if its count is unknown, on the whole machine. Return 0 if both
    are unknown.
    """
    for file in (*group_files("memory", "memory.events", "memory.oom_control"), VMSTAT):
        try:
            lines = text_of(file).splitlines()
        except OSError:
            continue
        for name, number in (line.split() for line in lines):
            if name == "oom_kill":
                return int(number)
    return 0


def _number(file: str) -> list[int]:
    try:
        return [int(text_of(file))]
    except (OSError, ValueError):  # the file does not exist, or contains "max"
        return []


def _droppable(group: str) -> int:
    """Return how many bytes of a cgroup's file pages the kernel can drop, because they are not in use."""
    try:
        lines = text_of(f"{group}/memory.stat").splitlines()
    except OSError:
        return 0
    numbers = dict(line.split() for line in lines)
    return int(numbers.get("total_inactive_file", numbers.get("inactive_file", 0)))

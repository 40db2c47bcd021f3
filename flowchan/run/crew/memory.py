"""The memory budget of a run, and the count of processes killed for lack of memory.

The channels of the run share the budget. The kernel counts the processes that it has killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
VMSTAT = Path("/proc/vmstat")


def budget() -> int:
    """Return half of the memory that this process may use, in bytes."""
    return available() // 2


def available() -> int:
    """Return the memory of the machine, or of this process's control group if that is less, in bytes."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    files = _files("memory.max", "memory.limit_in_bytes")
    return min([physical, *(limit for file in files for limit in _limit(file))])


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory so far.

    The number is that of this process's control group, or else that of the machine. Return 0 if neither is
    known.
    """
    for file in (*_files("memory.events", "memory.oom_control"), VMSTAT):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for name, number in (line.split() for line in lines):
            if name == "oom_kill":
                return int(number)
    return 0


def _limit(file: Path) -> list[int]:
    try:
        return [int(file.read_text())]
    except (OSError, ValueError):  # no such file, or its text is "max"
        return []


def _files(unified: str, legacy: str) -> Iterator[Path]:
    """Yield the files of this process's control groups: each group first, then all above it.

    In a container the group's own folder is often mounted as the root.
    """
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, name = (CGROUPS / "memory", legacy) if controllers else (CGROUPS, unified)
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group == root or root in group.parents:
                yield group / name

"""Memory budget of a run, and the number of processes that the kernel killed because memory was short.

All channels of the run share the budget.
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
    """Return the memory of the machine or of this process's control group in bytes, whichever is less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    files = _files("memory.max", "memory.limit_in_bytes")
    return min([physical, *(limit for file in files for limit in _limit(file))])


def oom_kills() -> int:
    """Return how many processes the kernel has killed so far because memory was short.

    The number is counted in this process's control group, or else on the whole machine. It is 0 if neither
    count is known.
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
    except (OSError, ValueError):  # the file does not exist or contains "max"
        return []


def _files(unified: str, legacy: str) -> Iterator[Path]:
    """Yield the files of this process's control groups: first those of a group, then those of its ancestors.

    In a container, the group's own folder is often mounted as the root.
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

"""How much memory a run may take for what is on its way: its channels share it."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def budget() -> int:
    """Half of what this process may use, in bytes."""
    return available() // 2


def available() -> int:
    """The memory of the machine, or of the control group that this process lives in, in bytes."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return physical
    return min([physical, *(limit for line in lines for limit in _limits(line))])


def _limits(line: str) -> list[int]:
    """The limits that a line of /proc/self/cgroup leads to: those of the group and of all above it. In a
    container the group's own folder is often mounted as the root."""
    _, controllers, path = line.split(":", 2)
    if controllers not in ("", "memory"):
        return []
    root, name = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
    found = []
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        if group == root or root in group.parents:
            try:
                found.append(int((group / name).read_text()))
            except (OSError, ValueError):  # no such file, or "max"
                continue
    return found

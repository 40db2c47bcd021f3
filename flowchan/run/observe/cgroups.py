"""Read the limits of this process's cgroups (v1 and v2)."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def group_files(controller: str, unified: str, legacy: str) -> Iterator[Path]:
    """Yield the path of the file for a limit in each cgroup of this process and in the cgroup's ancestors.

    In a container, the cgroup's own folder is often mounted as the root of the hierarchy.

    Args:
        controller: Name of the controller, such as "memory".
        unified: Name of the file in cgroups v2.
        legacy: Name of the file in cgroups v1.
    """
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, name = (CGROUPS / controller, legacy) if controllers else (CGROUPS, unified)
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group == root or root in group.parents:
                yield group / name


@functools.cache
def most_cores() -> int | None:
    """Return the number of whole cores that the cgroups allow, at least 1, or ``None`` without a limit."""
    limits = [
        limit for file in group_files("cpu", "cpu.max", "cpu.cfs_quota_us") for limit in _cpu_limit(file)
    ]
    return max(1, int(min(limits))) if limits else None


def affinity_cores() -> int:
    """Return the number of cores on which CPU affinity lets this process run."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def local_cores() -> int:
    """Return the number of cores that CPU affinity and cgroups allow this process to use."""
    cores = affinity_cores()
    return min(cores, most_cores() or cores)


def _cpu_limit(file: Path) -> list[float]:
    """Return a list with the limit in a file, in cores, or an empty list if the file sets no limit."""
    try:
        words = file.read_text().split()
        if len(words) < 2:
            words += (file.parent / "cpu.cfs_period_us").read_text().split()
        quota, period = int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):
        return []
    return [quota / period] if quota > 0 and period > 0 else []

"""Read the limits of this process's cgroups (v1 and v2)."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

CGROUPS = "/sys/fs/cgroup"
OWN_CGROUPS = "/proc/self/cgroup"


def text_of(file: str) -> str:
    """Return the text of a file of the kernel."""
    # pathlib is slow to import before Python 3.13.
    with open(file, encoding="utf-8") as opened:
        return opened.read()


def group_files(controller: str, unified: str, legacy: str) -> Iterator[str]:
    """Yield the path of the file for a limit in each cgroup of this process and in the cgroup's ancestors.

    In a container, the cgroup's own folder is often mounted as the root of the hierarchy.

    Args:
        controller: Name of the controller, such as "memory".
        unified: Name of the file in cgroups v2.
        legacy: Name of the file in cgroups v1.
    """
    try:
        lines = text_of(OWN_CGROUPS).splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, name = (os.path.join(CGROUPS, controller), legacy) if controllers else (CGROUPS, unified)
        folders = [folder for folder in path.split("/") if folder]
        for depth in range(len(folders), -1, -1):
            yield os.path.join(root, *folders[:depth], name)


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


def _cpu_limit(file: str) -> list[float]:
    """Return a list with the limit in a file, in cores, or an empty list if the file sets no limit."""
    try:
        words = text_of(file).split()
        if len(words) < 2:
            words += text_of(os.path.join(os.path.dirname(file), "cpu.cfs_period_us")).split()
        quota, period = int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):
        return []
    return [quota / period] if quota > 0 and period > 0 else []

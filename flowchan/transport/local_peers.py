"""Notice immediately when peers on this machine end."""

from __future__ import annotations

import os
import select
from functools import cache
from pathlib import Path
from typing import Any

from flowchan.transport.pidfd import open_pidfd


def card() -> dict[str, Any]:
    """Return a description of this process and its machine, which peers pass to :func:`local_peer`."""
    return {"pid": os.getpid(), "started": _start(os.getpid()), "machine": machine()}


class LocalPeer:
    """Process on this machine, watched until this object is closed."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd

    def has_ended(self) -> bool:
        ends = select.poll()
        ends.register(self._pidfd, select.POLLIN)
        return bool(ends.poll(0))

    def close(self) -> None:
        os.close(self._pidfd)


def local_peer(shown: dict[str, Any]) -> LocalPeer | None:
    """Watch the process that a :func:`card` describes.

    Return None if it is on another machine or cannot be watched.
    """
    pid = shown.get("pid")
    if not machine() or shown.get("machine") != machine() or not isinstance(pid, int) or pid <= 0:
        return None
    try:
        pidfd = open_pidfd(pid)
    except (OSError, OverflowError):
        return None
    if pidfd is None:
        return None
    found = LocalPeer(pidfd)
    if (start := _start(pid)) and start == shown.get("started"):
        return found
    found.close()
    return None


@cache
def machine() -> str:
    """Return an ID of this boot and PID namespace, in which process IDs are unique; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start(pid: int) -> str:
    """Return a process's start time. Together with the pid, it identifies the process uniquely."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""

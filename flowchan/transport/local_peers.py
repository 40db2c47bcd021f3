"""Processes of this machine among those that connect: of them it is known when they have ended."""

from __future__ import annotations

import os
import select
from functools import cache
from pathlib import Path
from typing import Any

from flowchan.transport.pidfd import open_pidfd


def card() -> dict[str, Any]:
    """What tells others which process this is, and on which machine."""
    return {"pid": os.getpid(), "started": _start(os.getpid()), "machine": _machine()}


class LocalPeer:
    """A process of this machine, as long as nobody closes this."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd = pidfd

    def has_ended(self) -> bool:
        ends = select.poll()
        ends.register(self._pidfd, select.POLLIN)
        return bool(ends.poll(0))

    def close(self) -> None:
        os.close(self._pidfd)


def local_peer(shown: dict[str, Any]) -> LocalPeer | None:
    """The process that shows this card; none if it runs elsewhere, or the kernel does not let us watch it."""
    pid = shown.get("pid")
    if not _machine() or shown.get("machine") != _machine() or not isinstance(pid, int) or pid <= 0:
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
def _machine() -> str:
    """Where its numbers of processes hold: this kernel since it began, and their namespace; empty if that is
    not told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start(pid: int) -> str:
    """When it began: with its number that names it for ever."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""

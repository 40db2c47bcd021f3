"""Make and check large items on hosts, and kill agents while this goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from flowchan import Run

SIZE = 300_000


def make(number: int, size: int = SIZE) -> bytes:
    return bytes([number % 251]) * (size + number)


def check(item: bytes, size: int = SIZE) -> int:
    """Return the item's number. Fail if the item is damaged."""
    number = len(item) - size
    assert item == make(number, size)
    return number


def kill_once(folder: Path, number: int, agent: bool) -> None:
    """Kill the calling worker or its agent, unless an earlier call has done so for this number."""
    try:
        (folder / str(number)).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getppid() if agent else os.getpid(), signal.SIGKILL)
    time.sleep(60)  # this process is killed when its agent ends


class CheckAndKill:
    """Checks items, and kills the calling worker or its agent at some of these items."""

    def __init__(self, folder: Path, at: frozenset[int], agent: bool = True) -> None:
        self.folder, self.at, self.agent = folder, at, agent

    def __call__(self, item: bytes) -> int:
        number = check(item)
        if number in self.at:
            kill_once(self.folder, number, self.agent)
        return number


class MakeAndKill(CheckAndKill):
    def __call__(self, number: int) -> bytes:  # type: ignore[override]
        if number in self.at:
            kill_once(self.folder, number, self.agent)
        return make(number)


def driver_bytes(run: Run) -> int:
    return sum(host.sent + host.received for host in run.stats().hosts)

"""Define the owner of device memory that this process has opened."""

from __future__ import annotations

import contextlib
import os
import select
from typing import Any

from flowchan.transport.device.arenas import Device
from flowchan.transport.pidfd import open_pidfd


class Owner:
    """Another process, whose memory and events this process has opened."""

    def __init__(self, pid: int) -> None:
        self.arenas: dict[tuple[str, int], tuple[Device, str, Any]] = {}
        self.events: dict[bytes, Any] = {}
        self._poll = select.poll()
        self._fd: int | None = None
        self._ended = False
        try:
            self._fd = open_pidfd(pid)
            if self._fd is not None:
                self._poll.register(self._fd, select.POLLIN)
        # The process has ended or is in another pid namespace, so opening its memory will fail.
        except OSError:
            pass

    def has_ended(self) -> bool:
        """Return whether it is certain that the process has ended."""
        if self._fd is not None and self._poll.poll(0):
            self._ended = True
        return self._ended

    def close(self) -> None:
        """Close the process's memory and events. The call may wait for the devices."""
        self.events.clear()
        for device, identity, memory in self.arenas.values():
            with contextlib.suppress(OSError):  # the driver may have freed the memory when its process ended
                device.close(identity, memory)
        self.arenas.clear()
        self.forget()

    def forget(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

"""Assign the GPUs of this machine to workers: each worker of a stage with ``gpus=n`` gets n of them."""

from __future__ import annotations

import itertools
import os
import subprocess

from flowchan.errors import HostError
from flowchan.run.policy.events import WorkerId

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Gpus:
    """Pool of the GPUs that this process may use.

    When the process of a worker dies, the worker's replacement gets the same GPUs.
    """

    def __init__(self) -> None:
        self._free: list[str] | None = None  # ``None`` until the first request
        self._held: dict[WorkerId, list[str]] = {}

    def take(self, id: WorkerId, number: int) -> str | None:
        """Reserve GPUs for a worker and return its ``CUDA_VISIBLE_DEVICES``; ``None`` leaves it unchanged.

        Raises :class:`flowchan.HostError` if not enough GPUs are free.
        """
        if not number:
            return None
        if self._free is None:
            self._free = present()
        if id not in self._held:
            if len(self._free) < number:
                held = sum(map(len, self._held.values()))
                raise HostError(
                    f"worker {id} needs {number} GPU{'s' * (number > 1)}, but only "
                    f"{len(self._free)} of {held + len(self._free)} GPUs on this host are free; "
                    "use fewer workers or more hosts"
                )
            self._held[id], self._free = self._free[:number], self._free[number:]
        return ",".join(self._held[id])

    def give_back(self, id: WorkerId) -> None:
        """Free the GPUs of a worker that has ended or moved to another host."""
        if self._free is not None:
            self._free += self._held.pop(id, [])


def present() -> list[str]:
    """Return the GPUs that a process on this machine may use, as ``CUDA_VISIBLE_DEVICES`` names them.

    If that variable is not set, these are all GPUs that the driver lists.
    """
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        words = [word.strip() for word in visible.split(",")]
        return [word for word in itertools.takewhile(lambda word: word != "-1", words) if word]
    command = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return listed.stdout.split()


def see_only(devices: str | None) -> None:
    """Set ``CUDA_VISIBLE_DEVICES`` in a worker process, before any user code is loaded."""
    if devices is not None:
        os.environ[VISIBLE] = devices

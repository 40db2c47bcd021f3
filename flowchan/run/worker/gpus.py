"""Which worker of this machine has which GPUs: of a stage with ``gpus=n`` each has n of its own."""

from __future__ import annotations

import itertools
import os
import subprocess

from flowchan.errors import HostError
from flowchan.run.policy.events import WorkerId

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Gpus:
    """Those that this process may use. A worker keeps its own over the deaths of its processes."""

    def __init__(self) -> None:
        self._free: list[str] | None = None  # not looked for yet
        self._held: dict[WorkerId, list[str]] = {}

    def take(self, id: WorkerId, number: int) -> str | None:
        """What the worker is to see as ``CUDA_VISIBLE_DEVICES``; ``None``: whatever this process sees. Raises
        :class:`flowchan.HostError` when there are too few."""
        if not number:
            return None
        if self._free is None:
            self._free = present()
        if id not in self._held:
            if len(self._free) < number:
                held = sum(map(len, self._held.values()))
                raise HostError(
                    f"worker {id} needs {number} GPU{'s' * (number > 1)} of its own, but of the "
                    f"{held + len(self._free)} here {len(self._free)} "
                    f"{'is' if len(self._free) == 1 else 'are'} free: take fewer workers, or more hosts"
                )
            self._held[id], self._free = self._free[:number], self._free[number:]
        return ",".join(self._held[id])

    def give_back(self, id: WorkerId) -> None:
        """The worker has ended, or runs elsewhere from now on."""
        if self._free is not None:
            self._free += self._held.pop(id, [])


def present() -> list[str]:
    """The GPUs that a process here may use, as ``CUDA_VISIBLE_DEVICES`` names them: what that says or, where
    it is not set, all that the driver knows."""
    told = os.environ.get(VISIBLE)
    if told is not None:
        words = [word.strip() for word in told.split(",")]
        return [word for word in itertools.takewhile(lambda word: word != "-1", words) if word]
    command = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return asked.stdout.split()


def see_only(devices: str | None) -> None:
    """In a worker's process, before any code of the user's is loaded."""
    if devices is not None:
        os.environ[VISIBLE] = devices

"""Assign this machine's GPUs to workers. A stage requests a number per worker with ``gpus=``.

With ``gpus=0.5``, two workers share a GPU.
"""

from __future__ import annotations

import itertools
import os
import subprocess

from flowchan.errors import HostError
from flowchan.run.policy.events import WorkerId

VISIBLE = "CUDA_VISIBLE_DEVICES"


_NEARLY = 1e-9
"""Tolerance for rounding errors in sums of shares."""


class Gpus:
    """Tracks which of this process's GPUs are free.

    A replacement gets the GPUs of the dead worker.
    """

    def __init__(self) -> None:
        # Free share of each GPU, or ``None`` before the first request.
        self._free: dict[str, float] | None = None
        # The GPUs that each worker has reserved, and the worker's share of each GPU.
        self._held: dict[WorkerId, tuple[list[str], float]] = {}

    def take(self, id: WorkerId, number: float) -> str | None:
        """Reserve GPUs for a worker. Return its ``CUDA_VISIBLE_DEVICES``, or ``None`` to leave it unchanged.

        A number below 1 reserves a share of one GPU. Raise :class:`flowchan.HostError` if too few GPUs are
        free.
        """
        if not number:
            return None
        if self._free is None:
            self._free = dict.fromkeys(present(), 1.0)
        if id not in self._held:
            found = _shared(self._free, number) if number < 1 else _whole(self._free)[: int(number)]
            if len(found) < number:
                raise HostError(_lack(id, number, self._free))
            share = min(number, 1.0)
            for name in found:
                self._free[name] -= share
            self._held[id] = found, share
        return ",".join(self._held[id][0])

    def give_back(self, id: WorkerId) -> None:
        """Release the GPUs of a worker that has ended or moved to another host."""
        names, share = self._held.pop(id, ([], 0.0))
        for name in names:
            assert self._free is not None
            self._free[name] = min(1.0, self._free[name] + share)


def _whole(free: dict[str, float]) -> list[str]:
    return [name for name, share in free.items() if share > 1 - _NEARLY]


def _shared(free: dict[str, float], share: float) -> list[str]:
    """Return the GPU with the smallest sufficient free share, so that other GPUs stay wholly free."""
    fitting = [name for name, left in free.items() if left > share - _NEARLY]
    return [min(fitting, key=lambda name: free[name])] if fitting else []


def _lack(id: WorkerId, number: float, free: dict[str, float]) -> str:
    if number < 1:
        most = max(free.values(), default=0.0)
        needs, left = f"{number:g} of a GPU", f"{round(most, 6):g} of a GPU on this host is"
    else:
        needs = f"{number} GPU{'s' * (number > 1)}"
        left = f"{len(_whole(free))} of {len(free)} GPUs on this host are"
    return f"worker {id} needs {needs}, but only {left} free; use fewer workers or more hosts"


def present() -> list[str]:
    """Return the GPUs that a process on this machine may use, with names for ``CUDA_VISIBLE_DEVICES``.

    If the environment does not set this variable, return all GPUs that the driver lists.
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
    """Set ``CUDA_VISIBLE_DEVICES`` in a worker process before any user code is loaded."""
    if devices is not None:
        os.environ[VISIBLE] = devices

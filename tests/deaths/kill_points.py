"""Points in user code where the crash tests kill a worker."""

from __future__ import annotations

import os
import signal

from flowchan import Channel, Closed, Run, StageStats


class Deaths:
    """Kills the calling process with SIGKILL the first ``times`` times that a worker reaches a point."""

    def __init__(self, *points: object, times: int = 1) -> None:
        self.total = len(points) * times
        self.pending: dict[object, Channel[None]] = {}
        for point in points:
            self.pending[point] = Channel(times, across="processes")
            self.pending[point].put_many([None] * times)
            self.pending[point].close()

    def at(self, point: object) -> None:
        pending = self.pending.get(point)
        if pending is None:
            return
        try:
            pending.get()
        except Closed:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def stage_of(run: Run, name: str) -> StageStats:
    """Return the current statistics of a stage."""
    return next(stage for stage in run.stats().stages if stage.name == name)

"""Changes to the number of a stage's workers while its graph runs (R13).

New workers get numbers that no worker of the stage has had. The workers with the highest numbers are removed,
each after its current item. Workers that are about to leave do not count.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from flowchan.run.policy.events import WorkerId


@dataclass(frozen=True, slots=True)
class Size:
    """The size of an elastic stage.

    Attributes:
        workers: Its number of workers.
        since: When it got this number, in seconds of the run's clock.
        last: The highest number given to a worker.
        spent: The worker time before ``since``, in seconds.
    """

    workers: int
    since: float
    last: int
    spent: float = 0.0

    def seconds(self, now: float) -> float:
        """Return the worker time until ``now``, in seconds. Two workers take two seconds per second."""
        return self.spent + self.workers * (now - self.since)


@dataclass(frozen=True, slots=True)
class Scale:
    """A request for this number of workers of a stage, by ``run.scale()``."""

    stage: str
    workers: int


@dataclass(frozen=True, slots=True)
class AddWorker:
    """Open the ports of an additional worker of a stage, and start it."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Let a worker end after its present item."""

    worker: WorkerId


def scaled(
    size: Size, scale: Scale, peers: Collection[WorkerId], now: float
) -> tuple[Size, list[WorkerId], list[WorkerId]]:
    """Return the stage's next size, and the workers to add and to remove.

    ``peers`` are its present workers.
    """
    more = max(0, scale.workers - len(peers))
    new = [WorkerId(scale.stage, size.last + number) for number in range(1, more + 1)]
    fewer = sorted(peers, key=lambda worker: worker.number)[scale.workers :]
    return Size(scale.workers, now, size.last + more, size.seconds(now)), new, fewer

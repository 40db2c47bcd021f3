"""Change the number of a stage's workers while its graph runs (R13), as a pure function.

New workers get numbers that no worker of the stage has had. The workers with the highest numbers are removed,
each after its current item. Workers that are about to leave do not count.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from flowchan.run.policy.events import WorkerId


@dataclass(frozen=True, slots=True)
class Size:
    """Number of workers of an elastic stage ``since`` a time.

    ``last`` is the highest worker number given so far. ``spent`` is the worker time before ``since``, in
    seconds.
    """

    workers: int
    since: float
    last: int
    spent: float = 0.0

    def seconds(self, now: float) -> float:
        """Return the worker time until ``now``, in seconds; two workers take two seconds per second."""
        return self.spent + self.workers * (now - self.since)


@dataclass(frozen=True, slots=True)
class Scale:
    """Request of ``run.scale()`` to give the stage ``workers`` workers."""

    stage: str
    workers: int


@dataclass(frozen=True, slots=True)
class Add:
    """Command to open the ports of another worker of a stage and start it."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Remove:
    """Command to let a worker end after its current item."""

    worker: WorkerId


def scaled(
    size: Size, scale: Scale, mates: Collection[WorkerId], now: float
) -> tuple[Size, list[WorkerId], list[WorkerId]]:
    """Return the next size, and the workers to add and to remove, from the current workers ``mates``."""
    more = max(0, scale.workers - len(mates))
    new = [WorkerId(scale.stage, size.last + number) for number in range(1, more + 1)]
    fewer = sorted(mates, key=lambda worker: worker.number)[scale.workers :]
    return Size(scale.workers, now, size.last + more, size.seconds(now)), new, fewer

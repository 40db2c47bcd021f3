"""Change the number of a stage's workers during a run (R13).

New workers get numbers that the stage has not used before. Workers with the highest numbers are removed
first, each after its current item. A worker that is being removed no longer counts as a worker of the stage.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from flowchan.public import public
from flowchan.run.policy.events import WorkerId


@dataclass(frozen=True, slots=True)
class Size:
    """Worker count of a scalable stage, and how long its workers have worked.

    Attributes:
        workers: Number of workers.
        since: When the number last changed, in seconds of the run's clock.
        last: Highest worker number so far.
        spent: Time that all workers together spent until ``since``, in seconds.
    """

    workers: int
    since: float
    last: int
    spent: float = 0.0

    def seconds(self, now: float) -> float:
        """Return the total time of all workers until ``now``, in seconds."""
        return self.spent + self.workers * (now - self.since)


@dataclass(frozen=True, slots=True)
class Scale:
    """Request from ``run.scale()`` to give a stage this number of ``workers``."""

    stage: str
    workers: int


@dataclass(frozen=True, slots=True)
class AddWorker:
    """Open the ports of an additional worker, and start it."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Let a worker end after its current item."""

    worker: WorkerId


@public
@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """Decision that changed the number of workers of a ``workers="auto"`` stage.

    Attributes:
        elapsed: Seconds from the start of the run to the decision.
        stage: Name of the stage.
        workers_before: Number of workers before the decision.
        workers: Number of workers after the decision.
        reason: Explanation of the change in words.
        outcome: Measured effect, such as "kept: 1.93 × the rate"; empty until it is known.

    Example:
        >>> from flowchan import ScalingDecision
        >>> decision = ScalingDecision(1.0, "decode", 1, 2, "busy 98 % of the time", "kept: 1.93 × the rate")
        >>> print(f"{decision.stage}: {decision.workers_before} → {decision.workers}: {decision.reason}")
        decode: 1 → 2: busy 98 % of the time
    """

    elapsed: float
    stage: str
    workers_before: int
    workers: int
    reason: str
    outcome: str = ""


def scaled(
    size: Size, scale: Scale, peers: Collection[WorkerId], now: float
) -> tuple[Size, list[WorkerId], list[WorkerId]]:
    """Return the new size of a stage, and the workers to add or to remove.

    ``peers`` are the stage's current workers.
    """
    more = max(0, scale.workers - len(peers))
    new = [WorkerId(scale.stage, size.last + number) for number in range(1, more + 1)]
    fewer = sorted(peers, key=lambda worker: worker.number)[scale.workers :]
    return Size(scale.workers, now, size.last + more, size.seconds(now)), new, fewer

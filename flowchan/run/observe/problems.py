"""Keep the latest problems of a run for viewers that connect later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowchan.run.policy.decisions import Decided
from flowchan.run.policy.events import Death, ErrorSent, NotAdded, Warned
from flowchan.run.policy.failures import text_of

MOST_PROBLEMS = 50
"""Maximum number of problems kept. The oldest are dropped."""


@dataclass(frozen=True, slots=True)
class RunProblem:
    """A failed item or stage, a death or a warning. ``stage`` is empty if the stage is unknown."""

    elapsed: float
    stage: str
    text: str


class RecentProblems:
    """Listener that keeps the latest problems from the feed of a run. Create it when the run starts."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._kept: deque[RunProblem] = deque(maxlen=MOST_PROBLEMS)

    def record(self, event: Any) -> None:
        """Keep the problems that an event reports."""
        for stage, text in problems_in(event):
            self._kept.append(RunProblem(time.monotonic() - self._started_at, stage, text))

    def latest(self) -> tuple[RunProblem, ...]:
        """Return the latest problems, the oldest first."""
        return tuple(self._kept.copy())


def problems_in(event: Any) -> Iterator[tuple[str, str]]:
    """Yield the stage and description of each problem that an event or decision reports."""
    match event:
        case ErrorSent(worker, text):
            yield worker.stage, text
        case NotAdded(worker, text):
            yield worker.stage, text
        case Warned(stage, text):
            yield stage, text
        case Decided(decided, before, after):
            if isinstance(decided, Death) and decided.summary and before.goes_on:
                yield decided.worker.stage, f"worker {decided.worker} {decided.summary}"
            for failure in after.failures[len(before.failures) :]:
                yield failure.worker.stage, text_of(failure.error)

"""Compute plans, which list each worker's steps in a training step. This module does not use torch.

A plan comes from a named schedule, or from a schedule that the user writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flowchan.items.text import short, shown
from flowchan.pipelines.sequential.engine.schedule import (
    SCHEDULES,
    STEP,
    Schedule,
    Step,
    check,
    parse,
    plan,
    usual_workers,
)
from flowchan.pipelines.sequential.simulate import simulate

Written = str | Sequence[str]
"""Schedule as text, with one line per worker."""
Function = Callable[[int, int, int, int], str | Iterable[Step]]
"""Schedule as a function of worker, workers, parts and chunks."""


@dataclass(frozen=True)
class PartOwners:
    """Assignment of parts to workers.

    The workers form a row. If two consecutive parts are on workers that are not adjacent in the row, the
    workers form a ring.
    """

    workers: int
    of: tuple[int, ...]

    def parts(self, worker: int) -> list[int]:
        """Return the parts of a worker."""
        return [part for part, owner in enumerate(self.of) if owner == worker]

    def towards(self, worker: int, part: int) -> int:
        """Return the direction from a worker to a part.

        The direction is 0 if the worker has the part, 1 if the next worker has it, and -1 if the previous one
        does.
        """
        distance = self.of[part] - worker
        if abs(distance) > 1:  # the first and the last worker of a ring are neighbours
            return -1 if distance > 0 else 1
        return distance

    def sends(self, worker: int, step: Step) -> int:
        """Return the direction in which the result of a step is sent, as in :meth:`towards`.

        The direction is 0 if the result is not sent.
        """
        part = step.part + (1 if step.op == "F" else -1)
        if step.op == "W" or part not in range(len(self.of)):
            return 0
        return self.towards(worker, part)

    @property
    def ring(self) -> bool:
        """Return True if the last worker sends activations to the first."""
        return any(abs(one - other) > 1 for one, other in zip(self.of, self.of[1:], strict=False))


class Plans:
    """Steps of all workers, for each number of micro-batches up to ``chunks``.

    Raises ``TypeError`` or ``ValueError`` if the schedule cannot run.
    """

    def __init__(
        self, schedule: Schedule | Written | Function, workers: int | None, parts: int, chunks: int
    ) -> None:
        self._schedule, self._total = schedule, parts
        self._lines = _lines(schedule)
        if self._lines is not None:
            if workers not in (None, len(self._lines)):
                raise ValueError(
                    f"training: workers must be {len(self._lines)}, the number of lines in the schedule, "
                    f"got {short(workers)}"
                )
            workers = len(self._lines)
        elif workers is None:
            workers = usual_workers(schedule, parts)
        named = "gpipe" if callable(schedule) or self._lines is not None else schedule
        if named is schedule or not isinstance(workers, int) or workers < 1:
            check("training", named, workers, parts, chunks)
        self.workers = workers
        self.of = lru_cache(8)(self._of)
        self.owners = PartOwners(workers, _owners(self.of(chunks), parts))
        if named is not schedule:
            _check_neighbours(self.owners)

    def _of(self, chunks: int) -> list[list[Step]]:
        schedule: Any = self._schedule
        if self._lines is not None:
            found = [parse(line, worker) for worker, line in enumerate(self._lines)]
            # Check only the first schedule, which contains all micro-batches. Later schedules with fewer
            # micro-batches are subsets of it.
            if not hasattr(self, "owners"):
                _check_complete(found, self._total, chunks)
            return [[step for step in steps if step.chunk < chunks] for steps in found]
        if callable(schedule):
            found = []
            for worker in range(self.workers):
                given = schedule(worker, self.workers, self._total, chunks)
                found.append(parse(given, worker) if isinstance(given, str) else _steps(given))
            _check_complete(found, self._total, chunks)
            return found
        return plan(schedule, self.workers, self._total, chunks)


def _lines(schedule: Any) -> list[str] | None:
    """Return the lines of a schedule given as text, or ``None`` for a name or a function."""
    if isinstance(schedule, str):
        words = schedule.split()
        if schedule in SCHEDULES or not any(map(STEP.fullmatch, words)):
            return None
        return [line for line in schedule.splitlines() if line.strip()]
    if isinstance(schedule, Sequence) and schedule and all(isinstance(line, str) for line in schedule):
        return list(schedule)
    return None


def _steps(given: Any) -> list[Step]:
    steps = list(given) if isinstance(given, Iterable) else [given]
    for step in steps:
        if not isinstance(step, Step):
            raise TypeError(f"training: the schedule function must return steps or text, got {shown(step)}")
    return steps


def _check_complete(plan: list[list[Step]], parts: int, chunks: int) -> None:
    """Check a schedule that the user has written.

    Raises ``ValueError`` unless each micro-batch passes through each part once forward and once backward, in
    a feasible order.
    """
    given = {step for steps in plan for step in steps}
    for step in sorted(given, key=str):
        if step.part >= parts or step.chunk >= chunks:
            raise ValueError(
                f"training: the schedule must be for {parts} parts and {chunks} micro-batches, got step "
                f"{step}; set chunks= on the pipe"
            )
    for part in range(parts):
        for chunk in range(chunks):
            forward, back, inputs, weights = (Step(op, chunk, part) for op in ("F", "B", "I", "W"))
            halves = (inputs in given) + (weights in given)
            if forward not in given or halves == 1 or (back in given) == (halves == 2):
                raise ValueError(
                    f"training: the schedule must contain {forward} once, and either {back} or both {inputs} "
                    f"and {weights}"
                )
    try:
        simulate(plan)
    except ValueError as error:
        raise ValueError(f"training: the schedule cannot run: {error}") from None


def _owners(plan: list[list[Step]], parts: int) -> tuple[int, ...]:
    owners = {step.part: worker for worker, steps in enumerate(plan) for step in steps}
    return tuple(owners[part] for part in range(parts))


def _check_neighbours(owners: PartOwners) -> None:
    for part, (one, other) in enumerate(zip(owners.of, owners.of[1:], strict=False)):
        if (other - one) % owners.workers not in (0, 1, owners.workers - 1):
            raise ValueError(
                f"training: parts {part} and {part + 1} must be on the same worker or on neighbouring "
                f"workers, got workers {one} and {other}"
            )

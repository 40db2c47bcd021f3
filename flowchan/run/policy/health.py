"""Summarise a run's health for a service manager's probes."""

from __future__ import annotations

from dataclasses import dataclass

from flowchan.declare.operators import OPERATORS
from flowchan.declare.values import UNLIMITED_RESTARTS
from flowchan.public import public
from flowchan.run.policy.restart_limit import restarts_used
from flowchan.run.policy.stats import RunStats, StageState
from flowchan.run.policy.transitions import PolicyState


@public
@dataclass(frozen=True, slots=True)
class Health:
    """Health of a run at one moment, as plain values that ``json`` can store.

    Attributes:
        ready: True if the run accepts items and no stage is "starting". After a death or ``run.scale()``, it
            stays True as long as at least one worker of each stage is working. ``ready`` becomes False when
            the run is stopping.
        failed: True if the run has failed.
        stages: State of each stage except inputs: "starting" until a worker has built its callable, then
            "running", and finally "ended".
        restarts_left: Number of restarts that each stage on processes has left now. If this number is 0, the
            next death ends the run. Stages without a limit are omitted.
        waiting: Number of ``ask`` calls that wait for their answers.

    Example:
        >>> import dataclasses
        >>> from flowchan import Graph
        >>> graph = Graph()
        >>> questions = graph.input()
        >>> answers = questions.map(str.upper, name="answer").collect()
        >>> with graph.start() as run:
        ...     ready = run.ready()
        ...     health = run.health()
        >>> health.ready, health.stages["answer"], health.waiting
        (True, 'running', 0)
    """

    ready: bool
    failed: bool
    stages: dict[str, StageState]
    restarts_left: dict[str, int]
    waiting: int


def health_of(stats: RunStats, state: PolicyState, failed: bool, waiting: int, now: float) -> Health:
    """Return the health of a run at time ``now``. ``waiting`` is the number of unanswered requests."""
    return Health(
        stats.state == "running" and all(stage.state != "starting" for stage in stats.stages),
        failed,
        {stage.name: stage.state for stage in stats.stages if not OPERATORS[stage.kind].outside},
        {
            stage: limit - restarts_used(state, stage, now)
            for stage, limit in state.limits.items()
            if limit < UNLIMITED_RESTARTS
        },
        waiting,
    )

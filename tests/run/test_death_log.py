"""Test the count of deaths that sets the pause before a replacement."""

from __future__ import annotations

import pytest

from flowchan import Graph
from flowchan.run.crew.death_log import DeathLog
from flowchan.run.crew.process_exit import ProcessExit
from flowchan.run.policy.failures import RETIRED
from flowchan.run.policy.plan import Plan, PlannedWorker, plan


def planned() -> Plan:
    graph = Graph("deaths")
    graph.source([1]).map(abs, on="process", workers=2, name="work").sink(abs)
    return plan(graph, seed=1, memory=1 << 20)


def workers_in(made: Plan) -> list[PlannedWorker]:
    return [worker for worker in made.workers if worker.id.stage == "work"]


def killed(lived: float, over_item: int = 0) -> ProcessExit:
    return ProcessExit("was killed by SIGKILL", -9, 1, lived, over_item)


@pytest.mark.parametrize(
    ("lives", "deaths"),
    [
        ([0.1, 0.1, 0.1], [1, 2, 3]),
        ([1.0, 1.0], [1, 2]),
        ([0.1, 0.1, 1.1, 0.1], [1, 2, 1, 2]),
        ([5.0, 5.0, 5.0], [1, 1, 1]),
    ],
)
def test_only_consecutive_quick_deaths_are_counted(lives: list[float], deaths: list[int]) -> None:
    """The count starts again when a worker that has lived for more than 1 s dies."""
    made = planned()
    log, (worker, _) = DeathLog(made), workers_in(made)
    assert [log.died(worker, killed(lived)).deaths for lived in lives] == deaths


def test_deaths_of_one_worker_do_not_count_for_another() -> None:
    made = planned()
    log, (first, second) = DeathLog(made), workers_in(made)
    assert [log.died(worker, killed(0.1)).deaths for worker in (first, first, second)] == [1, 2, 1]


def test_deaths_while_processing_an_item_are_counted_for_the_item() -> None:
    made = planned()
    log, (worker, _) = DeathLog(made), workers_in(made)
    ends = [killed(0.1), killed(0.1), killed(9.0, over_item=1), killed(9.0, over_item=2), killed(0.1)]
    assert [log.died(worker, end).deaths for end in ends] == [1, 2, 1, 2, 3]


def test_terminated_or_retired_worker_is_not_counted() -> None:
    made = planned()
    log, (worker, _) = DeathLog(made), workers_in(made)
    log.terminated(worker.id)
    assert log.died(worker, killed(0.1)).deaths == 0
    log.started(worker.id)
    assert log.died(worker, ProcessExit("retired", RETIRED, 1, 0.1)).deaths == 0
    assert log.died(worker, killed(0.1)).deaths == 1

"""What the supervisor reads while other threads of the program change it."""

from __future__ import annotations

import threading

from flowchan import Graph
from flowchan.run.crew.local_crew import LocalCrew
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.plan import plan


def test_look_at_channels_survives_threads_that_start_meanwhile() -> None:
    graph = Graph("shared")
    for branch in graph.source([], name="source").tee(2):
        branch.collect()
    crew = LocalCrew(plan(graph, seed=1, memory=1 << 20))
    first, second = (worker.id for worker in crew.plan.workers if worker.gathers)
    looks = [False]

    class Starting(WorkerId):
        """A worker whose comparison with others takes so long that another thread starts one meanwhile."""

        def __hash__(self) -> int:
            if looks[0]:
                crew.threads[second] = threading.current_thread()
            return super().__hash__()

    crew.threads[Starting(first.stage, first.number)] = threading.current_thread()
    looks[0] = True
    assert second in crew.glance().unread

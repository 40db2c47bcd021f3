"""Test state that the supervisor reads while other threads of the program modify it."""

from __future__ import annotations

import threading
from typing import Any

from flowchan import Graph
from flowchan.run.crew.local_part import LocalPart
from flowchan.run.crew.run_ports import RunPorts
from flowchan.run.policy.events import WorkerId
from flowchan.run.policy.plan import plan


class Slow(WorkerId):
    """Worker id whose lookup modifies the table, as another thread could do at that moment."""

    def __hash__(self) -> int:
        for change in changes:
            change()
        return super().__hash__()


changes: list[Any] = []


def test_activity_of_ports_can_be_computed_while_results_are_read() -> None:
    graph = Graph("shared")
    for branch in graph.source([], name="source").tee(3):
        branch.collect()
    ports = RunPorts(plan(graph, seed=1, memory=1 << 20))
    first, second, third = (worker.id for worker in ports.plan.workers if worker.gathers)
    ports._unread = {Slow(first.stage, first.number): True, second: True, third: True}
    changes.append(lambda: ports.result_read(second))
    try:
        assert third in ports.activity().unread
    finally:
        changes.clear()


def test_close_tolerates_threads_being_started_concurrently() -> None:
    graph = Graph("shared")
    graph.source([], name="source").collect()
    part = LocalPart(RunPorts(plan(graph, seed=1, memory=1 << 20)))
    thread, slow, late = threading.current_thread(), Slow("collect", 1), WorkerId("late", 1)
    ended = threading.Thread()
    ended.start()
    ended.join()
    part.threads[slow] = ended
    changes.append(lambda: part.threads.setdefault(late, thread))
    try:
        assert part.close(frozenset({late}), 0.0) >= {late}
    finally:
        changes.clear()

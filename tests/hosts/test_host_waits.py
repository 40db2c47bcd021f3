"""Who waits for whom, over hosts: nobody is taken to be stuck who only works elsewhere."""

from __future__ import annotations

import pytest
from gates import Gate
from waiting import wait_until

from flowchan import Graph
from flowchan.hosts import local
from flowchan.run import deadlock, supervisor
from flowchan.run.supervisor import Supervisor


def test_a_worker_that_works_for_long_elsewhere_is_no_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others wait meanwhile, for it or for room."""
    looks = []
    real = Supervisor._look_for_deadlock

    def look(self: Supervisor) -> None:
        real(self)
        looks.append(1)

    monkeypatch.setattr(Supervisor, "_look_for_deadlock", look)
    monkeypatch.setattr(supervisor, "LOOK", 0.001)
    monkeypatch.setattr(deadlock, "STILL", 0.001)
    gate = Gate()
    graph = Graph("working")
    result = graph.source(range(500)).map(gate.wait, on=local(2), workers=2).collect()
    run = graph.start()
    gate.wait_held(2)
    so_far = len(looks)
    wait_until(lambda: len(looks) > so_far + 100)
    assert run.stats().state == "running"
    gate.open()
    assert run.wait()[result] == list(range(500))

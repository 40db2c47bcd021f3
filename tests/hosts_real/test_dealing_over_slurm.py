"""Test the assignment of workers to the nodes of a Slurm allocation."""

from __future__ import annotations

import os
from typing import Any

import pytest

from flowchan import pipelines
from flowchan.hosts import slurm


def node(barrier: Any, number: int) -> str:
    barrier.wait()  # all calls overlap, so no worker can run two of them
    return os.environ["SLURMD_NODENAME"]


@pytest.mark.usefixtures("allocation")
def test_workers_are_dealt_to_all_allocated_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "4,2")
    pool = slurm()
    dealt = pool.dealt(6)
    assert dealt == ("node1", "node2", "node1", "node2", "node1", "node1")
    found = pipelines.map(6, node, pipelines.Barrier(6, across="hosts"), on=pool.assigned(dealt)).join()
    assert sorted(found) == sorted(dealt)

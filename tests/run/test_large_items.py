"""Test runs with arrays and tensors as items.

Workers read these items without copying. The items are intact after a death, and valid after the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.optional_packages import optional

from flowchan import Graph, Holder
from flowchan.run.policy.explain import explain
from flowchan.run.policy.stats import EdgeStats, RunStats, StageStats

torch = optional("torch")

pytestmark = pytest.mark.usefixtures("one_compute_thread")

LARGE = 50_000


def numbered(count: int):
    for number in range(count):
        yield np.full(LARGE, number)


def test_r8_results_stay_valid_after_the_run() -> None:
    graph = Graph("kept")
    negatives = graph.source(numbered, 20, on="process").map(np.negative, on="process", workers=2).collect()
    kept = graph.run()[negatives]
    assert [int(array[0]) for array in kept] == [-number for number in range(20)]
    assert all((array == array[0]).all() for array in kept)


class SpoilsAndDies:
    """Stage function that overwrites its tensor and, the first time, kills its worker."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, tensor: torch.Tensor) -> int:
        found = int(tensor.sum())
        tensor += 1
        if not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def test_c11_item_changed_by_a_killed_worker_is_restored(tmp_path: Path) -> None:
    graph = Graph("spoiled")
    ones = graph.source([torch.ones(LARGE)] * 3)
    sums = ones.map(SpoilsAndDies(tmp_path / "died"), on="process").collect()
    assert graph.run()[sums] == [LARGE] * 3


class Keeper:
    """Stage function that keeps every item, and checks all kept items in each call."""

    def __init__(self) -> None:
        self.kept: list[np.ndarray] = []

    def __call__(self, array: np.ndarray) -> int:
        self.kept.append(array)
        assert all((one == number).all() for number, one in enumerate(self.kept))
        return len(self.kept)


def test_c11_item_kept_past_its_lease_stays_unchanged() -> None:
    graph = Graph("keeping")
    counts = graph.source(numbered, 30).map(Keeper, on="process").collect()
    assert graph.run()[counts] == list(range(1, 31))


def test_explanation_names_the_process_that_holds_memory() -> None:
    """A writer waits for memory, and the explanation must name the process that holds this memory."""
    stage = StageStats("resize", "map", "process", 1, 1, 5, 5, 0, 0, 0, 0, 0, 1.0, 0.1, 0.0, 0.9)
    held = (Holder(7, 2, 3_200_000),)
    edge = EdgeStats(
        "resize", "resize", "upload", "processes", 3, 64, 5, 1.0, waiting_writers=1, holders=held
    )
    message = explain(RunStats("images", "running", 1.0, (stage,), (edge,), None))
    assert "waits to put into 'resize' (3 of 64; process 7 holds 2 blocks, 3.2 MB)" in message


AFTER_OPENMP = """
import torch
from flowchan import Graph
torch.set_num_threads(2)
ones = torch.ones(1_000_000)
assert ones.sum() == 1_000_000  # starts the threads of OpenMP, which do not survive a fork
graph = Graph("computing")
sums = graph.source([ones] * 3).map(lambda tensor: int((tensor * 2).sum()), on="process", workers=2).collect()
print(graph.run()[sums])
"""


def test_r7_workers_compute_with_torch_after_their_parent_did() -> None:
    done = subprocess.run([sys.executable, "-c", AFTER_OPENMP], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[2000000, 2000000, 2000000]\n"), done.stderr

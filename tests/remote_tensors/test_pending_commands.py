"""Test that commands run without a wait, that only a few are pending, and that temporaries are freed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.optional_packages import optional
from support.waiting import wait_blocked

torch = optional("torch")
pytestmark = pytest.mark.usefixtures("one_compute_thread")

WAIT_S = 60


def test_command_runs_even_if_the_program_issues_no_more_commands(two_nodes: Any, tmp_path: Path) -> None:
    from node_support import SeenTensor

    seen = SeenTensor(tmp_path / "seen", two_nodes[0])
    for step in range(1, 4):
        seen.remote.add_(1)
        seen.wait_for(step)


def test_command_runs_after_a_long_pause(two_nodes: Any, tmp_path: Path) -> None:
    from node_support import SeenTensor
    from support.waiting import wait_until

    seen = SeenTensor(tmp_path / "seen", two_nodes[0])
    client = seen.remote._m.client
    for step in range(1, 4):
        seen.remote.add_(1)
        seen.wait_for(step)
        wait_until(lambda: client.idle)  # the background thread is asleep


def test_copy_between_nodes_runs_without_a_waiting_call(two_nodes: Any, tmp_path: Path) -> None:
    from node_support import SeenTensor

    seen = SeenTensor(tmp_path / "seen", two_nodes[1])
    source = torch.full((1,), 7, device=two_nodes[0])
    seen.remote.copy_(source)
    seen.wait_for(7)
    seen.remote.add_((source + 1).to(two_nodes[1]))
    seen.wait_for(15)


def test_program_that_is_faster_than_a_node_blocks(two_nodes: Any, long_walk: bool) -> None:
    from node_support import stopped

    count = 100_000 if long_walk else 40_000
    issued = 0
    x = torch.zeros(1, dtype=torch.int64, device=two_nodes[0])

    def issue() -> None:
        nonlocal issued
        for _ in range(count):
            x.add_(1)
            issued += 1

    thread = threading.Thread(target=issue)
    with stopped(two_nodes, 0):
        thread.start()
        wait_blocked(x._m.client._commands, writers=1)
        pending = issued
        assert 0 < pending < 20_000
        # the other node is not affected
        assert torch.ones(2, device=two_nodes[1]).tolist() == [1.0, 1.0]
    thread.join(WAIT_S)
    assert x.item() == count


def test_memory_of_program_and_node_stays_bounded(two_nodes: Any, long_walk: bool) -> None:
    x = torch.ones(1000, device=two_nodes[0])
    processes = psutil.Process(), psutil.Process(two_nodes.stats()[0].pid)

    def temporaries(count: int) -> None:
        y = x
        for step in range(count):
            y = x + y
            if step % 1000 == 0:
                y = x

    temporaries(3000)
    two_nodes.sync(WAIT_S)
    before = [process.memory_info().rss for process in processes]
    temporaries(100_000 if long_walk else 20_000)  # at least 80 MB in total
    two_nodes.sync(WAIT_S)
    growth = [process.memory_info().rss - size for process, size in zip(processes, before, strict=True)]
    assert max(growth) < 32 << 20


def test_node_frees_temporaries(two_nodes: Any) -> None:
    x = torch.ones(2, device=two_nodes[0])
    two_nodes.sync(WAIT_S)
    before = two_nodes.stats()[0].tensors
    for _ in range(5000):
        (x + 1).mul_(2)
    assert two_nodes.stats()[0].tensors == before
    kept = [x + 1 for _ in range(10)]
    assert two_nodes.stats()[0].tensors == before + 10
    del kept
    assert two_nodes.stats()[0].tensors == before


def test_freed_tensors_leave_the_node_of_an_idle_program(two_nodes: Any) -> None:
    """The ids of freed tensors are sent without waiting for the next command."""
    from support.waiting import wait_until

    process = psutil.Process(two_nodes.stats()[0].pid)
    before = process.memory_info().rss
    large = torch.ones(1 << 24, device=two_nodes[0])
    two_nodes.sync(WAIT_S)
    assert process.memory_info().rss - before > 60 << 20
    del large
    wait_until(lambda: process.memory_info().rss - before < 8 << 20)

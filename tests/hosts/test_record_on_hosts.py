"""Test recordings of channels between hosts: each item is recorded once and in order, even if workers are
killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from flowchan import Graph, Recording
from flowchan.hosts import local

POOL = local(2)
ITEMS = 60

pytestmark = pytest.mark.usefixtures("no_agent_stays")


def killed_once(path: Path, number: int) -> int:
    """Return the number, but kill this worker at the first call with every twentieth number."""
    mark = path / str(number)
    if number % 20 == 7 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_channel_between_hosts_is_recorded_once_and_in_order(tmp_path: Path) -> None:
    for folder in ("write", "read"):
        (tmp_path / folder).mkdir()
    graph = Graph("recorded")
    numbers = graph.source(range(ITEMS)).map(
        lambda number: killed_once(tmp_path / "write", number), on=POOL, workers=2, name="write"
    )
    result = numbers.map(
        lambda number: -killed_once(tmp_path / "read", number), on=POOL, workers=2, name="read"
    ).collect()
    graph.record("write", tmp_path / "items.rec")
    with graph.start() as run:
        assert run.wait()[result] == [-number for number in range(ITEMS)]
    restarts = {stage.name: stage.restarts for stage in run.stats().stages}
    assert min(restarts["write"], restarts["read"]) > 0
    recording = Recording(tmp_path / "items.rec")
    assert recording.complete
    assert list(recording) == list(range(ITEMS))

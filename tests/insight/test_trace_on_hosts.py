"""Test that a trace shows workers on a host with a different clock at the driver's times."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ssh_stub import ssh_stub
from trace_files import check_trace, names_of, read_trace, spans_of

from flowchan import Graph, hosts
from flowchan.hosts import Pool
from flowchan.run.policy.events import ItemTraced
from flowchan.run.worker import item_recorder

AHEAD_S = 1_000_000
"""Seconds by which the host's clock is ahead. A run takes much less time."""
UNSHARE = ["unshare", "--time", f"--monotonic={AHEAD_S}", f"--boottime={AHEAD_S}", "--fork", "--kill-child"]


def has_time_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    return not subprocess.run([*UNSHARE, "true"], capture_output=True).returncode


pytestmark = pytest.mark.skipif(not has_time_namespaces(), reason="time namespaces need root and util-linux")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Return a pool of one host whose monotonic clock is ahead of this machine's clock."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {" ".join(UNSHARE)} {sys.executable} "$@"\n')
    python.chmod(0o755)
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (here, here.parent))))
    with ssh_stub(tmp_path):
        yield hosts.ssh("far", python=str(python))


def host_time(_: int) -> float:
    return time.monotonic()


def test_spans_of_worker_on_host_use_driver_clock(
    host: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(item_recorder, "CLOSEST_NS", -1)  # sample every item
    graph, path = Graph("clocks"), tmp_path / "out.json"
    times = graph.source(range(20)).map(host_time, on=host, name="there").collect()
    began = time.monotonic()
    items: list[ItemTraced] = []
    run = graph.start(trace=path)
    with run.subscribe(events=lambda event: items.append(event) if isinstance(event, ItemTraced) else None):
        assert min(run.wait()[times]) > began + AHEAD_S / 2
    ended = time.monotonic()
    remote = [span for item in items for span in item.spans if span[0] == "there"]
    assert remote
    for *_, taken, put in remote:
        assert began - AHEAD_S / 2 < taken <= put < ended + AHEAD_S / 2
    events = read_trace(path)
    check_trace(events)
    _, threads = names_of(events)
    shown = {threads[tid]: spans for tid, spans in spans_of(events).items()}
    assert shown.keys() >= {"worker 1 on far", "worker 1 on far: sampled items"}
    assert all(span["ts"] < AHEAD_S / 2 * 1e6 for spans in shown.values() for span in spans)

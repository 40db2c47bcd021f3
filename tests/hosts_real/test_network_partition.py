"""Test a graph over three network namespaces; one namespace loses its cable."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from networks import Networks


def test_graph_continues_when_one_of_three_network_cables_is_cut(networks: Networks, tmp_path: Path):
    """The driver notices the silence within the ``peer_timeout``, the other host does the work, and the
    report shows this."""
    head, first, second = networks.names
    walk = Path(__file__).with_name("cable_walk.py")
    command = ("ip", "netns", "exec", head, sys.executable, walk, head, first, second, tmp_path)
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert f"host {first}: it sent nothing for " in done.stdout
    assert f"host {second}: " not in done.stdout
    assert f"[{first}] flowchan agent 1: received nothing from the driver for " in done.stderr

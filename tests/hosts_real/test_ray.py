"""Test agents in Ray actors, on three nodes in three network namespaces."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from networks import HEAD
from nodes import Nodes
from support.waiting import wait_until

WALKS = Path(__file__).with_name("ray_walks.py")


@pytest.fixture(autouse=True)
def no_leftovers() -> None:
    """Replace the check for leftovers: Ray keeps idle workers, which end only when ``nodes`` is torn down."""


@pytest.fixture
def walk(nodes: Nodes, tmp_path: Path) -> Callable[[str], list[str]]:
    """Return a function that runs a driver on the head and returns its output lines."""

    def run(name: str) -> list[str]:
        done = nodes.run(sys.executable, str(WALKS), name, str(tmp_path / "said"))
        assert done.returncode == 0, done.stdout + done.stderr
        return (tmp_path / "said").read_text().splitlines()

    return run


def test_ray_provider_without_a_cluster_raises_with_the_remedy(tmp_path):
    """This test must run before a cluster starts, because Ray finds any cluster on this machine."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    output = tmp_path / "said"
    subprocess.run(
        (sys.executable, WALKS, "no_cluster", output), check=True, env={**os.environ, "RAY_ADDRESS": ""}
    )
    assert re.fullmatch(
        r"ray: no cluster can be reached from here \(.*\); use 'ray start.*\n", output.read_text()
    )


def test_each_agent_has_its_own_node_and_reports_its_end(walk):
    assert walk("spread") == [
        f"listening at {HEAD}",
        "agents on 10.77.0.1 10.77.0.2 10.77.0.3",
        "the agent ray-1 exited with code 3 without finishing",
        "the agent ray-2 was killed by SIGKILL",
        "held:",
    ]


def test_killed_agent_ends_and_releases_its_resources(walk):
    assert walk("killed") == [
        "ray-1 is lost: The actor is dead because it was killed by `ray.kill`. (from Ray)",
        "held:",
    ]


def test_agents_end_with_their_driver_before_the_peer_timeout(nodes, tmp_path):
    """When a driver exits, Ray ends the driver's actors, and the actors end their agents.

    The agents here do not watch their driver.
    """
    done = nodes.run(sys.executable, str(WALKS), "killed_driver", str(tmp_path / "said"))
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(word) for word in (tmp_path / "said").read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def test_error_names_the_host_if_its_python_lacks_flowchan(walk):
    assert walk("no_flowchan") == [
        f"the Python at {sys.executable} on ray-1 has no flowchan; "
        "install the same environment for Ray's workers"
    ]


def test_killed_node_is_reported_and_its_agent_moves_to_another(nodes, walk):
    (killed,) = walk("node_killed")
    nodes.start_again(killed)


def test_graph_continues_when_a_node_is_killed(nodes, walk):
    death, agents, held = walk("graph")
    assert re.fullmatch(r"ray-[12]: .*", death)
    assert (agents, held) == ("[1, 2]", "held:")
    nodes.start_again_all()

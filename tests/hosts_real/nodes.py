"""A Ray cluster of three nodes on this machine, each in its own network namespace.

Ray treats nodes with the same address as one node. ``ray stop`` is not used, because it ends processes by
name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from networks import HEAD, Networks
from servers import Servers, family_of
from support.waiting import wait_until

QUICKLY = (
    '{"health_check_initial_delay_ms":1000,"health_check_period_ms":500,"health_check_failure_threshold":3}'
)
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
# A token in ~/.ray enables authentication for the head, but not for the other nodes.
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
RAY = (sys.executable, "-m", "ray.scripts.scripts")


class Nodes:
    """Ray nodes, named after their namespaces; the first is the head, where drivers run."""

    def __init__(self) -> None:
        self._networks = Networks()
        self.names = self._networks.names
        self.address = self._networks.address
        # a short path, because Ray puts sockets in it
        self._folder = Path(tempfile.mkdtemp(prefix="flowchan-"))
        self._servers = Servers(self._folder)

    def start(self, name: str) -> None:
        """Start Ray on a node, and return when the node has joined."""
        address = self.address(name)
        command = [
            *RAY,
            "start",
            "--block",
            f"--node-ip-address={address}",
            "--num-cpus=2",
            "--disable-usage-stats",
        ]
        command.append(f"--object-store-memory={80 * 2**20}")
        if address == HEAD:
            command += ["--head", "--port=6379", "--include-dashboard=false"]
            command += [f"--temp-dir={self._folder / 'ray'}", f"--system-config={QUICKLY}"]
        else:
            command.append(f"--address={HEAD}:6379")
        self._servers.start(
            name, ("ip", "netns", "exec", name, *command), {**os.environ, **QUIET, **NO_TOKEN}
        )
        wait_until(
            lambda: "will now block forever" in self._servers.log(name), what=lambda: self._servers.log(name)
        )

    def raylet(self, address: str) -> psutil.Process:
        """Return the raylet process of the node with this address."""
        name = next(name for name in self.names if self.address(name) == address)
        return next(one for one in family_of(self._servers.pid(name)) if one.name() == "raylet")

    def start_again(self, address: str) -> None:
        """End the remaining processes of a node and start the node again."""
        name = next(name for name in self.names if self.address(name) == address)
        self._servers.end(name)
        (self._folder / f"{name}.log").unlink()
        self.start(name)

    def start_again_all(self) -> None:
        """Restart the nodes that have died."""
        for name in self.names:
            if not any(one.name() == "raylet" for one in family_of(self._servers.pid(name))):
                self.start_again(self.address(name))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a driver on the head."""
        return subprocess.run(
            ("ip", "netns", "exec", self.names[0], *command),
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, **QUIET, **NO_TOKEN},
        )

    def close(self) -> None:
        self._servers.close()
        self._networks.close()
        shutil.rmtree(self._folder)

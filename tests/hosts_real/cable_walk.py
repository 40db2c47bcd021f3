"""Run a graph over two other network namespaces; one of them loses its cable.

Usage: ``python cable_walk.py HEAD FIRST SECOND FOLDER``. The first worker on host FIRST that gets item ``AT``
pulls its host's cable; the driver prints the run's report.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from networks import HEAD
from pool_walks import run_over

from flowchan import worker
from flowchan.hosts.host_pool import pool_of
from flowchan.hosts.providers.child import AgentProcess
from flowchan.hosts.providers.provider import Launch


@dataclass(frozen=True)
class LaunchedElsewhere:
    """Provider with one agent in each of the namespaces ``hosts``."""

    hosts: tuple[str, ...]
    cores: None = None

    def listen_at(self) -> str:
        return HEAD

    def start(self, number: int, launch: Launch) -> AgentProcess:
        host = self.hosts[number]
        command = ("ip", "netns", "exec", host, sys.executable, *launch.arguments)
        return AgentProcess(host, command, launch, lambda code, output: f"{host} ended with code {code}")


def pull(head: str) -> None:
    """Silently drop all frames on this host's cable in both directions."""
    subprocess.run(("ip", "-n", head, "link", "set", "cable2", "nomaster"), check=True)


def main() -> None:
    head, *hosts, folder = sys.argv[1:]
    first = hosts[0]
    pool = pool_of("apart", LaunchedElsewhere(tuple(hosts)), peer_timeout=2)
    run = run_over(pool, Path(folder), partial(pull, head), lambda: worker().host == first)
    print(run.report())


if __name__ == "__main__":
    main()

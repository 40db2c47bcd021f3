"""Run a graph over two other network namespaces; one namespace loses its cable.

Usage: ``python cable_walk.py HEAD FIRST SECOND FOLDER``. The first worker on host FIRST that gets item ``AT``
pulls its host's cable. The driver prints the run's report.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from networks import HEAD
from pool_walks import run_over

from benchmarks.limited_hosts import Namespaces
from flowchan import worker
from flowchan.hosts.host_pool import pool_of


def pull(head: str) -> None:
    """Silently drop all frames on this host's cable, in both directions."""
    subprocess.run(("ip", "-n", head, "link", "set", "cable2", "nomaster"), check=True)


def main() -> None:
    head, *hosts, folder = sys.argv[1:]
    first = hosts[0]
    pool = pool_of("apart", Namespaces(tuple(hosts), HEAD), peer_timeout=2)
    run = run_over(pool, Path(folder), partial(pull, head), lambda: worker().host == first)
    print(run.report())


if __name__ == "__main__":
    main()

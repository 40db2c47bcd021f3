"""Measure the throughput of two stages across hosts with limited bandwidth. Needs root, ``ip`` and ``tc``.

Run it with ``python -m benchmarks.data_plane``. The hosts are simulated, so the size of the machine limits
their number.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from unittest import mock

from benchmarks.limited_hosts import Namespaces, limited_hosts
from flowchan import Graph
from flowchan.hosts import hosts_part
from flowchan.hosts.host_pool import pool_of

SIZE, RATE, ITEMS_PER_HOST = 1_000_000, 200, 60
"""Bytes per item, bandwidth limit of each connection in Mbit/s, and number of items per host."""
THROUGH_DRIVER, DIRECT = "through the driver", "direct"


def make(number: int) -> bytes:
    return bytes(SIZE)


def main() -> None:
    """Print the throughput for 2, 4 and 8 hosts, with and without direct transfers between hosts."""
    if sys.argv[1:2] == ["inside"]:
        print(json.dumps(measure(sys.argv[2], tuple(sys.argv[3:]))))
        return
    if os.geteuid():
        sys.exit("network namespaces need root")
    print(f"Mbit/s of {SIZE:,} B items from one stage to the next; each wire carries {RATE} Mbit/s")
    for count in (2, 4, 8):
        with limited_hosts(count, f"{RATE}mbit") as (head, *hosts):
            for way in (THROUGH_DRIVER, DIRECT):
                command = ("ip", "netns", "exec", head, sys.executable, "-m", "benchmarks.data_plane")
                done = subprocess.run((*command, "inside", way, *hosts), check=True, capture_output=True)
                rate = json.loads(done.stdout)
                print(f"{count} hosts, {way}: {rate:.0f} Mbit/s, {rate / RATE:.2f} wires", flush=True)


def measure(way: str, hosts: tuple[str, ...]) -> float:
    """Return the throughput in Mbit/s. The first quarter of the items is not measured."""
    if way == THROUGH_DRIVER:
        mock.patch.object(hosts_part, "keeps_outputs", return_value=False).start()
    items = ITEMS_PER_HOST * (1 if way == THROUGH_DRIVER else len(hosts))
    pool, graph = pool_of("limited", Namespaces(hosts)), Graph("chain")
    made = graph.source(range(items)).map(make, on=pool, workers=len(hosts), ordered=False)
    sizes = made.map(len, on=pool, workers=len(hosts), ordered=False).collect()
    with graph.start() as run:
        times = [time.perf_counter() for _ in run.iter(sizes)]
    first = items // 4
    return (items - 1 - first) * SIZE * 8 / 1e6 / (times[-1] - times[first])


if __name__ == "__main__":
    main()

"""A group whose members are in three networks: they share memory where they can, and learn of a cut cable."""

from __future__ import annotations

import subprocess
import sys

from networks import HEAD, Networks, ip

RANK = """
import sys
import numpy as np
from flowchan import MemberDied, collective

rank, address = int(sys.argv[1]), sys.argv[2]
with collective.group(rank=rank, size=4, at=address, secret=b"only members know it") as g:
    x = np.full(500_000, g.rank, np.float32)
    g.allreduce(x)
    print(g.allgather(g.rank), x.min(), x.max(), g.explain("barrier").rpartition("; ")[2], flush=True)
    try:
        while True:
            g.allreduce(x, op="mean")
    except MemberDied as died:
        print(died.ranks, flush=True)
"""


def test_a_group_over_three_networks_is_told_when_one_loses_its_cable(networks: Networks) -> None:
    head, first, second = networks.names
    ranks = [
        subprocess.Popen(
            ("ip", "netns", "exec", where, sys.executable, "-c", RANK, str(rank), f"{HEAD}:4711"),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, where in enumerate((head, head, first, second))
    ]
    for one in ranks:
        assert one.stdout is not None
        said = one.stdout.readline()
        assert (
            said == "[0, 1, 2, 3] 6.0 6.0 over connections between the 3 hosts' leaders, all that each has\n"
        )
    ip(f"-n {head} link set cable3 down")
    found = [one.communicate()[0] for one in ranks]
    assert found[:3] == ["(3,)\n"] * 3
    assert all(one.returncode == 0 for one in ranks)

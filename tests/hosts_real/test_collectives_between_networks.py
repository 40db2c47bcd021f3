"""Test groups whose members are in three networks: they share memory where possible and notice a cut
cable."""

from __future__ import annotations

import subprocess
import sys

from networks import HEAD, Networks, ip


def start(program: str, where: str, rank: int) -> subprocess.Popen[str]:
    command = ("ip", "netns", "exec", where, sys.executable, "-c", program, str(rank), f"{HEAD}:4711")
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


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


UNLIKE = """
import sys
import numpy as np
from flowchan import collective

rank, address = int(sys.argv[1]), sys.argv[2]
with collective.group(rank=rank, size=3, at=address, secret=b"only members know it") as g:
    if rank == 0:
        print(g.explain("allreduce_with").rpartition(": ")[2])
    total, count = g.allreduce_with(np.full(1_000_000, g.rank + 1.0), np.add)
    assert count == 3 and total.min() == total.max() == 6, (count, total.min(), total.max())
    slow = g.stats().get(2 - rank)
    print(slow and slow.sent + slow.received < 10_000)
"""


def test_slow_route_between_two_networks_is_avoided(networks: Networks) -> None:
    """The data that the middle member forwards arrives intact."""
    head, _, second = networks.names
    names = networks.names
    networks.slow_link(head, second, "20mbit")
    ranks = [start(UNLIKE, where, rank) for rank, where in enumerate(names)]
    assert [one.communicate()[0] for one in ranks] == ["0 to 1, 1 to 2\nTrue\n", "None\n", "True\n"]


def test_group_names_the_member_with_the_cut_network_cable(networks: Networks) -> None:
    head, first, second = networks.names
    ranks = [start(RANK, where, rank) for rank, where in enumerate((head, head, first, second))]
    for one in ranks:
        assert one.stdout is not None
        output = one.stdout.readline()
        assert (
            output
            == "[0, 1, 2, 3] 6.0 6.0 over connections between the 3 hosts' leaders, one word from each host\n"
        )
    ip(f"-n {head} link set cable3 down")
    found = [one.communicate()[0] for one in ranks]
    assert found[:3] == ["(3,)\n"] * 3
    assert all(one.returncode == 0 for one in ranks)

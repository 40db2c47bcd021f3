"""Kill a member of a group at any point of any operation, and compare the survivors.

Either all survivors complete the operation with the right result, or all report that it is impossible. The
survivors agree even after two deaths at once, and after another thread has closed the member.
``group_walk.cpp`` kills the member at every fault point with ``--long``, otherwise at every fifth.
"""

from __future__ import annotations

import pytest
from building import program, run

pytestmark = pytest.mark.timeout(600)  # the first test may have to compile the program for all tests

OPERATIONS = (
    "barrier",
    "allreduce in one line",
    "allreduce by exchange",
    "allreduce by slices",
    "reduce_scatter",
    "direct broadcast",
    "direct allgather, uneven",
    "direct alltoall",
    "broadcast by chunks",
    "allgather by chunks",
    "alltoall by chunks",
)


@pytest.mark.parametrize("who", ["the first", "the last", "two"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_survivors_agree_when_members_die_at_any_point(long_walk: bool, operation: str, who: str) -> None:
    dies = {"the first": "0", "the last": "2", "two": "3"}[who]
    every = "1" if long_walk else "5"
    done = run(program("plain/group_walk"), str(OPERATIONS.index(operation)), "3", dies, every, "dies")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    "operation", ["barrier", "allreduce by slices", "direct broadcast", "direct alltoall"]
)
def test_other_members_agree_when_a_member_closes_at_any_point(long_walk: bool, operation: str) -> None:
    every = "1" if long_walk else "3"
    done = run(program("plain/group_walk"), str(OPERATIONS.index(operation)), "3", "0", every, "closes")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"

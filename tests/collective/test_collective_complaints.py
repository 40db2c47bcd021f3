"""What users of other libraries complain about when processes work together, and the tests that show how it
is here. Each complaint is mapped to tests by ``file::name``, which are checked to exist. The test at the end
shows what no other test does."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from support.listed_tests import there_is

TESTS = Path(__file__).parents[1]

COMPLAINTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "torchtitan#1790, returnn#1484": (
        "a rank dies, and the others hang",
        (
            "native/test_group_walk.py::test_death_at_any_point_has_one_outcome_for_all",
            "collective/test_linked_groups.py::test_a_death_is_told_on_all_hosts",
        ),
    ),
    "nccl#1417": (
        "different shapes hang, or give wrong sums",
        (
            "collective/test_group_failures.py::test_calls_that_do_not_match_raise_on_all_sides_and_name_them_all",
            "collective/test_calls_that_differ.py::test_other_operations_and_other_roots_raise_and_name_both_sides",
        ),
    ),
    "horovod#2564": (
        "stalls say nothing",
        (
            "collective/test_group_failures.py::test_a_stall_is_told_once",
            "collective/test_group_failures.py::test_a_timeout_names_who_is_absent_and_what_it_did_last",
        ),
    ),
    "pytorch#38174": (
        "an uneven last batch hangs",
        (
            "collective/test_combining.py::test_all_have_the_same_after_every_round_until_all_have_run_out",
            "forerunners/test_torch_ipc_trees.py::test_uneven_number_of_steps",
        ),
    ),
    "ray#36317": (
        "a barrier gives up on a slow rank",
        ("collective/test_linked_groups.py::test_only_a_time_out_that_was_given_ends_a_wait",),
    ),
    "ray#60670, #50132": (
        "a rendezvous is stale, or two of them race",
        (
            "collective/test_group_meeting.py::test_two_jobs_at_once_do_not_mix",
            "collective/test_group_meeting.py::test_who_joins_just_when_rank_0_is_killed_joins_the_next_one",
        ),
    ),
    "pytorch#150798, #145965, vllm#4440": (
        "collectives of objects are slow, for their sizes are told as tensors on a device first",
        (
            "collective/test_ways.py::test_only_values_of_built_in_types_are_written_without_a_pickle",
            "collective/test_operations.py::test_gather_scatter_and_alltoall_take_arrays_and_values_of_any_size",
        ),
    ),
    "nccl#342, #853": (
        "64 MB of /dev/shm end in a bus error",
        ("collective/test_collective_complaints.py::test_where_no_memory_is_left_all_hear_so_and_go_on",),
    ),
    "pytorch#75097": (
        "the end of a group hangs or warns",
        (
            "collective/test_group_failures.py::test_many_groups_leave_nothing_whatever_the_order_of_their_ends",
        ),
    ),
    "gloo#458": (
        "shared memory is chosen by an environment variable",
        ("collective/test_linked_groups.py::test_how_an_operation_is_done_is_said",),
    ),
}


@pytest.mark.parametrize("source", COMPLAINTS)
def test_each_complaint_of_collectives_has_its_tests(source: str) -> None:
    for name in COMPLAINTS[source][1]:
        assert there_is(name), name


WITHOUT_MEMORY = """
import errno, sys, threading
sys.path.insert(0, sys.argv[1])
import numpy as np, seccomp
from flowchan.collective import members

def work(seat):
    with seat as g:
        try:
            g.allreduce(np.ones(1 << 20))
        except MemoryError as error:
            found.append(str(error))
        found.append(g.allreduce(1))

found = []
threads = [threading.Thread(target=work, args=(seat,)) for seat in members(2, name="full")]
seccomp.refuse("fallocate", errno.ENOSPC)
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*sorted(found, key=str), sep="\\n")
"""


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="system calls are refused by their numbers on x86-64"
)
def test_where_no_memory_is_left_all_hear_so_and_go_on() -> None:
    """As in a container with 64 MB of shared memory: what does not fit is refused when it is reserved."""
    command = [sys.executable, "-c", WITHOUT_MEMORY, str(TESTS / "refused")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    why = "there is no shared memory for allreduce of group 'full'"
    assert ended.stdout.splitlines() == ["2", "2", why, why], ended.stderr

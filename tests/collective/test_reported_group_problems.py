"""Problems that users of other libraries reported, and the tests of the same situations in flowchan.

Each problem lists its tests as ``file::name``, and this file checks that these tests exist. The last test
covers a problem that no other file tests.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from support.listed_tests import is_listed_test

TESTS = Path(__file__).parents[1]

COMPLAINTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "torchtitan#1790, returnn#1484": (
        "the other ranks hang after one has died",
        (
            "native/test_group_walk.py::test_survivors_agree_when_members_die_at_any_point",
            "collective/test_linked_groups.py::test_death_raises_on_all_hosts",
        ),
    ),
    "nccl#1417": (
        "calls with different shapes hang or return wrong sums",
        (
            "collective/test_group_failures.py::test_mismatch_lists_the_calls_of_all_members",
            "collective/test_calls_that_differ.py::test_different_operations_or_roots_raise_mismatch",
        ),
    ),
    "horovod#2564": (
        "a stall is not reported",
        (
            "collective/test_group_failures.py::test_stall_is_logged_once",
            "collective/test_group_failures.py::test_timeout_names_absent_member_and_its_last_operation",
        ),
    ),
    "pytorch#38174": (
        "ranks hang if only some have a last batch",
        (
            "collective/test_combining.py::test_members_combine_values_until_the_last_member_has_none",
            "forerunners/test_torch_ipc_trees.py::test_uneven_number_of_steps",
        ),
    ),
    "ray#36317": (
        "a barrier fails because a rank is slow",
        ("collective/test_linked_groups.py::test_waiting_call_ends_only_at_its_own_timeout",),
    ),
    "ray#60670, #50132": (
        "a rendezvous uses stale data or races with another one",
        (
            "collective/test_group_rendezvous.py::test_concurrent_jobs_form_separate_groups",
            "collective/test_group_rendezvous.py::test_member_joins_next_group_if_rank_0_is_killed",
        ),
    ),
    "pytorch#150798, #145965, vllm#4440": (
        "collectives on objects are slow, because their sizes are first sent as device tensors",
        (
            "collective/test_algorithms.py::test_only_built_in_types_are_sent_without_pickle",
            "collective/test_operations.py::test_gather_scatter_and_alltoall_accept_any_size",
        ),
    ),
    "nccl#342, #853": (
        "a /dev/shm of only 64 MB causes a bus error",
        ("collective/test_reported_group_problems.py::test_group_stays_usable_after_memory_error",),
    ),
    "pytorch#75097": (
        "closing a group hangs or prints a warning",
        ("collective/test_group_failures.py::test_groups_free_all_resources_in_any_close_order",),
    ),
    "gloo#458": (
        "shared memory must be enabled with an environment variable",
        ("collective/test_linked_groups.py::test_explain_describes_operations_across_hosts",),
    ),
}


@pytest.mark.parametrize("source", COMPLAINTS)
def test_each_reported_problem_lists_existing_tests(source: str) -> None:
    for name in COMPLAINTS[source][1]:
        assert is_listed_test(name), name


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
    platform.machine() != "x86_64", reason="the test blocks system calls by their x86-64 numbers"
)
def test_group_stays_usable_after_memory_error() -> None:
    """An allocation that does not fit fails early, as in a container with 64 MB of shared memory."""
    command = [sys.executable, "-c", WITHOUT_MEMORY, str(TESTS / "refused")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    why = "allreduce of group 'full' failed: the system granted no more shared memory; free some memory"
    assert ended.stdout.splitlines() == ["2", "2", why, why], ended.stderr

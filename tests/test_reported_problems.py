"""Complaints from users of other systems, and the tests that answer them.

The list comes from the survey with which the project began, and uses the survey's numbers. The list contains
issues from Ray, Monarch, pypeln, CPython, PyTorch, joblib and other projects. Each complaint maps to tests by
``file::name``, which must exist, or to the reason why it does not apply yet. The tests at the end of this
file cover the remaining complaints.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.listed_tests import is_listed_test

from flowchan import Channel, Graph

LATER = "later: "
"""Prefix of a reason why the existing features cannot answer a complaint yet."""

COMPLAINTS: dict[int, tuple[str, str | tuple[str, ...]]] = {
    1: (
        "resizing channels kept old buffers",
        (
            "run/test_residue.py::test_thousand_channels_leak_no_resources",
            "run/test_residue.py::test_many_runs_leak_no_resources",
        ),
    ),
    2: (
        "channel memory not collected after teardown",
        (
            "run/test_residue.py::test_each_way_to_end_a_run_releases_all_resources",
            "test_reported_problems.py::test_run_releases_its_memory_without_the_garbage_collector",
        ),
    ),
    3: (
        "keeping a returned array blocks the next run",
        (
            "run/test_large_items.py::test_r8_results_stay_valid_after_the_run",
            "contract/test_arrays.py::test_views_stay_valid_after_port_and_channel_are_gone",
        ),
    ),
    4: (
        "dropping one of two outputs leaks or stalls the other",
        (
            "run/test_early_end.py::test_ended_branch_of_a_tee_does_not_affect_the_others",
            "run/test_early_end.py::test_ended_branch_of_a_partition_does_not_affect_the_others",
        ),
    ),
    5: (
        "teardown depends on garbage collection",
        (
            "test_reported_problems.py::test_run_releases_its_memory_without_the_garbage_collector",
            "run/test_residue.py::test_run_with_a_dropped_handle_does_not_delay_the_exit",
        ),
    ),
    6: (
        "a consumer waits for ever after a retried generator",
        (
            "run/test_operators_per_item.py::test_retry_of_flat_map_does_not_repeat_outputs",
            "deaths/test_exactly_once.py::test_c11_flat_map_killed_between_outputs_repeats_nothing",
            "run/test_explain.py::test_tee_with_branches_that_wait_for_each_other_is_detected",
        ),
    ),
    7: (
        "memory held after Ctrl-C",
        ("run/test_program_exits.py::test_every_kind_of_exit_leaves_no_resources_behind",),
    ),
    8: ("a queue far slower than plain IPC", LATER + "speed is measured by `make bench`, never asserted"),
    9: (
        "a small /dev/shm: refusal, slow fallback, or SIGBUS",
        (
            "check/test_check.py::test_channels_larger_than_memory_are_reported_with_both_sizes",
            "test_reported_problems.py::test_unavailable_memory_raises_at_the_call",
            "channel/test_damage.py::test_channel_memory_cannot_be_truncated",
        ),
    ),
    10: (
        "processes stay after a notebook run",
        ("run/test_program_exits.py::test_graph_with_notebook_functions_leaves_no_processes_behind",),
    ),
    11: (
        "Ctrl-C needs repeating or prints several stack traces",
        (
            "run/test_stop_signals.py::test_first_stop_signal_finishes_items_in_flight",
            "run/test_program_exits.py::test_every_kind_of_exit_leaves_no_resources_behind",
        ),
    ),
    12: (
        "no clean stop; a crash while stopping",
        (
            "run/test_stop.py::test_stop_of_an_ended_run_does_nothing",
            "run/test_stop.py::test_abort_after_a_stop_breaks_at_once",
        ),
    ),
    13: (
        "an error in a stage and a full input queue hang",
        (
            "run/test_failure.py::test_failure_ends_workers_that_wait_for_their_channels",
            "contract/test_abort.py::test_every_waiting_writer_raises_broken_from_the_cause",
        ),
    ),
    14: (
        "an exception is swallowed; errors of sources are lost",
        (
            "run/test_failure.py::test_first_failure_is_listed_first",
            "run/test_failure.py::test_source_that_raises_midway_fails_the_run",
            "run/test_failure.py::test_failure_names_stage_item_and_worker_and_keeps_the_exception",
        ),
    ),
    15: (
        "an unpicklable lambda gives a silently empty list",
        (
            "run/test_start_methods.py::test_lambdas_and_closures_work_with_every_start_method",
            "check/test_check_values.py::test_unpicklable_value_is_named",
        ),
    ),
    16: (
        "put succeeds and pickling fails later in a hidden thread",
        ("contract/test_bad_input.py::test_put_of_an_unpicklable_item_names_the_part",),
    ),
    17: (
        "a killed worker dies with the lock of the queue",
        ("native/test_fault_walk.py::test_c11_death_at_any_step_does_not_affect_other_processes",),
    ),
    18: (
        "the same, found by an eight-day soak in the field",
        ("deaths/test_soak.py::test_c11_random_kills_in_random_graphs_lose_and_repeat_nothing",),
    ),
    19: (
        "orphans when the parent is killed; false leak warnings",
        (
            "run/test_residue.py::test_workers_of_a_killed_program_end",
            "run/test_program_exits.py::test_every_kind_of_exit_leaves_no_resources_behind",
        ),
    ),
    20: (
        "the tracker of one process unlinks another's segment",
        (
            "channel/test_children.py::test_script_that_leaves_channels_open_exits_cleanly",
            "run/test_program_exits.py::test_every_kind_of_exit_leaves_no_resources_behind",
        ),
    ),
    21: (
        "descriptors run out with an obscure message",
        ("test_reported_problems.py::test_channel_error_names_the_descriptor_limit_when_reached",),
    ),
    22: (
        "CUDA IPC memory is never freed",
        (
            "contract/test_device_tensors.py::test_blocks_are_reused_once_their_items_are_gone",
            "contract/test_device_tensors.py::test_receiver_opens_memory_once_for_many_tensors_without_waiting",
            "contract/test_device_tensors.py::test_c11_item_and_memory_of_a_killed_receiver_are_returned",
        ),
    ),
    23: (
        "workers survive because they inherited both ends of a pipe",
        (
            "contract/test_port_deaths.py::test_killing_the_last_writer_breaks_the_channel",
            "run/test_residue.py::test_workers_of_a_killed_program_end",
            "run/test_nested_graphs.py::test_graph_inside_a_killed_worker_ends_with_the_worker",
        ),
    ),
    24: (
        "an agent orphans its workers, or waits for ever on one that can't be ended",
        (
            "run/test_stop.py::test_abort_ends_workers_that_ignore_sigterm",
            "run/test_stop.py::test_abort_abandons_threads_that_cannot_be_interrupted",
        ),
    ),
    25: (
        "killing a whole tree killed the daemon and itself",
        (
            "run/test_program_exits.py::test_worker_that_dies_after_its_forkserver_is_replaced_or_reported",
            "contract/test_fork.py::test_child_forked_during_a_run_does_not_affect_the_run",
        ),
    ),
    26: (
        "forkserver as the default breaks closures",
        (
            "run/test_start_methods.py::test_objects_from_main_work_in_a_script",
            "run/test_start_methods.py::test_lambdas_and_closures_work_with_every_start_method",
        ),
    ),
    27: (
        "functions of a notebook can't be found by spawned workers",
        (
            "run/test_start_methods.py::test_objects_from_main_work_in_code_run_by_exec",
            "run/test_program_exits.py::test_graph_with_notebook_functions_leaves_no_processes_behind",
        ),
    ),
    28: (
        "a child killed for lack of memory: the parent hangs silently",
        ("run/test_death.py::test_killed_worker_is_reported_with_its_signal",),
    ),
    29: (
        "a hang at exit; a killed worker is noticed after minutes",
        (
            "run/test_death.py::test_worker_killed_while_waiting_for_an_item_is_reported",
            "run/test_residue.py::test_workers_end_if_the_program_does_not_wait",
        ),
    ),
    30: (
        "users forget to close ends",
        (
            "contract/test_ports.py::test_dropping_a_port_closes_it",
            "run/test_run_handle.py::test_leaving_the_with_block_closes_the_inputs_and_waits",
        ),
    ),
    31: (
        "a hang at exit; messages lost though they should linger",
        (
            "contract/test_close.py::test_items_put_before_the_close_stay_readable",
            "contract/test_close.py::test_put_after_close_raises_closed_and_puts_nothing",
        ),
    ),
    32: (
        "spinning readers burn cores",
        LATER + "CPU seconds per million items are told by `make bench`, not asserted",
    ),
    33: (
        "pipelines hang at their start, in a deadlock, or at exit",
        (
            "check/test_check.py::test_cycle_is_reported_with_its_stages_in_order",
            "run/test_explain.py::test_general_stages_that_wait_for_each_other_are_detected",
            "run/test_program_exits.py::test_every_kind_of_exit_leaves_no_resources_behind",
        ),
    ),
    34: (
        "a collective's timeout does not say which rank",
        ("collective/test_group_failures.py::test_timeout_names_absent_member_and_its_last_operation",),
    ),
    35: (
        "innocent tasks are blamed for a death",
        ("deaths/test_exactly_once.py::test_r4_only_the_poison_item_is_blamed",),
    ),
    36: (
        "shared-memory allreduce: memory order, threads, groups",
        (
            "native/test_group_walk.py::test_survivors_agree_when_members_die_at_any_point",
            "model/test_protocol_model.py::test_protocol_model_holds_in_an_exhaustive_search",
            "collective/test_group_failures.py::test_groups_free_all_resources_in_any_close_order",
        ),
    ),
    37: (
        "slow wake-ups",
        LATER + "p50, p99 and p99.9 of wake-ups are published by `make bench`, not asserted",
    ),
    38: (
        "a launcher hides the real cause",
        ("cli/test_cli_launch.py::test_last_line_names_the_rank_that_failed_first",),
    ),
}


def named() -> Iterator[tuple[int, str]]:
    for number, (_, answer) in COMPLAINTS.items():
        if isinstance(answer, tuple):
            yield from ((number, test) for test in answer)


def test_every_complaint_has_tests_or_is_postponed() -> None:
    assert list(COMPLAINTS) == list(range(1, 39))
    for text, answer in COMPLAINTS.values():
        assert text
        assert answer
        assert isinstance(answer, tuple) or answer.startswith(LATER)


@pytest.mark.parametrize(("number", "test"), list(named()))
def test_every_listed_test_exists(number: int, test: str) -> None:
    assert is_listed_test(test)


# complaints that no other test covers


def test_run_releases_its_memory_without_the_garbage_collector() -> None:
    def memory() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:flowchan")

    graph = Graph("collected")
    result = graph.source(range(20), on="process").map(str, on="process", workers=2).collect()
    gc.collect()
    before = memory()
    gc.disable()
    try:
        assert graph.run()[result] == [str(number) for number in range(20)]
        assert memory() == before
    finally:
        gc.enable()


def test_channel_error_names_the_descriptor_limit_when_reached() -> None:
    def used() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = used()
    channels = [Channel(4, across="processes") for _ in range(10)]
    for ch in channels:
        ch.put(1)
    assert used() == before + 20
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_one = os.dup(0)
    os.close(next_one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
    try:
        with pytest.raises(OSError, match="Too many open files") as caught:
            channels.append(Channel(4, across="processes"))
        assert caught.value.errno == errno.EMFILE
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [ch.get() for ch in channels] == [1] * 10


def test_unavailable_memory_raises_at_the_call() -> None:
    """A limit on the child's address space causes the error. This channel and others continue to work."""
    pid = os.fork()
    if pid == 0:  # the limit must not apply to other tests
        code = 1
        try:
            ch: Channel[bytes] = Channel(8, across="processes", max_bytes=1 << 30)
            large = bytes(64 << 20)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
            with pytest.raises(MemoryError, match="no shared memory for an item of 67108864 bytes"):
                ch.put(large)
            channels: list[Channel[int]] = []
            with pytest.raises(OSError, match="Cannot allocate memory"):
                channels.extend(Channel(8, across="processes") for _ in range(1000))
            ch.put(b"next")
            code = 0 if ch.get() == b"next" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

"""Test the errors of a group whose members die, leave, are late, or make different calls.

tests/native/test_group_walk.py checks that all survivors agree after a death at any point.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from support.group_members import Processes, in_threads, over_hosts, raised
from support.waiting import wait_until

from flowchan import Channel, collective
from flowchan.errors import GroupError, MemberDied, MemberLeft, Mismatch


def test_all_survivors_name_a_killed_member() -> None:
    """The member dies during operations of the group, sometimes in the middle of a large operation."""

    def body(g: Any) -> Any:
        x = np.ones(500_000, np.float32)
        for number in range(10**9):
            if g.rank == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                g.allreduce(x)
            except MemberDied as died:
                return number, died.ranks, died.operation, str(died)
        return None

    found = Processes(3, body).results(2)
    assert found[0][:3] == found[2][:3] == (3, (1,), "allreduce")
    assert "rank 1" in found[0][3]
    assert "died after allreduce (operation 3)" in found[0][3]


def test_every_call_raises_after_a_death() -> None:
    def body(g: Any) -> Any:
        if g.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        errors = []
        for call in (g.barrier, lambda: g.allgather(1), lambda: g.allreduce(np.ones(3)), lambda: g.split(0)):
            with pytest.raises(MemberDied) as info:
                call()
            errors.append(info.value.ranks)
        return errors

    assert Processes(2, body).results(1) == {1: [(0,)] * 4}


def test_death_during_split_raises_member_died(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def body(g: Any) -> Any:
        g.barrier()
        if g.rank == 1:
            monkeypatch.setattr(type(g), "_take_slot", die)
        with pytest.raises(MemberDied) as died, g.split(0) as part:
            part.barrier()
        return died.value.ranks

    assert Processes(3, body).results(2) == {0: (1,), 2: (1,)}


def test_member_left_names_the_member_that_closed() -> None:
    def body(g: Any) -> Any:
        total = g.allreduce(1)
        if g.rank == 1:
            g.close()
            g.close()
            with pytest.raises(GroupError, match="was closed"):
                g.barrier()
            return total
        with pytest.raises(MemberLeft, match=r"rank 1 .*has left"):
            g.barrier()
        return total

    assert in_threads(2, body) == [2, 2]


def barriers(g: Any) -> None:
    while True:
        g.barrier()


def test_signal_handler_can_close_the_group_it_interrupts() -> None:
    def body(g: Any) -> None:
        if g.rank == 1:
            wait_until(lambda: bool(g._see(0)[4]))
            os.kill(g._see(0)[0], signal.SIGUSR1)
            with pytest.raises(MemberLeft, match=r"rank 0 .*has left"):
                barriers(g)
            return
        signal.signal(signal.SIGUSR1, lambda *_: g.close())
        with pytest.raises(GroupError, match="was closed"):
            barriers(g)

    assert Processes(2, body).results(2) == {0: None, 1: None}


def test_signal_handler_can_use_another_group() -> None:
    """Data for the other group must not reach this group."""

    def body(g: Any) -> list[str]:
        if g.rank == 1:
            wait_until(lambda: bool(g._see(0)[4]))
            for _ in range(20):  # the first signal may arrive before the thread is waiting
                os.kill(g._see(0)[0], signal.SIGUSR1)
                called.get(timeout=60)
            g.barrier()
            return g.allgather("of 1")
        [alone] = collective.members(1)
        signal.signal(signal.SIGUSR1, lambda *_: called.put(alone.allgather("of the handler")))
        first = threading.Thread(target=g.barrier)
        first.start()
        wait_until(lambda: bool(g._see(0)[4]))
        found = g.allgather("of 0")
        first.join()
        return found

    called: Channel[Any] = Channel(2, across="processes")
    assert Processes(2, body).results(2) == {0: ["of 0", "of 1"], 1: ["of 0", "of 1"]}


def test_member_that_is_garbage_collected_counts_as_having_left() -> None:
    """The member leaves at once, even if it has operations in progress."""
    first, second = collective.members(2)
    handle = first.barrier(wait=False)
    second.barrier(wait=False).wait()
    handle.wait()
    del second, handle
    with pytest.raises(MemberLeft, match=r"rank 1 .*has left"):
        first.barrier()
    first.close()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (lambda g: g.allreduce(np.ones(3)), lambda g: g.allreduce(np.ones(4)), "allreduce(float64[3])"),
        (lambda g: g.reduce(np.ones(4)), lambda g: g.reduce(np.ones((2, 2))),
         "reduce(float64[2, 2], 0, 'sum')"),
        (lambda g: g.allreduce(np.ones(3)), lambda g: g.allreduce(np.ones(3, "f")), "allreduce(float32[3])"),
        (lambda g: g.allreduce(np.ones(3)), lambda g: g.allreduce(np.ones(3), "max"), "'max'"),
        (lambda g: g.allreduce(np.ones(10**6)), lambda g: g.barrier(), "barrier()"),
        (lambda g: g.broadcast(np.ones(3)), lambda g: g.allgather(np.ones(3)), "broadcast(float64[3], 0)"),
        (lambda g: g.allgather(1), lambda g: g.allgather(np.ones(3)), "allgather(int)"),
        (lambda g: g.allreduce(1), lambda g: g.allgather(1), "allgather(int)"),
    ],
)  # fmt: skip
def test_mismatch_lists_the_calls_of_all_members(first: Any, second: Any, message: str) -> None:
    """The group stays usable after the error."""

    def body(g: Any) -> Any:
        with pytest.raises(Mismatch) as info:
            (first if g.rank == 0 else second)(g)
        return str(info.value), g.allreduce(g.rank)

    found = in_threads(3, body)
    assert found[0] == found[1] == found[2]
    assert message in found[0][0]
    assert "rank 0 called" in found[0][0]
    assert "rank 2 called" in found[0][0]
    assert found[0][1] == 3


@pytest.mark.parametrize("where", [in_threads, over_hosts])
@pytest.mark.parametrize("size", [2, 3])
def test_unexpected_part_sizes_raise_mismatch(where: Any, size: int) -> None:
    """Even members whose own parts have the right size get the error, on one host and on several hosts."""

    def body(g: Any) -> Any:
        out = [np.empty(3 + (g.rank == 1 and not source)) for source in range(size)]
        with pytest.raises(Mismatch, match="alltoall"):
            g.alltoall([np.ones(3)] * size, out=out)
        return g.allreduce(1)

    assert raised(where(size, body)) == [size] * size


def test_timeout_names_absent_member_and_its_last_operation() -> None:
    arrived = threading.Event()

    def body(g: Any) -> Any:
        g.allreduce(np.ones(3))
        if g.rank == 1:
            arrived.wait()
            g.barrier()  # rank 0 had already called this barrier
            with pytest.raises(MemberDied, match=r"rank 0 .*gave up in barrier \(operation 2\)"):
                g.barrier()
            return None
        with pytest.raises(TimeoutError, match=r"rank 1 .* after allreduce \(operation 1\)"):
            g.barrier(timeout=0.05)
        arrived.set()
        with pytest.raises(TimeoutError, match="failed earlier"):
            g.barrier()
        return None

    assert in_threads(2, body) == [None, None]


def test_stall_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A stall is only logged, because an operation without ``timeout`` may take any time."""
    first, second = collective.members(2)
    with first, second, caplog.at_level(logging.WARNING, "flowchan.collective"):
        handle = first.barrier(wait=False)
        wait_until(lambda: first._see(0)[4])
        first._stalled(1, 10.0)
        second.barrier()
        handle.wait()
    message = (
        f"barrier of a group of 2 has been waiting 10 s for these members: rank 1 (process {os.getpid()})"
    )
    assert message in caplog.text


STALL = """
from flowchan import Graph, collective
first, second = collective.members(2)
first._stalled(1, 10.0)
"""


def test_stall_is_printed_if_logging_is_not_configured() -> None:
    """The message tells the user why the program is waiting."""
    ended = subprocess.run([sys.executable, "-c", STALL], capture_output=True, text=True, timeout=300)
    assert ended.stderr.startswith("barrier of a group of 2 has been waiting 10 s for these members: ")


WAITS = """
import os, signal, sys, threading
from flowchan import Channel, collective
import numpy as np
first, second = collective.members(2)
calls = {
    "barrier": lambda: first.barrier(),
    "allreduce": lambda: first.allreduce(np.ones(10**6)),
    "handle": lambda: first.allreduce(np.ones(10), wait=False).wait(),
    "value": lambda: first.allgather({}),
    "order": lambda: (first.barrier(wait=False), first.allreduce(np.ones(3))),
}

def interrupt():
    while not first._see(0)[4]:  # until it runs an operation
        threading.Event().wait(0.001)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    with first:
        calls[sys.argv[1]]()
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("call", ["barrier", "allreduce", "handle", "value", "order"])
def test_ctrl_c_interrupts_every_waiting_call(call: str) -> None:
    done = subprocess.run([sys.executable, "-c", WAITS, call], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr


def test_use_of_a_member_in_a_second_process_raises() -> None:
    first, second = collective.members(2)
    first._take_slot()
    pid = os.fork()
    if pid == 0:
        try:
            first.barrier()
        except GroupError as error:
            os._exit(0 if "used by another process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with pytest.raises(TypeError, match="before its first use"):
        first.__reduce__()
    first.close()
    second.close()


def test_invalid_argument_raises_only_on_the_calling_member() -> None:
    (g,) = collective.members(1)
    with g:
        for call in (
            lambda: g.allreduce(np.ones(3), op="median"),
            lambda: g.broadcast(np.ones(3), root=1),
            lambda: g.reduce(np.ones(3), root=-1),
            lambda: g.scatter([1, 2]),
            lambda: g.alltoall([]),
            lambda: g.allreduce(np.ones(3), out=np.ones(4)),
            lambda: g.allreduce(np.ones(3), timeout=-1),
        ):
            with pytest.raises(ValueError, match=r"must|takes"):
                call()
        with pytest.raises(TypeError, match="int64 cannot be combined by mean"):
            g.allreduce(np.ones(3, int), op="mean")
        frozen = np.ones(3)
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            g.allreduce(frozen)


def test_groups_free_all_resources_in_any_close_order() -> None:
    """The leak fixture checks descriptors, mappings and threads."""
    groups = [collective.members(3) for _ in range(20)]
    for number, made in enumerate(groups):
        for member in made if number % 2 else reversed(made):
            member._take_slot()
            if number % 3:
                member.close()
    del groups, made, member


def test_death_is_noticed_while_another_member_is_slow() -> None:
    """The waiting member notices the death before the slow member arrives."""
    reported = threading.Event()
    first, second, third = collective.members(3)
    pid = os.fork()
    if pid == 0:
        third._take_slot()
        os._exit(0)
    second._take_slot()
    found: list[BaseException] = []

    def wait() -> None:
        try:
            with first:
                first.barrier()
        except MemberDied as died:
            found.append(died)
        reported.set()

    thread = threading.Thread(target=wait)
    thread.start()
    os.waitpid(pid, 0)
    wait_until(reported.is_set)
    thread.join()
    second.close()
    third.close()
    assert [died.ranks for died in found] == [(2,)]  # type: ignore[attr-defined]


def test_member_killed_before_joining_counts_as_dead() -> None:
    """The member counts as dead even if other children of its parent have inherited its descriptors."""

    def enter(member: Any, answers: Channel[Any]) -> None:
        if member.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with member as g:
            try:
                g.barrier()
            except MemberDied as died:
                answers.put((died.ranks, str(died).partition("rank 1 ")[2]))

    answers: Channel[Any] = Channel(across="processes")
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=enter, args=(one, answers)) for one in collective.members(3)]
    for child in children:
        child.start()
    assert [answers.get() for _ in "02"] == [((1,), "ended before it joined")] * 2
    for child in children:
        child.join()
        child.close()


def test_member_dropped_by_all_processes_counts_as_dead() -> None:
    first, second = collective.members(2)
    with first:
        del second
        with pytest.raises(MemberDied, match="rank 1 ended before it joined"):
            first.barrier()


def test_parent_can_close_a_member_after_sending_it_to_process() -> None:
    first, second = collective.members(2)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with first, pytest.raises(TimeoutError, match="has not joined"):
        first.barrier(timeout=0.05)  # raises no GroupError: the parent can still use the group
    first, second = collective.members(2)
    with first:
        second.close()
        with pytest.raises(MemberDied, match="rank 1 ended before it joined"):
            first.barrier()


def test_explain_describes_each_operation() -> None:
    first, second = collective.members(2)
    small, large = np.ones(10), np.ones(10**6)
    assert first.explain("allreduce", small) == (
        "allreduce: exchange: each member reads the inputs of the others; "
        "shared memory, 2 members on this host"
    )
    assert "slices" in second.explain("reduce", large)
    assert "chunks" in second.explain("broadcast", small)
    assert "chunks" in second.explain("allgather", large)
    second.set_algorithm("allgather", "direct")
    assert "direct" in second.explain("allgather", large)
    assert "serialize" in second.explain("allgather", {})
    for operation, how in {
        "barrier": "each member waits for all others; no data is moved",
        "broadcast": "the root serializes its value, and each member reads the bytes",
        "gather": "the members serialize their values, and the root reads them",
        "scatter": "the root serializes the values, and each member reads its own",
        "reduce_scatter": "only arrays and tensors are allowed",
    }.items():
        assert first.explain(operation) == f"{operation}: {how}; shared memory, 2 members on this host"
    for operation in ("scatter", "split", "allreduce_with"):
        assert "serialize" in first.explain(operation, large)
    assert "each member combines its own part of all inputs" in first.explain("reduce_scatter", large)
    assert "not possible: x must be an array without a mask" in first.explain("allreduce", np.ma.ones(2))
    for moved in (np.array(["a"]), np.ones(2, ">f8"), np.ones(2, np.clongdouble)):
        assert "not possible: elements of type" in first.explain("allreduce", moved)
        assert "chunks" in first.explain("broadcast", moved)
    for combined in (
        np.ones(()),
        np.ones((2, 0)),
        np.ones((3, 3)).T,
        np.array(["2020"], "M8[D]"),
        1j * small,
    ):
        assert "exchange" in first.explain("allreduce", combined)
    with pytest.raises(ValueError, match=r"explain: operation must be one of 'barrier', .* got 'sum'"):
        first.explain("sum")


MISTAKE = """
import threading
import numpy as np
import flowchan
from flowchan import collective

members = collective.members(2)

def wait_for_the_other():
    g = members[1].__enter__()
    try:
        g.receive(0)
    except flowchan.MemberLeft as error:
        print(error)

threading.Thread(target=wait_for_the_other).start()
started = members[0].__enter__().allreduce(np.ones(3), wait=False)
raise ValueError("a mistake")
"""


def test_failed_program_does_not_wait_for_started_operations() -> None:
    """The other member waits for the program, so a wait for that member's operations would never end."""
    ended = subprocess.run([sys.executable, "-c", MISTAKE], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "ValueError: a mistake" in ended.stderr
    assert "rank 0 has left" in ended.stdout

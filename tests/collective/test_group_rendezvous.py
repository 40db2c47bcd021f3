"""Test that processes form a group from a launcher's environment variables or from an equal ``at``."""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support import scripts
from support.group_members import free_address
from support.peers import ProcessPeer, ThreadPeer
from support.preloaded_programs import Template
from support.waiting import wait_until

from flowchan import GroupError, collective
from flowchan.collective.environment import place
from flowchan.collective.one_host import SharedGroup
from flowchan.collective.rendezvous.host import meet

pytestmark = pytest.mark.usefixtures("forked_programs")

PROGRAM = """
from flowchan import collective
with collective.group() as first, collective.group() as second:
    assert first.rank == second.rank
    print(first.rank, first.size, first.allreduce(first.rank + 1), second.allgather(first.rank))
"""

LAUNCHERS = {
    "torchrun": lambda r, n: {
        "RANK": r, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511",
    },
    "Open MPI": lambda r, n: {
        "OMPI_COMM_WORLD_RANK": r, "OMPI_COMM_WORLD_SIZE": n, "OMPI_COMM_WORLD_LOCAL_SIZE": n,
    },
    "PMI": lambda r, n: {"PMI_RANK": r, "PMI_SIZE": n},
    "Slurm": lambda r, n: {"SLURM_PROCID": r, "SLURM_NTASKS": n, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"},
}  # fmt: skip


def launched(size: int, variables: Callable[[str, str], dict[str, str]]) -> list[subprocess.Popen[str]]:
    return [scripts.start("-c", PROGRAM, env=variables(str(rank), str(size))) for rank in range(size)]


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    return [process.communicate(timeout=100)[0].strip() for process in processes]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_group_forms_from_environment_of_each_launcher(launcher: str) -> None:
    assert ended(launched(3, LAUNCHERS[launcher])) == [f"{rank} 3 6 [0, 1, 2]" for rank in range(3)]


def test_concurrent_jobs_form_separate_groups() -> None:
    """The jobs stay separate even if one restarts at once with the same address."""

    def variables(port: str) -> Callable[[str, str], dict[str, str]]:
        return lambda r, n: LAUNCHERS["torchrun"](r, n) | {"MASTER_PORT": port}

    jobs = [launched(2, variables(port)) for port in ("29601", "29602")]
    for job in jobs:
        assert ended(job) == ["0 2 3 [0, 1]", "1 2 3 [0, 1]"]
    assert ended(launched(2, variables("29601"))) == ["0 2 3 [0, 1]", "1 2 3 [0, 1]"]


def test_process_without_a_launcher_is_the_only_member() -> None:
    assert place({})[:2] == (0, 1)
    assert scripts.run_python("-c", PROGRAM) == "0 1 1 [0]\n"


def test_invalid_rank_and_size_in_environment_raise() -> None:
    with pytest.raises(GroupError, match="RANK and WORLD_SIZE must be"):
        place({"RANK": "4", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("tasks", "node", "local_size"), [("2(x3),1", "0", 2), ("2(x3),1", "3", 1), ("7", "0", 7)]
)
def test_local_size_is_derived_from_slurm_task_counts(tasks: str, node: str, local_size: int) -> None:
    step = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    assert place(LAUNCHERS["Slurm"]("0", "7") | step).local_size == local_size


def test_mpi_members_on_several_hosts_need_address_and_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    with pytest.raises(
        GroupError, match=r"4 members .* on several hosts \(2 here\).*FLOWCHAN_AT.*FLOWCHAN_SECRET"
    ):
        collective.group()


@pytest.mark.parametrize("launcher", ["PMI", "torchrun"])
def test_members_on_several_hosts_form_a_group(launcher: str, torch_programs: Template) -> None:
    """They find each other with an address and a secret from the environment, or with torchrun's store."""
    if launcher == "torchrun" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: pip install torch")

    def begun(variables: dict[str, str]) -> subprocess.Popen[str]:
        env = os.environ | variables
        return torch_programs.popen("-c", PROGRAM, env=env, text=True, stdout=subprocess.PIPE)

    at = free_address()
    address, port = at.rsplit(":", 1)
    more = {
        "PMI": {"FLOWCHAN_AT": at, "FLOWCHAN_SECRET": "sixteen letters.", "MPI_LOCALNRANKS": "1"},
        "torchrun": {"MASTER_ADDR": address, "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "1"},
    }[launcher]
    job = [begun(LAUNCHERS[launcher](rank, "2") | more) for rank in "01"]
    assert ended(job) == ["0 2 3 [0, 1]", "1 2 3 [0, 1]"]


def start(found: list[Any], at: str, rank: int, size: int, timeout: float = 60) -> threading.Thread:
    def run() -> None:
        try:
            with meet(at, rank, size, timeout) as g:
                found.append(g.allgather(rank))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_members_with_equal_names_form_a_group_in_any_order() -> None:
    found: list[Any] = []
    for thread in [start(found, "any order", rank, 3) for rank in (2, 0, 1)]:
        thread.join()
    assert found == [[0, 1, 2]] * 3


def test_duplicate_ranks_and_different_sizes_raise_on_all_members() -> None:
    twice, other = ((0, 3), (1, 3), (1, 3)), ((0, 3), (1, 2))
    for come, message in ((twice, "got two processes with rank 1"), (other, "one size, got 3 from rank 0")):
        found: list[Any] = []
        threads = [start(found, f"refused {message}", *one) for one in come]
        for thread in threads:
            thread.join()
        assert [str(error) for error in found if message not in str(error)] == []


MANY_DESCRIPTORS = """
import os, resource
from concurrent.futures import ThreadPoolExecutor
from flowchan import collective
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
def member(rank):
    with collective.group(rank=rank, size=2, at=f"many descriptors {os.getpid()}", timeout=30) as g:
        return g.allreduce(1)
with ThreadPoolExecutor(2) as pool:
    print(*pool.map(member, range(2)))
"""


def test_processes_with_many_descriptors_form_a_group() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096:
        pytest.skip("the limit on descriptors is below 4,096 (see ulimit -Hn)")
    assert scripts.run_python("-c", MANY_DESCRIPTORS) == "2 2\n"


def test_member_joins_next_group_if_rank_0_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This lets a stage continue whose workers are replaced."""
    take_slot, seen = SharedGroup._take_slot, []

    def be_killed() -> None:
        SharedGroup._take_slot = lambda _: os._exit(1)  # type: ignore[method-assign]  # the memory is sent
        meet("killed", 0, 2, 60.0)

    killed = ProcessPeer(be_killed)

    def take_slot_late(member: SharedGroup) -> None:
        if not seen:
            seen.append(killed.join())
        take_slot(member)

    monkeypatch.setattr(SharedGroup, "_take_slot", take_slot_late)
    peer = ThreadPeer(meet, "killed", 1, 2, 60.0)
    wait_until(lambda: bool(seen))
    with meet("killed", 0, 2, 60.0) as first, peer.result() as second:
        sent = ThreadPeer(first.allreduce, 1)
        assert second.allreduce(2) == sent.result() == 3


def test_timeout_names_members_that_have_not_arrived() -> None:
    found: list[Any] = []
    start(found, "late", 0, 3, timeout=0.2).join()
    start(found, "late too", 1, 3, timeout=0.2).join()
    assert [type(error) for error in found] == [TimeoutError, TimeoutError]
    assert "[1, 2]" in str(found[0])
    assert "rank 1 of 3" in str(found[1])


def test_group_argument_errors_name_allowed_values() -> None:
    with pytest.raises(ValueError, match="together"):
        collective.group(rank=0)
    with pytest.raises(ValueError, match="rank must be at most 1, got 2"):
        collective.group(rank=2, size=2, at="x")
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        collective.members(0)

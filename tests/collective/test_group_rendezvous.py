"""Test that processes form a group from a launcher's environment variables, or from an equal ``at``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import resource
import signal
import socket
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import scripts
from support.group_members import free_address
from support.peers import ProcessPeer, ThreadPeer
from support.preloaded_programs import Template
from support.waiting import wait_until

from flowchan import GroupError, MemberDied, collective
from flowchan.collective import one_host
from flowchan.collective.environment import place
from flowchan.collective.one_host import SharedGroup
from flowchan.collective.rendezvous.address import meet_at
from flowchan.collective.rendezvous.folder import meet_in
from flowchan.collective.rendezvous.host import meet
from flowchan.transport import tcp
from flowchan.transport.rendezvous import Coordinator, Participant

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


LOCAL = """
from flowchan import collective
with collective.group() as g:
    print(g.local_rank, g.local_size)
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_local_rank_is_known_under_each_launcher(launcher: str) -> None:
    job = [scripts.start("-c", LOCAL, env=LAUNCHERS[launcher](rank, "2")) for rank in "01"]
    assert ended(job) == ["0 2", "1 2"]


def test_concurrent_jobs_form_separate_groups() -> None:
    """The two jobs stay separate even if one job restarts immediately with the same address."""

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
    with pytest.raises(GroupError, match="RANK must be an int from 0 to WORLD_SIZE - 1"):
        place({"RANK": "4", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("tasks", "node", "local_size"), [("2(x3),1", "0", 2), ("2(x3),1", "3", 1), ("7", "0", 7)]
)
def test_local_size_is_derived_from_slurm_task_counts(tasks: str, node: str, local_size: int) -> None:
    step = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    assert place(LAUNCHERS["Slurm"]("0", "7") | step).local_size == local_size


def test_srun_with_pmi_counts_the_tasks_of_this_node() -> None:
    """Unlike the PMI of MPICH's mpirun, srun's PMI does not report how many members this node has."""
    slurm = LAUNCHERS["Slurm"]("3", "7") | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "1"}
    both = LAUNCHERS["PMI"]("3", "7") | slurm
    assert place(both)[:2] == (3, 7)
    assert (place(both).launcher, place(both).local_size) == ("Slurm", 2)
    mpirun = both | {"MPI_LOCALNRANKS": "4"}  # in a step that srun started for mpirun
    assert (place(mpirun).launcher, place(mpirun).local_size) == ("PMI", 4)


def test_mpi_members_on_several_hosts_need_address_and_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    with pytest.raises(
        GroupError, match=r"4 members .* on several hosts \(2 on this one\).*FLOWCHAN_AT.*FLOWCHAN_SECRET"
    ):
        collective.group()


@pytest.mark.parametrize("launcher", ["PMI", "torchrun"])
def test_members_on_several_hosts_form_a_group(launcher: str, torch_programs: Template) -> None:
    """The members find each other by an address and a secret in the environment, or by torchrun's store."""
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


def on_two_nodes(rank: int, folder: Path) -> dict[str, str]:
    """Return the variables of a Slurm step that has one task on each of two nodes."""
    more = {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": str(rank)}
    more |= {"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "FLOWCHAN_FOLDER": str(folder)}
    return LAUNCHERS["Slurm"](str(rank), "2") | more


def test_slurm_nodes_meet_through_a_file_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    job = [scripts.start("-c", PROGRAM, env=on_two_nodes(rank, folder)) for rank in (1, 0)]
    assert ended(job) == ["1 2 3 [0, 1]", "0 2 3 [0, 1]"]
    assert list(folder.iterdir()) == []


def test_slurm_file_is_secret_until_all_have_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in on_two_nodes(0, tmp_path).items():
        monkeypatch.setenv(name, value)
    peer = ThreadPeer(collective.group)
    wait_until(lambda: bool(list(tmp_path.glob("slurm-0-7.0.0.*[0-9]"))))
    (file,) = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(file.read_text())["at"].startswith("127.0.0.1:")
    with meet_in(tmp_path, file.name, "", 1, 2, 60, "") as g, peer.result() as other:
        assert list(tmp_path.iterdir()) == []
        assert (g.rank, other.rank) == (1, 0)


def test_slurm_file_is_removed_when_rank_0_times_out(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\] have not arrived"):
        meet_in(tmp_path, "x", "127.0.0.1", 0, 2, 0.1, "")
    assert list(tmp_path.iterdir()) == []


def test_missing_slurm_file_raises_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=rf"rank 0 has not written {tmp_path}/x; set FLOWCHAN_FOLDER to a"):
        meet_in(tmp_path, "x", "127.0.0.1", 1, 2, 0.1, "")
    (tmp_path / "file").touch()
    with pytest.raises(GroupError, match=r"rank 0 cannot write \S+/file/x: .*; set FLOWCHAN_FOLDER"):
        meet_in(tmp_path / "file", "x", "127.0.0.1", 0, 2, 10, "")


FULL = """
import resource
from flowchan import GroupError, collective
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    collective.group()
except GroupError as error:
    print(error)
"""


def test_slurm_file_on_a_full_disk_raises_and_goes(tmp_path: Path) -> None:
    said = scripts.run_python("-c", FULL, env=on_two_nodes(0, tmp_path))
    assert said.startswith(f"group: rank 0 cannot write {tmp_path}/slurm-0-7.0.0.0: File too large; ")
    assert list(tmp_path.iterdir()) == []


ONE_JOB = """
import sys
from flowchan import collective
try:
    with collective.group(timeout=float(sys.argv[1])) as g:
        print(g.allgather(sys.argv[2]))
except TimeoutError as error:
    print(error)
"""


def test_slurm_jobs_with_the_same_address_and_secret_stay_separate(tmp_path: Path) -> None:
    shared = {"FLOWCHAN_AT": free_address(), "FLOWCHAN_SECRET": "sixteen letters."}

    def task(job: str, rank: int, timeout: float) -> subprocess.Popen[str]:
        env = on_two_nodes(rank, tmp_path) | shared | {"SLURM_JOB_ID": job}
        return scripts.start("-c", ONE_JOB, str(timeout), f"job {job}", env=env)

    def listens() -> bool:
        with contextlib.suppress(ConnectionRefusedError), tcp.dial(shared["FLOWCHAN_AT"], 60):
            return True
        return False

    first = task("7", 0, 60)
    wait_until(listens)
    assert "perhaps the secrets differ" in ended([task("8", 1, 1)])[0]
    assert ended([first, task("7", 1, 60)]) == ["['job 7', 'job 7']"] * 2


def test_slurm_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("{}")
    file.chmod(0o644)
    with pytest.raises(
        GroupError, match=r"must belong to this user and have mode 600, got owner \d+ and mode 644; "
    ):
        meet_in(tmp_path, "x", "127.0.0.1", 1, 2, 10, "")
    file.rename(tmp_path / "target")
    file.symlink_to(tmp_path / "target")
    with pytest.raises(GroupError, match=r"cannot read \S+/x: "):
        meet_in(tmp_path, "x", "127.0.0.1", 1, 2, 10, "")


JOINS = """
import sys
from flowchan import collective
with collective.group(rank=1, size=2, at=sys.argv[1], secret=b"sixteen letters.") as g:
    print(g.allreduce(2))
"""


def test_process_joins_at_the_published_port(caplog: pytest.LogCaptureFixture) -> None:
    begun: list[Any] = []

    def publish(at: str) -> None:
        begun.extend((at, scripts.start("-c", JOINS, at)))

    caplog.set_level("INFO", "flowchan.collective")
    secret = b"sixteen letters."
    with collective.group(rank=0, size=2, at="127.0.0.1:0", secret=secret, publish=publish) as g:
        assert g.allreduce(1) == 3
    at, other = begun
    assert ended([other]) == ["3"]
    assert f"rank 0 of 2 waits for the other members at {at}" in caplog.text


def test_survivors_meet_again_at_the_published_port() -> None:
    published: queue.SimpleQueue[str] = queue.SimpleQueue()

    def member(rank: int, at: str) -> Any:
        publish = (lambda at: [published.put(at) for _ in range(2)]) if rank == 0 else None
        with meet_at(at, b"sixteen letters.", rank, 3, 60, host=f"host {rank}", publish=publish) as g:
            if rank == 2:
                return None
            with pytest.raises(MemberDied):
                g.barrier()
            with g.shrink(timeout=60) as smaller:
                return smaller.allgather(rank)

    first = ThreadPeer(member, 0, "127.0.0.1:0")
    others = [ThreadPeer(member, rank, published.get(timeout=60)) for rank in (1, 2)]
    assert [one.result() for one in (first, *others)] == [[0, 1], [0, 1], None]


ARRIVES = """
import sys
from flowchan import collective
at, secret = sys.argv[1], sys.argv[2].encode() or None
for _ in range(2):
    with collective.group(size=3, at=at, secret=secret) as g:
        print(g.rank, g.allgather(g.rank))
"""


@pytest.mark.parametrize("secret", ["", "sixteen letters."], ids=["one host", "address"])
def test_processes_without_ranks_get_ranks_by_order_of_arrival(secret: str) -> None:
    at = free_address()
    job = [scripts.start("-c", ARRIVES, at, secret) for _ in range(3)]
    lines = [text.splitlines() for text in ended(job)]
    for number in range(2):
        assert sorted(each[number] for each in lines) == [f"{rank} [0, 1, 2]" for rank in range(3)]


def test_ranks_follow_the_order_of_arrival() -> None:
    with contextlib.closing(Coordinator(4)) as coordinator:
        ends = [socket.socketpair() for _ in range(4)]
        ends[1][1].close()  # this member ends before all have arrived
        hellos = [{"rank": rank, "size": 4} for rank in (None, None, 2, None)]
        came = iter([(own, hello) for (own, _), hello in zip(ends, hellos, strict=True)])
        coordinator.assemble(lambda _: next(came))
        assert coordinator.sockets == {1: ends[0][0], 2: ends[2][0], 3: ends[3][0]}
        first, last = (Participant(ends[place][1], "rank 0") for place in (0, 3))
        assert (first.receive(), last.receive()) == (1, 3)
        first.close(), last.close(), ends[2][1].close()


def test_published_address_is_open_to_members_without_ranks() -> None:
    published: queue.SimpleQueue[str] = queue.SimpleQueue()

    def member(rank: int | None, at: str) -> Any:
        publish = (lambda at: [published.put(at) for _ in range(2)]) if rank == 0 else None
        secret = b"sixteen letters."
        with collective.group(rank=rank, size=3, at=at, secret=secret, publish=publish) as g:
            return g.rank, g.allreduce(1)

    first = ThreadPeer(member, 0, "127.0.0.1:0")
    others = [ThreadPeer(member, None, published.get(timeout=60)) for _ in range(2)]
    assert sorted(one.result() for one in (first, *others)) == [(0, 3), (1, 3), (2, 3)]


def test_sizes_that_differ_raise_on_members_without_ranks() -> None:
    at, errors = free_address(), []
    for peer in [ThreadPeer(meet_at, at, b"sixteen letters.", None, size, 60) for size in (2, 3)]:
        with pytest.raises(GroupError) as info:
            peer.result()
        errors.append(str(info.value))
    assert errors[0] == errors[1]
    assert "all members must pass the same size" in errors[0]


def test_missing_members_without_ranks_time_out() -> None:
    with pytest.raises(TimeoutError, match=r"rank 0 of 3 timed out: ranks \[1, 2\] have not arrived"):
        meet("nobody else", None, 3, 0.1)
    with pytest.raises(TimeoutError, match=r"rank 0 of 3 timed out: ranks \[1, 2\] have not arrived"):
        meet_at(free_address(), b"sixteen letters.", None, 3, 0.1)


def test_unknown_port_raises_at_once() -> None:
    where: Any = {"size": 2, "at": "127.0.0.1:0", "secret": b"sixteen letters."}
    message = r"group: at must have a port that all members know, got '127.0.0.1:0'; "
    with pytest.raises(ValueError, match=message + "pass publish=, or a free port"):
        collective.group(rank=0, **where)
    with pytest.raises(ValueError, match=message + "pass the address that rank 0 publishes"):
        collective.group(rank=1, **where)
    with pytest.raises(ValueError, match=message + "pass the address that rank 0 publishes"):
        collective.group(**where)
    with pytest.raises(ValueError, match="publish needs at= and secret="):
        collective.group(rank=0, size=2, at="text", publish=print)


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
    for come, message in (
        (twice, "got two processes with rank 1"),
        (other, "the same size, got 3 from rank 0"),
    ):
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


@pytest.mark.parametrize("step", ["take_over", "_take_slot"])
def test_member_joins_next_group_if_rank_0_is_killed(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is killed before or after the other member opens the group's memory.

    A stage whose workers are replaced can continue in the next group.
    """
    place: Any = one_host if step == "take_over" else SharedGroup
    work, seen = getattr(place, step), []

    def be_killed() -> None:
        # at this point, the memory is being sent
        SharedGroup._take_slot = lambda _: signal.pause()  # type: ignore[method-assign]
        meet(f"killed before {step}", 0, 2, 60.0)

    killed = ProcessPeer(be_killed)

    def work_late(*arguments: Any) -> Any:
        if not seen:
            killed.kill()
            seen.append(killed.join())
        return work(*arguments)

    monkeypatch.setattr(place, step, work_late)
    peer = ThreadPeer(meet, f"killed before {step}", 1, 2, 60.0)
    wait_until(lambda: bool(seen))
    with meet(f"killed before {step}", 0, 2, 60.0) as first, peer.result() as second:
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

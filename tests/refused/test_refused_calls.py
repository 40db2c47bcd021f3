"""Test kernels that lack a system call (ENOSYS), and filters that refuse it (EPERM or ENOSYS).

flowchan works without the call, or raises an error that names the call. The kernel really refuses the calls,
in separate processes.
"""

from __future__ import annotations

import errno
import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import seccomp
from support.peers import wait_for_the_end_of
from support.preloaded_programs import Template

PROGRAMS = Path(__file__).with_name("programs.py")

pytestmark = pytest.mark.skipif(
    not seccomp.SUPPORTED,
    reason="the system calls are refused by their numbers on x86-64: run these on such a machine",
)

both_errors = pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=errno.errorcode.get)


def message(function: str, call: str, error: int = 0) -> str:
    command = [sys.executable, PROGRAMS, function, call, str(error)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@both_errors
def test_c10_blocked_select_sleeps_and_wakes_without_futex_waitv(error: int) -> None:
    assert message("blocked_select", "futex_waitv", error) == "sleeps item"


@both_errors
def test_c9_coroutines_wait_on_both_transports_without_futex_waitv(error: int) -> None:
    assert message("blocked_coroutines", "futex_waitv", error) == "[0, 1]"


@both_errors
def test_workers_in_processes_work_without_pidfd_open(error: int) -> None:
    assert message("run", "pidfd_open", error) == "9900"


@both_errors
def test_r4_death_of_worker_is_noticed_without_pidfd_open(error: int) -> None:
    assert message("death", "pidfd_open", error) == "4950 1"


@both_errors
def test_c12_workers_end_with_their_killed_parent_without_pidfd_open(error: int) -> None:
    command = [sys.executable, PROGRAMS, "orphans", "pidfd_open", str(error)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert [parent.stdout.readline() for _ in range(2)] == ["at work\n"] * 2
        parent.send_signal(signal.SIGKILL)
        # standard output ends only when the workers, which also have it open, have exited
        assert parent.stdout.read() == ""


@both_errors
def test_tls_works_and_ends_with_its_process_without_pidfd_open(error: int) -> None:
    pytest.importorskip("cryptography")
    command = [sys.executable, PROGRAMS, "tls", "pidfd_open", str(error)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        *words, _, first, second = program.stdout.readline().split()
        assert words == ["over", "TLS"]
        for relay in (first, second):
            wait_for_the_end_of(int(relay))


@both_errors
@pytest.mark.parametrize("call", ["memfd_create", "fallocate"])
def test_process_channel_error_names_the_refused_system_call(call: str, error: int) -> None:
    reason = (
        f"channels between processes need {call}, which is refused here, likely by the seccomp "
        "filter of a container or service manager; "
        f"allow {call} in it"
    )
    channel = message("channel", call, error)
    assert f"{error}, " in channel
    assert reason in channel
    assert message("run", call, error).startswith(f"system {reason}")
    assert message("threads", call, error) == "9900 item"


def test_process_channel_error_names_the_missing_proc_mount() -> None:
    try:
        channel = message("channel", "proc")
    except AssertionError as error:
        if "PermissionError" in str(error):
            pytest.skip("this user may not hide /proc: run this as root, or where users may make namespaces")
        raise
    reason = "channels between processes need /proc, which is not mounted here (mount -t proc proc /proc)"
    assert channel.startswith("FileNotFoundError(2, ")
    assert reason in channel
    assert message("run", "proc").startswith(f"system {reason}")
    assert message("threads", "proc") == "9900 item"


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed: pip install torch")
def test_parts_in_processes_work_without_sched_setaffinity(torch_programs: Template) -> None:
    """The code treats all errors alike, so one error is enough."""
    ended = torch_programs.run(PROGRAMS, "parts", "sched_setaffinity", errno.EPERM)
    assert (ended.returncode, ended.stdout) == (0, "(4, 3)\n"), ended.stderr

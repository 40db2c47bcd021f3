"""Test ``flowchan launch``: ranks form a group, prefix their output, and leave no processes behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import scripts
from support.local_agents import agents_of
from support.scripted_clock import ScriptedClock
from support.waiting import wait_until

from flowchan import Channel
from flowchan.cli import launch, launch_over

COMMAND = ["-c", "from flowchan.cli.commands import main; main()", "launch"]

SUMS = """
import sys
from flowchan import collective
with collective.group() as g:
    print("sum", g.allreduce(g.rank), *sys.argv[1:])
"""
NUMBERS = """
import os
names = "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"
print("numbers", *(os.environ[name] for name in names))
"""
FAILS = """
import os, signal, sys
from flowchan import collective
with collective.group() as g:
    g.barrier()
    if g.rank == 1:
        HOW
    g.barrier()
"""
WAITS = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("pid", child.pid, flush=True)
signal.pause()
"""


@pytest.fixture(scope="module", autouse=True)
def _forked_launchers() -> Iterator[None]:
    """Fork the launchers from a program that has already imported the command line.

    The ranks themselves are not forked; each is a newly started program.
    """
    with scripts.forked("flowchan.cli.commands"):
        yield


def started(tmp_path: Path, text: str, *args: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(text)
    return scripts.start(*COMMAND, *args, script)


def launch_to_end(*args: str | Path, **options: Any) -> tuple[str, str, int]:
    """Return the output, the errors and the exit code of ``flowchan launch *args``."""
    with scripts.start(*COMMAND, *args, **options) as launcher:
        return *launcher.communicate(timeout=100), launcher.returncode


def test_ranks_form_a_group_and_prefix_output_with_their_number(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SUMS)
    out, errors, code = launch_to_end("-n", "3", script, "--lr", "0.1")
    assert code == 0, errors
    assert sorted(out.splitlines()) == [f"[{rank}] sum 3 --lr 0.1" for rank in range(3)]


VARIABLES = """
import json, os
print(json.dumps({name: value for name, value in os.environ.items() if name in NAMES}))
"""


def test_ranks_get_the_environment_variables_of_torchrun(tmp_path: Path) -> None:
    """A rank's environment variables contain its rank, the sizes, the group and the restart count."""
    expected = {
        "RANK": "RANK", "LOCAL_RANK": "RANK", "ROLE_RANK": "RANK", "GROUP_RANK": "0", "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
    }  # fmt: skip
    with started(tmp_path, VARIABLES.replace("NAMES", repr(sorted(expected))), "-n", "2") as launcher:
        lines = launcher.communicate(timeout=100)[0].splitlines()
    found = {line[1]: json.loads(line.partition(" ")[2]) for line in lines}
    for rank in "01":
        assert found[rank] == {name: value.replace("RANK", rank) for name, value in expected.items()}


def test_launch_runs_a_module_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "train.py").write_text("import sys; print(__name__, __package__, *sys.argv[1:])")
    out, errors, code = launch_to_end("-n", "2", "-m", "steps.train", "-m", "--lr", "0.1", cwd=tmp_path)
    assert sorted(out.splitlines()) == [f"[{rank}] __main__ steps -m --lr 0.1" for rank in range(2)]
    assert code == 0, errors


@pytest.mark.parametrize("spelled", [["--nproc-per-node", "2"], ["--nproc_per_node=2"]])
def test_launch_accepts_nproc_per_node_like_torchrun(tmp_path: Path, spelled: list[str]) -> None:
    with started(tmp_path, "print('here')", *spelled) as launcher:
        lines = launcher.communicate(timeout=100)[0].splitlines()
    assert sorted(lines) == ["[0] here", "[1] here"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-n", "2", "--nnodes", "2"], "No such option:? '?--nnodes"),
        (["-n", "2", "--standalone"], "No such option:? '?--standalone"),
        (["-n", "2", "-m", "--lr"], "No such option:? '?--lr"),
        (["-n", "2", "nowhere.py"], "File 'nowhere.py' does not exist"),
        ([], "use either -n .* or --nproc-per-node"),
        (["-n", "2", "--nproc-per-node", "2"], "use either -n .* or --nproc-per-node"),
    ],
)
def test_launch_rejects_unknown_option_before_script(tmp_path: Path, args: list[str], message: str) -> None:
    with started(tmp_path, "print('here')", *args) as launcher:
        output, errors = launcher.communicate(timeout=100)
    assert (output, launcher.returncode) == ("", 2)
    assert re.search(message, errors)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise ValueError('no such file')", "ended with exit code 1: ValueError: no such file"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 6)", "was killed by signal 40"),
        ("sys.exit(7)", "ended with exit code 7"),
    ],
)
def test_last_line_names_the_rank_that_failed_first(tmp_path: Path, how: str, message: str) -> None:
    """The last line does not name ranks that failed only because of another rank's failure."""
    with started(tmp_path, FAILS.replace("HOW", how), "-n", "3") as launcher:
        _, errors = launcher.communicate(timeout=100)
    last = errors.splitlines()[-1]
    assert last.startswith("flowchan: rank 1 (process "), errors
    assert message in last
    assert launcher.returncode == 1


CORES = """
import os, sys
print(sorted(os.sched_getaffinity(0)))
print("an error", file=sys.stderr)
"""


@pytest.fixture
def cores() -> Iterator[list[int]]:
    """Use at most two cores on any machine."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    yield sorted(before)[:2]
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize("where", [[], ["--hosts", "local:1"]], ids=["here", "on hosts"])
def test_ranks_are_pinned_to_cores_and_log_to_files(
    tmp_path: Path, where: list[str], cores: list[int]
) -> None:
    def message(count: int, *options: str) -> list[str]:
        logs = tmp_path / f"logs {count} {len(options)}"
        args = ["-n", str(count), *where, "--log-dir", str(logs), *options]
        # a forked launcher would inherit the cores of its parent
        command = [sys.executable, *COMMAND, *args, scripts.script(tmp_path, CORES)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert (done.stdout, done.stderr) == ("", "")
        assert {(logs / str(rank) / "stderr.log").read_text() for rank in range(count)} == {"an error\n"}
        return [(logs / str(rank) / "stdout.log").read_text() for rank in range(count)]

    assert message(len(cores)) == [f"[{core}]\n" for core in cores]
    assert message(len(cores) + 1) == [f"{cores}\n"] * (len(cores) + 1)
    assert message(1, "--no-pin") == [f"{cores}\n"]


@pytest.mark.parametrize("taken", ["logs", "logs/0"])
def test_unwritable_log_dir_is_reported_in_one_line(tmp_path: Path, taken: str) -> None:
    (tmp_path / taken).parent.mkdir(exist_ok=True)
    (tmp_path / taken).touch()
    logs = tmp_path / ("logs/below" if taken == "logs" else "logs")
    with started(tmp_path, CORES, "-n", "1", "--log-dir", str(logs)) as launcher:
        _, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == 2
    assert "Traceback" not in errors
    assert f"--log-dir: can't write {tmp_path / taken}" in errors.splitlines()[-1]


@pytest.mark.parametrize("where", [[], ["--hosts", "local:1"]], ids=["here", "on hosts"])
def test_full_disk_of_log_dir_is_reported_with_the_file(tmp_path: Path, where: list[str]) -> None:
    log = tmp_path / "logs" / "0" / "stdout.log"
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    with started(tmp_path, CORES, "-n", "1", *where, "--log-dir", str(tmp_path / "logs")) as launcher:
        out, errors = launcher.communicate(timeout=100)
    assert (out, launcher.returncode) == ("", 2)
    assert f"--log-dir: can't write {log}: No space left on device" in errors.splitlines()[-1]


@pytest.mark.parametrize("where", [[], ["--hosts", "local:2"]], ids=["here", "on hosts"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_launcher_leaves_no_process_behind(tmp_path: Path, number: int, where: list[str]) -> None:
    """After Ctrl-C, SIGTERM or SIGKILL, neither a rank nor a rank's child remains."""
    with started(tmp_path, WAITS, "-n", "2", *where) as launcher:
        assert launcher.stdout is not None
        grandchildren = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
        ranks = [psutil.Process(pid).ppid() for pid in grandchildren]
        launcher.send_signal(number)
        assert launcher.wait(timeout=100) == (-number if number == signal.SIGKILL else 128 + number)
        wait_until(lambda: not any(map(psutil.pid_exists, ranks)))
        wait_until(lambda: not any(map(psutil.pid_exists, grandchildren)))


HANGING_SSH = """#!/bin/sh
case " $* " in *" -G "*) echo hostname 127.0.0.1; exit;; esac
touch "STARTED"
exec sleep 1000
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_a_host_starts_ends_the_launcher(tmp_path: Path, number: int) -> None:
    hanging, is_started = tmp_path / "bin" / "ssh", tmp_path / "started"
    hanging.parent.mkdir()
    hanging.write_text(HANGING_SSH.replace("STARTED", str(is_started)))
    hanging.chmod(0o755)
    path = f"{hanging.parent}:{os.environ['PATH']}"
    args = ["-n", "1", "--hosts", "ssh:host", scripts.script(tmp_path, SUMS)]
    with scripts.start(*COMMAND, *args, env={"PATH": path}) as launcher:
        wait_until(is_started.exists)
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == 128 + number, errors
    assert "Traceback" not in errors


def test_signal_before_the_addresses_starts_no_rank(tmp_path: Path) -> None:
    share = launch_over.Share("host", 1, 2, 1, 1, 2, "127.0.0.1", pin=False, shutdown_timeout=60)
    orders, messages = Channel(), Channel()
    orders.put(signal.SIGTERM)
    mark = tmp_path / "started"
    launch_over.run_ranks(share, ["-c", f"open({str(mark)!r}, 'w')"], orders.reader(), messages.writer())
    assert messages.get() == launch_over.RankEnded("")
    assert not mark.exists()


SAVES = """
import signal
signal.signal(signal.SIGTERM, lambda *_: print("saving", flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


class JobClock(ScriptedClock):
    sleep = staticmethod(time.sleep)


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[launch.LaunchJob, ScriptedClock]]:
    """Yield a job whose rank is writing a checkpoint, and the clock of the job."""
    lines: list[str] = []

    def tell(_rank: int, line: str, _is_error: bool) -> None:
        lines.append(line)

    clock = JobClock()
    monkeypatch.setattr(launch, "time", clock)
    job = launch.LaunchJob(1, [sys.executable, "-c", SAVES], dict(os.environ), tell, False, 30)
    with contextlib.closing(job):
        while "ready" not in lines:
            job.poll()
        job.interrupt(signal.SIGTERM)
        while "saving" not in lines:
            job.poll()
        yield job, clock


def test_rank_gets_time_for_a_checkpoint_after_a_signal(
    saving: tuple[launch.LaunchJob, ScriptedClock],
) -> None:
    job, clock = saving
    clock.now = 29.9
    job.poll()
    assert job.ranks[0].code() is None
    clock.now = 30.1
    job.run()
    assert job.ranks[0].code() == -signal.SIGKILL


def test_second_signal_kills_a_rank_that_writes_a_checkpoint(
    saving: tuple[launch.LaunchJob, ScriptedClock],
) -> None:
    job, _ = saving
    job.interrupt(signal.SIGTERM)
    job.run()
    assert job.ranks[0].code() == -signal.SIGKILL


@pytest.mark.parametrize("where", [[], ["--hosts", "local:1"]], ids=["here", "on hosts"])
def test_shutdown_timeout_limits_the_time_for_a_checkpoint(tmp_path: Path, where: list[str]) -> None:
    with started(tmp_path, SAVES, "-n", "1", "--shutdown-timeout", "0", *where) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "[0] ready\n"
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=25) == 128 + signal.SIGTERM


def test_process_group_is_not_signalled_after_its_rank_is_reaped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once an ended rank is reaped, its process id may be reused."""
    found: list[bool] = []
    monkeypatch.setattr(os, "killpg", lambda pid, _: found.append(psutil.pid_exists(pid)))
    job = launch.LaunchJob(2, [sys.executable, "-c", ""], dict(os.environ), launch.show, False, 30)
    job.run()
    job.interrupt(signal.SIGINT)
    job.interrupt(signal.SIGINT)
    job.close()
    assert found == [True] * 4


def test_ranks_on_several_hosts_form_a_group(tmp_path: Path) -> None:
    """Ranks know their global rank, their rank on the host and the host's number, as with torchrun."""
    script = tmp_path / "script.py"
    script.write_text(SUMS + NUMBERS)
    out, errors, code = launch_to_end("-n", "3", "--hosts", "local:2", script)
    assert code == 0, errors
    numbers = {0: "3 0 2 0 2", 1: "3 1 2 0 2", 2: "3 0 1 1 2"}
    expected = [f"[{rank}] {line}" for rank in range(3) for line in ("sum 3", f"numbers {numbers[rank]}")]
    assert sorted(out.splitlines()) == sorted(expected)


def test_ranks_on_hosts_run_a_script_given_by_relative_path(tmp_path: Path) -> None:
    """An agent may run in a different folder than the launcher."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print(*sys.argv)")
    out, errors, code = launch_to_end("-n", "1", "--hosts", "local:1", "script.py", "data.csv", cwd=tmp_path)
    assert (out, code) == (f"[0] {script} data.csv\n", 0), errors


def test_nproc_per_node_sets_the_number_of_ranks_per_host(tmp_path: Path) -> None:
    with started(tmp_path, NUMBERS, "--nproc-per-node", "2", "--hosts", "local:2") as launcher:
        lines = launcher.communicate(timeout=100)[0].splitlines()
    expected = [f"[{rank}] numbers 4 {rank % 2} 2 {rank // 2} 2" for rank in range(4)]
    assert sorted(lines) == expected


def test_a_rank_that_fails_on_another_host_ends_the_job(tmp_path: Path) -> None:
    text = FAILS.replace("HOW", "raise ValueError('no such file')")
    with started(tmp_path, text, "-n", "2", "--hosts", "local:2") as launcher:
        _, errors = launcher.communicate(timeout=100)
    last = errors.splitlines()[-1]
    assert last.startswith("flowchan: rank 1 (process "), errors
    assert "ended with exit code 1: ValueError: no such file, on host 'local-2'" in last
    assert launcher.returncode == 1


def test_lost_host_ends_the_job_and_is_reported_by_name(tmp_path: Path) -> None:
    with started(tmp_path, WAITS, "-n", "2", "--hosts", "local:2") as launcher:
        assert launcher.stdout is not None
        family = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
        family += [psutil.Process(pid).ppid() for pid in family]
        agents_of(psutil.Process(launcher.pid))[0].kill()
        _, errors = launcher.communicate(timeout=100)
    assert launcher.returncode == 1
    assert "Traceback" not in errors
    assert "host 'local-" in errors
    wait_until(lambda: not any(map(psutil.pid_exists, family)))

"""Send a random signal at a random time to the launcher, a rank or an agent of ``flowchan launch``."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import uuid
from pathlib import Path

import psutil
import pytest
from support import scripts
from support.local_agents import agents_of
from support.waiting import wait_until

COMMAND = ["-c", "from flowchan.cli.commands import main; main()", "launch", "-n", "2"]

PROGRAM = """
import os, subprocess, sys
from flowchan import collective
child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
with collective.group() as g:
    print("pid", os.getpid(), flush=True)
    for _ in range(400):
        assert g.allreduce(g.rank) == 1
child.kill()
child.wait()
"""

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGSTOP)


def alive(mark: str) -> list[psutil.Process]:
    """Return the processes with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LAUNCH_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def launch_and_kill(script: Path, where: list[str], chosen: random.Random) -> None:
    """Send one signal during a launch, and check how the launch ends."""
    mark = uuid.uuid4().hex
    with scripts.start(*COMMAND, *where, script, env={"LAUNCH_MARK": mark}) as launcher:
        assert launcher.stdout is not None
        # once the ranks print this line, both ranks have joined, and may even have ended
        ranks = [int(launcher.stdout.readline().split()[-1]) for _ in range(2)]
        agents = [agent.pid for agent in agents_of(psutil.Process(launcher.pid))]
        who, number = chosen.choice(["launcher", "rank", "agent"]), chosen.choice(SIGNALS)
        pid = chosen.choice({"rank": ranks, "agent": agents}.get(who) or [launcher.pid])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            if number == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
        _, errors = launcher.communicate(timeout=100)
    case = f"{number.name} for {who} {pid}: exit code {launcher.returncode}, {errors}"
    if pid == launcher.pid and number != signal.SIGSTOP:
        ended = 128 + number if number == signal.SIGTERM else -number
        assert launcher.returncode in (0, ended), case
    elif launcher.returncode:
        assert launcher.returncode == 1, case
        assert f"killed by {number.name}" in errors, case
        assert (f"(process {pid})" if pid in ranks else "local-") in errors, case
    wait_until(lambda: not alive(mark), what=lambda: (case, alive(mark)))


@pytest.mark.any_value
@pytest.mark.parametrize("where", [[], ["--hosts", "local:2"]], ids=["here", "on hosts"])
def test_launch_reports_random_deaths_and_leaves_nothing(
    tmp_path: Path, where: list[str], long_walk: bool
) -> None:
    script, chosen = scripts.script(tmp_path, PROGRAM), random.Random(os.getpid())
    with scripts.forked("flowchan.cli.commands"):
        for _ in range(50 if long_walk else 2):
            launch_and_kill(script, where, chosen)

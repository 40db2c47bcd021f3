"""Test graphs over hosts that ssh and Slurm reach: results are exact even if an agent or its connection is
lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from pool_walks import cancel_step, cut_ssh, deaths, kill_agent, nothing, run_over
from support.waiting import wait_until

from flowchan.hosts import slurm, ssh

SSH = ssh("gpu1", "gpu2", python=sys.executable)


@pytest.mark.usefixtures("sshd")
def test_graph_runs_over_ssh(tmp_path):
    run = run_over(SSH, tmp_path, nothing)
    assert [(host.name, host.agents) for host in run.stats().hosts] == [("gpu1", 1), ("gpu2", 1)]
    assert all(host.sent for host in run.stats().hosts)


@pytest.mark.usefixtures("sshd")
def test_killed_agent_over_ssh_is_replaced(tmp_path):
    run = run_over(SSH, tmp_path, kill_agent)
    (death,) = deaths(run)
    assert "was killed by SIGKILL" in death
    assert sum(host.agents for host in run.stats().hosts) == 3


@pytest.mark.usefixtures("sshd")
def test_graph_continues_without_the_ssh_that_started_its_agent(tmp_path):
    run = run_over(SSH, tmp_path, cut_ssh)
    assert deaths(run) == []
    assert [host.agents for host in run.stats().hosts] == [1, 1]


PROGRAM = """
import sys
from flowchan import Graph
from flowchan.hosts import ssh

def work(item):
    import os, signal
    print("agent", os.getppid(), file=sys.stderr, flush=True)
    signal.pause()

graph = Graph("lost")
graph.source(range(2)).map(work, on=ssh("gpu1", python=sys.executable, peer_timeout=2)).collect()
graph.run()
"""


@pytest.mark.usefixtures("sshd")
def test_agent_over_ssh_ends_when_its_program_is_killed():
    program = subprocess.Popen((sys.executable, "-c", PROGRAM), stderr=subprocess.PIPE, text=True)
    with program, program.stderr as output:
        report = next(line for line in output if line.startswith("[gpu1] agent "))
        agent = psutil.Process(int(report.split()[-1]))
        family = [agent, *agent.children(recursive=True)]
        program.kill()
    wait_until(lambda: not any(process.is_running() for process in family))


@pytest.mark.usefixtures("allocation")
def test_graph_runs_over_slurm(tmp_path):
    run = run_over(slurm(), tmp_path, nothing)
    assert [(host.name, host.agents) for host in run.stats().hosts] == [("node1", 1), ("node2", 1)]


@pytest.mark.usefixtures("allocation")
def test_agent_is_replaced_when_its_job_step_is_cancelled(tmp_path):
    run = run_over(slurm(), tmp_path, cancel_step)
    (death,) = deaths(run)
    assert "Slurm ended the agent" in death
    assert sum(host.agents for host in run.stats().hosts) == 3


CANCELLED = """
import os
from flowchan import Graph, RunError
from flowchan.hosts import slurm

def work(item):
    import signal
    print("agent", os.getppid(), flush=True)
    signal.pause()

graph = Graph("cancelled")
graph.source(range(2)).map(work, on=slurm(), workers=2).collect()
try:
    graph.run()
except RunError as error:
    print(*error.exceptions)
"""


def test_cancelled_job_fails_the_run_with_the_reason(allocation):
    command = (sys.executable, "-c", CANCELLED)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as program:
        words = [program.stderr.readline().split() for _ in range(2)]
        agents = [psutil.Process(int(word[-1])) for word in words]
        subprocess.run(("scancel", allocation), check=True)
        said, _ = program.communicate(timeout=100)
    assert "no host is left for worker" in said
    assert "node1: " in said
    assert "node2: " in said
    wait_until(lambda: not any(agent.is_running() for agent in agents))


FILE = """
from flowchan import Graph, worker

graph = Graph("told")
graph.source(range(20)).sink(lambda item: print("item", item, "on", worker().host), on="hosts", workers=2)
"""


@pytest.mark.usefixtures("sshd")
def test_command_line_hosts_are_used_for_a_graph(tmp_path):
    (tmp_path / "report.py").write_text(FILE)
    flowchan = Path(sys.executable).with_name("flowchan")
    command = (flowchan, "run", "report.py", "--hosts", f"ssh:gpu1,gpu2,python={sys.executable}")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = sorted(line for line in done.stderr.splitlines() if "item" in line)
    assert len(printed) == 20
    assert {line.split()[0] for line in printed} <= {"[gpu1]", "[gpu2]"}
    assert all(line.split()[0] == f"[{line.split()[-1]}]" for line in printed)

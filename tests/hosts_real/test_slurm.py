"""Test agents in a Slurm allocation, on a cluster with two nodes that are both this machine."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from driver import (
    STAYING,
    Driver,
    assert_agents_run_and_report_their_ends,
    assert_the_secret_is_hidden,
    end_of,
)
from support.waiting import wait_until

from flowchan.hosts.providers.provider import Launch
from flowchan.hosts.providers.slurm import slurm


def steps(job: str) -> list[str]:
    """Return the ids of the job steps that Slurm still lists."""
    command = ("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.usefixtures("allocation")
def test_each_allocated_node_runs_its_agent_and_reports_its_end():
    with Driver(slurm()) as driver:
        assert driver.provider.hosts == ("node1", "node2")
        assert driver.address == "127.0.0.1"
        report = assert_agents_run_and_report_their_ends(driver, sys.executable)
        nodes = [
            report[number]["environment"].partition("SLURMD_NODENAME=")[2].split("\0")[0] for number in (0, 1)
        ]
        assert nodes == ["node1", "node2"]


GROUP = """
import os, sys
os.environ["FLOWCHAN_FOLDER"] = sys.argv[1]
from flowchan import collective
with collective.group() as first, collective.group() as second:
    print(first.rank, first.size, first.allreduce(1), second.allgather(os.environ["SLURMD_NODENAME"]))
"""


def test_members_on_two_nodes_form_a_group(allocation, tmp_path):
    command = ("srun", f"--jobid={allocation}", "--overlap", "--nodes=2", "--ntasks-per-node=1")
    program = (sys.executable, "-c", GROUP, str(tmp_path))
    done = subprocess.run((*command, *program), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} 2 2 ['node1', 'node2']" for rank in (0, 1)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("allocation")
def test_secret_is_absent_from_command_lines_and_environments():
    with Driver(slurm()) as driver:
        assert_the_secret_is_hidden(driver)


@pytest.mark.usefixtures("allocation")
def test_output_reaches_stderr_with_the_node_name(capfd):
    with Driver(slurm()) as driver:
        driver.start(1)
        driver.receive()
        driver.order(1, "1")
        end_of(driver.started[1])
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "[node2] agent 1 is up\n[node2] a last word without an end of line\n"


def test_killed_agent_ends_with_its_job_step(allocation):
    with Driver(slurm()) as driver:
        one = driver.start(0)
        agent = psutil.Process(driver.receive()["pid"])
        one.kill()
        assert end_of(one).startswith("Slurm ended the agent node1 (")
        assert driver.has_ended(0)
        wait_until(lambda: not agent.is_running() and steps(allocation) == [])


def test_agent_ends_when_its_job_step_is_cancelled(allocation):
    with Driver(slurm()) as driver:
        one = driver.start(0)
        driver.receive()
        (step,) = (step for step in steps(allocation) if step.split(".")[1].isdigit())
        subprocess.run(("scancel", step), check=True)
        assert end_of(one).startswith("Slurm ended the agent node1 (")
        assert driver.has_ended(0)


def test_close_ends_all_job_steps(allocation):
    with Driver(slurm(), STAYING) as driver:
        for number in (0, 1):
            driver.start(number)
        agents = [psutil.Process(driver.receive()["pid"]) for _ in range(2)]
    wait_until(lambda: not any(agent.is_running() for agent in agents) and steps(allocation) == [])


@pytest.mark.usefixtures("allocation")
def test_refusal_by_srun_is_reported_with_the_node():
    with Driver(slurm()) as driver:
        subprocess.run(("scancel", "--name=flowchan-test"), check=True)
        why = end_of(driver.start(1))
        assert why.startswith("node2 could not start the agent: srun ended with code 1 (srun: ")


@pytest.mark.usefixtures("allocation")
def test_error_names_the_node_if_its_python_lacks_flowchan():
    with Driver(slurm()) as driver:
        launch = Launch(("-I", "-S", "-m", "flowchan.hosts.agent"), b"{}\n")
        driver.started[0] = one = driver.provider.start(0, launch)
        assert end_of(one).startswith(f"the Python at {sys.executable} on node1 has no flowchan")

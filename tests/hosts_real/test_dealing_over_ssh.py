"""Test the assignment of workers to hosts over ssh, and the exit of an agent whose ssh client was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest
from support.waiting import wait_until

from flowchan import HostError, pipelines, worker
from flowchan.hosts import ssh
from flowchan.run.observe.cgroups import local_cores

pytestmark = pytest.mark.usefixtures("sshd")


def where(barrier: Any, number: int) -> tuple[str, str]:
    """Return the host and the Python executable of a worker."""
    barrier.wait()  # all calls overlap, so no worker can run two of them
    return worker().host, sys.executable


def test_workers_over_ssh_run_on_the_hosts_that_were_dealt() -> None:
    """The workers have the requested number, hosts and Python executable."""
    pool = ssh({"gpu1": 1, "gpu2": 4}, python=sys.executable)
    dealt = pool.dealt(4)
    assert dealt == ("gpu1", "gpu2", "gpu2", "gpu2")
    found = pipelines.map(4, where, pipelines.Barrier(4, across="hosts"), on=pool.assigned(dealt)).join()
    assert sorted(found) == sorted((host, sys.executable) for host in dealt)


def test_hosts_over_ssh_report_their_cores_and_speeds() -> None:
    pool = ssh("gpu1", "root@gpu2", python=sys.executable)
    dealt = pool.dealt(2 * local_cores())
    assert [dealt.count(host) for host in pool.hosts] == [local_cores()] * 2
    speeds = pool.calibrate()
    assert list(speeds) == ["gpu1", "root@gpu2"]
    assert max(speeds.values()) == 1.0


def test_dealt_names_a_host_that_ssh_cannot_reach() -> None:
    with pytest.raises(HostError, match=r"down can't be reached: connect to host 127\.0\.0\.1") as raised:
        ssh("gpu1", "down", python=sys.executable).dealt(2)
    assert raised.value.host == "down"


PROGRAM = """
import sys
from flowchan import Graph
from flowchan.hosts import ssh

def work(item):
    import os, signal
    print("agent", os.getppid(), file=sys.stderr, flush=True)
    signal.pause()

graph = Graph("lost")
graph.source([1]).map(work, on=ssh("gpu1", python=sys.executable, peer_timeout=2)).collect()
graph.run()
"""


def test_agent_exits_after_its_ssh_and_program_are_killed() -> None:
    command = (sys.executable, "-c", PROGRAM)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        line = next(line for line in program.stderr if "agent " in line)
        agent = psutil.Process(int(line.split()[-1]))
        workers = agent.children()
        for client in psutil.Process(program.pid).children():
            if client.name() == "ssh":
                client.kill()
        os.kill(program.pid, signal.SIGKILL)
    assert workers
    for process in (agent, *workers):
        wait_until(lambda process=process: not process.is_running())

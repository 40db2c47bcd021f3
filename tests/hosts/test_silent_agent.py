"""Test that an agent ends even when no process reads its output."""

from __future__ import annotations

import subprocess
import sys

import psutil
from hosted import wait_ended

PROGRAM = """
import os, signal, sys
from flowchan import Graph
from flowchan.hosts.providers.child import AgentProcess
from flowchan.hosts.providers.local import Local
from flowchan.hosts.host_pool import pool_of

class Apart(Local):
    def start(self, number, launch):
        command = (sys.executable, *launch.arguments)
        return AgentProcess("apart", command, launch, lambda code, said: str(code))

def tell(item):
    print(os.getppid(), flush=True)
    signal.pause()

graph = Graph("unheard")
graph.source(range(1)).map(tell, on=pool_of("apart", Apart(1), peer_timeout=1)).collect()
graph.run()
"""


def test_agent_with_unread_stderr_ends_after_the_peer_timeout():
    """The program and the reader of the agent's output are killed together, so the agent's last messages are
    lost."""
    with subprocess.Popen((sys.executable, "-c", PROGRAM), stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        agent = psutil.Process(int(program.stderr.readline().split()[-1]))
        family = [agent, *agent.children(recursive=True)]
        program.stderr.close()
        program.kill()
    wait_ended(*family)

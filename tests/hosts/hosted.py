"""What the tests of runs over hosts share."""

from __future__ import annotations

import contextlib
import os

import psutil
from support.local_agents import agents_of
from support.waiting import wait_until

from flowchan import Run


def agents() -> list[psutil.Process]:
    """The agents that this process has started and that still run, in the order of their hosts."""
    return agents_of(psutil.Process())


def workers_of(agent: psutil.Process) -> list[psutil.Process]:
    """The processes of its workers; none once it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return agent.children()
    return []


def host_of(_: object = None) -> int:
    """Which agent the calling worker belongs to, by its process's number."""
    return os.getppid()


def hosts_named(run: Run) -> dict[str, str]:
    """The state of each host by its name."""
    return {host.name: host.state for host in run.stats().hosts}


def wait_ended(*processes: psutil.Process) -> None:
    """Returns once all of them have."""

    def ended(process: psutil.Process) -> bool:
        try:
            return process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(lambda: all(map(ended, processes)), what=lambda: processes)

"""Helpers shared by the tests of runs over hosts."""

from __future__ import annotations

import contextlib
import os

import psutil
from support.local_agents import agents_of
from support.waiting import wait_until


def agents() -> list[psutil.Process]:
    """Return the running agents that this process has started, in the order of their hosts."""
    return agents_of(psutil.Process())


def workers_of(agent: psutil.Process) -> list[psutil.Process]:
    """Return the worker processes of an agent, or an empty list if the agent has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return agent.children()
    return []


def host_of(_: object = None) -> int:
    """Return the process id of the calling worker's agent."""
    return os.getppid()


def wait_ended(*processes: psutil.Process) -> None:
    """Wait until all of the processes have ended."""

    def ended(process: psutil.Process) -> bool:
        try:
            return process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(lambda: all(map(ended, processes)), what=lambda: processes)

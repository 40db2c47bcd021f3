"""Find the agents of ``local`` and their fork servers from outside the program."""

from __future__ import annotations

import contextlib

import psutil


def agents_of(program: psutil.Process) -> list[psutil.Process]:
    """Return the agents that a program has started with ``local``."""
    found = {}
    for seed in seeds_of(program):
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in seed.children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    kind, _, number = child.name().partition(" local-")
                    if kind == "agent" and child.status() != psutil.STATUS_ZOMBIE:
                        found[int(number), child.pid] = child
    return [found[key] for key in sorted(found)]


def seeds_of(program: psutil.Process) -> list[psutil.Process]:
    """Return the fork servers of a program's agents."""
    found = []
    for child in program.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "flowchan.hosts.fork_server" in child.cmdline():
                found.append(child)
    return found

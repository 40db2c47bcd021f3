"""Test what each agent costs a program, with simulated agents."""

from __future__ import annotations

import gc
import os
import resource
import socket
import threading
from collections.abc import Iterator

import psutil
import pytest
from support.waiting import wait_until

from benchmarks.simulated_agents import simulated
from flowchan import Graph, HostError
from flowchan.hosts import local

THREADS_PER_AGENT = 2
"""The link's two native threads."""
DESCRIPTORS_PER_AGENT = 5
"""Two descriptors for each of the control stream's two channels, and one for the connection."""


def used_now() -> tuple[int, int]:
    """Return the numbers of threads and descriptors, without the socket of ``flowchan top``."""
    own = psutil.Process()
    views = [one for one in own.net_connections("unix") if one.type == socket.SOCK_STREAM]
    return own.num_threads(), len(os.listdir("/proc/self/fd")) - len(views)


def used_with(agents: int, expected: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return the numbers of threads and descriptors of this process during a run over ``agents`` agents."""
    gc.collect()  # an earlier run may have left channels in reference cycles
    may_end = threading.Event()

    def items() -> Iterator[int]:
        yield from range(agents)
        may_end.wait()

    with simulated(agents) as pool:
        graph = Graph("many agents")
        results = graph.source(items()).map(abs, on=pool, workers=agents).collect()
        run = graph.start()
        try:
            run.ready()
            if expected:
                wait_until(lambda: used_now() == expected, what=used_now)
            used = used_now()
        finally:
            may_end.set()
            found = run.wait()
    assert found[results] == list(range(agents))
    return used


def test_agent_costs_a_constant_number_of_threads_and_descriptors():
    used_with(1)  # opens resources that the process then keeps
    threads, descriptors = used_with(8)
    used_with(64, (threads + 56 * THREADS_PER_AGENT, descriptors + 56 * DESCRIPTORS_PER_AGENT))


def test_run_with_a_busy_local_worker_asks_hosts_nothing():
    """A run asks its hosts what their workers wait for only if all local workers wait."""
    may_end = threading.Event()

    def items() -> Iterator[int]:
        yield from range(8)
        may_end.wait()

    with simulated(8) as pool:
        graph = Graph("idle")
        graph.source(items()).map(abs, on=pool, workers=8).collect()
        run = graph.start()
        try:
            run.ready()
            supervisor = run._supervisor
            source = supervisor.channels.channels["source"]
            wait_until(lambda: source.stats().waiting_readers == 8, what=source.stats)
            seen = supervisor.channels.activity()
            assert seen.reading + seen.writing < len(supervisor.state.alive)
        finally:
            may_end.set()
            run.wait()


@pytest.mark.long
def test_thousand_agents_finish_a_graph_with_the_default_timeout():
    used_with(1000)


def test_pool_rejects_a_low_descriptor_limit():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    graph = Graph("too many")
    graph.source(range(64)).map(abs, on=local(64), workers=64).collect()
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with pytest.raises(
            HostError,
            match=r"the limit on descriptors must be at least \d+ for 64 agents, got 256; raise",
        ):
            graph.run()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

"""Processes are killed, and links are cut, while a host receives an output from another host (R4)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hosted import agents, workers_of
from kept_items import check, make
from support.waiting import wait_until

from benchmarks.slow_connections import cut
from flowchan import Graph, _core
from flowchan.hosts import local

pytestmark = pytest.mark.usefixtures("no_agent_stays")

SIZE = 4_000_000
LARGER_THAN_MESSAGES = 32 << 10
"""Bytes of a part of an output. All messages between two hosts are smaller."""


def make_large(number: int) -> bytes:
    return make(number, SIZE)


def check_large(item: bytes) -> int:
    return check(item, SIZE)


def kill_agent(agent: psutil.Process) -> None:
    agent.kill()


def kill_worker(agent: psutil.Process) -> None:
    (worker,) = workers_of(agent)
    worker.kill()


def cut_links(_: psutil.Process) -> None:
    assert cut() >= 2


def unread_bytes(agent: psutil.Process, other: psutil.Process) -> int:
    """Return how many bytes from the other agent wait in a socket of this agent."""
    ports = {connection.laddr.port for connection in other.net_connections()}
    ours = {one.laddr.port for one in agent.net_connections() if one.raddr and one.raddr.port in ports}
    most = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, at, _, _, queues, *_ = line.split()
        if int(at.partition(":")[2], 16) in ours:
            most = max(most, int(queues.partition(":")[2], 16))
    return most


def suspend_during_fetch(maker: psutil.Process, reader: psutil.Process) -> bool:
    """Suspend the reader's host during a fetch from the maker's host, and return whether that worked.

    The reader's host may already have all outputs that the maker's host has announced. It then requests no
    other output, so this function gives up long before the run declares a suspended host lost.
    """
    maker.suspend()
    is_requested = comes_soon(lambda: unread_bytes(maker, reader) > 0)
    if is_requested:
        reader.suspend()
    maker.resume()
    if is_requested and comes_soon(lambda: unread_bytes(reader, maker) > LARGER_THAN_MESSAGES):
        return True
    reader.resume()
    return False


def comes_soon(condition: Callable[[], bool]) -> bool:
    """Return whether a condition becomes true within half a second."""
    try:
        wait_until(condition, peer_timeout=0.5)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(
    ("deed", "of_reader"),
    [(kill_agent, False), (kill_agent, True), (kill_worker, False), (kill_worker, True), (cut_links, False)],
)
def test_items_arrive_once_despite_kills_during_fetch(
    deed: Callable[[psutil.Process], None], of_reader: bool
) -> None:
    done, made = threading.Event(), 0

    def numbers() -> Iterator[int]:
        nonlocal made
        while not done.is_set() or made % 20:
            yield made
            made += 1

    graph, pool = Graph("killed"), local(2)
    items = graph.source(numbers).map(make_large, on=pool.assigned(["local-1"]))
    checked = items.map(check_large, on=pool.assigned(["local-2"])).collect()
    with graph.start() as run:
        results = run.iter(checked)
        found = [next(results)]
        maker, reader = agents()
        while not suspend_during_fetch(maker, reader):
            found.append(next(results))
        deed(reader if of_reader else maker)
        with contextlib.suppress(psutil.NoSuchProcess):
            reader.resume()
        done.set()
        found.extend(results)
    assert found == list(range(made))
    assert _core._references() == 0

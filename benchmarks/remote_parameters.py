"""Measure 64 MB pulls and pushes between a parameter server and a client on another host."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import Case, Effort, Report, at_most
from flowchan import Channel, pipelines
from flowchan.hosts import local
from flowchan.pipelines import ParameterServer

ISOLATES = (
    "A client pulls or pushes 64 MB of float32 values over a link, several times. Two pulls are in progress "
    "at a time, as with prefetch. The baseline is a channel across hosts, which sends the same array over "
    "the link in the same direction. Both ends of the link are on this machine, so memory bandwidth limits "
    "the link; a network is slower."
)
SIZE = 64 << 20
PULL, PUSH = "remote pulls of 64 MB", "remote pushes of 64 MB"
WARM_UP = 2
"""Number of unmeasured transfers at the start."""


def measure(effort: Effort) -> Report:
    report, count = Report(), max(2, round(effort.seconds * 20))
    with ParameterServer(np.zeros(SIZE // 4, np.float32)) as server:
        client = server.client()
        works: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
            PULL: (lambda: _in_worker(_pull, client, count), lambda: _received(count)),
            PUSH: (lambda: _in_worker(_push, client, count), lambda: _sent(count)),
        }
        for work, (mine, link) in works.items():
            cases = [_case("flowchan", mine, count), _case("link", link, count)]
            own, peer = report.interleave(work, cases, effort.rounds)
            report.rows.append(at_most(1 / 0.8, own, peer))
    return report


def _case(name: str, call: Callable[[], float], count: int) -> Case:
    return Case(name, "s", lambda: ([call()], count))


def _in_worker(function: Callable[..., float], *args: Any) -> float:
    """Run a function in a worker on a host, and return the measured seconds per transfer."""
    (seconds,) = pipelines.map(1, function, *args, on=local(1)).join()
    return float(seconds)


def _pull(client: Any, count: int, worker: int) -> float:
    out = np.zeros(SIZE // 4, np.float32)
    handles = deque(client.prefetch() for _ in range(2))
    began = 0.0
    for number in range(WARM_UP + count):
        if number == WARM_UP:
            began = time.perf_counter()
        handles.popleft().wait(out)
        handles.append(client.prefetch())
    seconds = time.perf_counter() - began
    while handles:
        handles.popleft().wait()
    return seconds / count


def _push(client: Any, count: int, worker: int) -> float:
    values = np.ones(SIZE // 4, np.float32)
    for _ in range(WARM_UP):
        client.push(values).wait()
    began = time.perf_counter()
    handles = [client.push(values) for _ in range(count)]
    handles[-1].wait()
    return (time.perf_counter() - began) / count


def _received(count: int) -> float:
    channel: Channel[Any] = Channel(2, across="hosts")
    thread = threading.Thread(target=_put_all, args=(channel, count))
    thread.start()
    seconds = _in_worker(_get_all, channel, count)
    thread.join()
    return seconds


def _sent(count: int) -> float:
    channel: Channel[Any] = Channel(2, across="hosts")
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(_get_all(channel, count, 0)))
    thread.start()
    _in_worker(_put_in_worker, channel, count)
    thread.join()
    return found[0]


def _put_in_worker(channel: Channel[Any], count: int, worker: int) -> float:
    _put_all(channel, count)
    return 0.0


def _put_all(channel: Channel[Any], count: int) -> None:
    values = np.ones(SIZE // 4, np.float32)
    for _ in range(WARM_UP + count):
        channel.put(values)
    channel.close()


def _get_all(channel: Channel[Any], count: int, worker: int) -> float:
    out, began = np.zeros(SIZE // 4, np.float32), 0.0
    for number, values in enumerate(channel, 1 - WARM_UP):
        np.copyto(out, values)
        if number == 0:
            began = time.perf_counter()
    return (time.perf_counter() - began) / count

"""Measure runs over hosts whose agents are all on this machine. The peers are processes and Ray."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import ray
from ray.util.queue import Queue

from benchmarks.harness import Case, Effort, Report, Row, at_least, in_words, throughput
from benchmarks.links import LINK, move
from benchmarks.slow_connections import cut
from benchmarks.tasks import identity, megabyte
from benchmarks.wordcount import in_parallel, job, sequential
from flowchan import Channel, Graph
from flowchan.hosts import local, open_channel

ISOLATES = (
    "All hosts are agents on this machine, connected over loopback. The first run starts a process that "
    "forks the agents. For a flowchan graph, the measured time includes declaring the graph, and starting "
    "and ending agents and workers. For arrays between hosts and the comparison with Ray, the clock runs "
    "only from the first output to the last. Ray's Queue is compared with a channel whose reader is on the "
    "other end of a link. Arrays from host to host all pass through the driver. The direct path is one link "
    "between two processes. Both create a fresh array for each item. Ints from another program are put into "
    "a channel across hosts, through the channel itself or through a port."
)


def measure(effort: Effort) -> Report:
    report = Report()
    # Measure longer rounds, because the time includes the start of the workers.
    longer = replace(effort, seconds=5 * effort.seconds)
    _beside_processes(report, longer)
    _beside_a_direct_path(report, longer)
    _with_breaks(report, longer)
    _remote_puts(report, effort)
    _starts(report, effort)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        _beside_ray(report, longer)
    finally:
        ray.shutdown()
    return report


def _beside_processes(report: Report, effort: Effort) -> None:
    places = {"2 agents": local(2), "2 processes": "process"}
    cases = [throughput(name, partial(_map, place, 2), effort) for name, place in places.items()]
    far, near = report.interleave("map of the identity across hosts", cases, effort.rounds)
    report.rows.append(at_least(0.5, far, near))
    expected = sequential()
    cases = [job(name, partial(in_parallel, place), expected) for name, place in places.items()]
    far, near = report.interleave("wordcount across hosts", cases, effort.rounds)
    report.rows.append(at_least(0.9, far, near))


def _map(place: Any, workers: int, count: int) -> float:
    began = time.perf_counter()
    graph = Graph("map")
    results = graph.source(repeat(0, count)).map(identity, workers=workers, on=place, capacity=1024).collect()
    found = graph.run()[results]
    if len(found) != count:
        raise AssertionError(f"only {len(found)} of {count} items arrived")
    return time.perf_counter() - began


def _beside_a_direct_path(report: Report, effort: Effort) -> None:
    moves: dict[str, Callable[[int], float]] = {
        "over the driver": _from_host_to_host,
        "a direct path": partial(move, LINK, lambda count: map(megabyte, range(count))),
    }
    cases = [throughput(name, way, effort, scale=1 << 20, unit="B/s") for name, way in moves.items()]
    mine, direct = report.interleave("arrays of 1 MB from host to host", cases, effort.rounds)
    report.rows.append(at_least(1 / 1.5, mine, direct))


def _from_host_to_host(count: int) -> float:
    pool = local(2)
    graph = Graph("across")
    made = graph.source(range(count)).map(megabyte, on=pool["local-1"])
    return _from_first_to_last(graph, made.map(len, on=pool["local-2"]).collect(), count)


def _with_breaks(report: Report, effort: Effort) -> None:
    def shaken(count: int) -> float:
        over = threading.Event()

        def shake() -> None:
            while not over.wait(0.01):
                cut()

        shaking = threading.Thread(target=shake)
        shaking.start()
        try:
            return _map(local(1), 1, count)
        finally:
            over.set()
            shaking.join()

    moves: dict[str, Callable[[int], float]] = {
        "100 breaks a second": shaken,
        "no breaks": partial(_map, local(1), 1),
    }
    cases = [throughput(name, way, effort) for name, way in moves.items()]
    broken, whole = report.interleave(
        "map of the identity on a host, 100 breaks a second", cases, effort.rounds
    )
    report.rows.append(at_least(0.9, broken, whole))


def _remote_puts(report: Report, effort: Effort) -> None:
    ways = {"channel.put": False, "channel.writer().put": True}
    cases = [
        throughput(name, partial(_receive_remote_puts, with_port), effort) for name, with_port in ways.items()
    ]
    plain, port = report.interleave("ints from another program into a channel", cases, effort.rounds)
    report.rows.append(at_least(0.5, plain, port))


def _receive_remote_puts(with_port: bool, count: int) -> float:
    numbers: Channel[int] = Channel(1024, across="hosts")
    arguments = numbers.address, numbers.secret, with_port, count + 1
    # Spawn the program: a forked process would inherit the owner's channel instead of opening it remotely.
    program = multiprocessing.get_context("spawn").Process(target=_put_remotely, args=arguments)
    program.start()
    numbers.get()
    began = time.perf_counter()
    if sum(numbers.get() for _ in range(count)) != sum(range(1, count + 1)):
        raise AssertionError("the wrong numbers arrived")
    took = time.perf_counter() - began
    program.join()
    return took


def _put_remotely(address: str, secret: bytes, with_port: bool, count: int) -> None:
    numbers = open_channel(address, secret)
    put = numbers.writer().put if with_port else numbers.put
    for number in range(count):
        put(number)


def _starts(report: Report, effort: Effort) -> None:
    """Time a run with one item for each agent, from declaring the graph until the run has ended."""
    for agents in (4, 64 if effort.full else 8):

        def work(agents: int = agents) -> tuple[list[float], int]:
            return [_map(local(agents), agents, agents)], agents

        work_name = f"start and end of {agents} agents"
        (result,) = report.interleave(work_name, [Case("flowchan", "s", work)], effort.rounds)
        report.rows.append(Row(work_name, "none", in_words(result.figure(), "s"), "", "", True))


def _beside_ray(report: Report, effort: Effort) -> None:
    actor = ray.remote(_Identity).remote()
    ray.get(actor.call.remote(0))
    calls = partial(_stream, identity), partial(_ray_calls, actor)
    _beside(report, "ints to another process", 100, partial(move, LINK, range), _ray_queue, effort)
    _beside(report, "calls, pipelined", 50, *calls, effort)
    _beside(report, "a stream of arrays of 1 MB", 3, partial(_stream, megabyte), _ray_stream, effort, 1 << 20)


def _beside(
    report: Report,
    work: str,
    factor: float,
    ours: Callable[[int], float],
    theirs: Callable[[int], float],
    effort: Effort,
    size: int = 0,
) -> None:
    scale, unit = (size, "B/s") if size else (1, "items/s")
    ways = (("flowchan", ours), ("Ray", theirs))
    cases = [throughput(name, way, effort, scale=scale, unit=unit) for name, way in ways]
    mine, peer = report.interleave(f"compared with Ray: {work}", cases, effort.rounds)
    report.rows.append(at_least(factor, mine, peer))


class _Identity:
    def call(self, item: int) -> int:
        return item


def _ray_calls(actor: Any, count: int) -> float:
    began = time.perf_counter()
    found = ray.get([actor.call.remote(item) for item in range(count)])
    if found != list(range(count)):
        raise AssertionError("a call returned the wrong item")
    return time.perf_counter() - began


def _ray_queue(count: int) -> float:
    queue = Queue(maxsize=1024)

    @ray.remote  # type: ignore[untyped-decorator]
    def take(queue: Any, count: int) -> None:
        for _ in range(count):
            queue.get()

    taken = take.remote(queue, count)
    began = time.perf_counter()
    for item in range(count):
        queue.put(item)
    ray.get(taken)
    took = time.perf_counter() - began
    queue.shutdown()
    return took


def _ray_stream(count: int) -> float:
    @ray.remote(num_returns="streaming")  # type: ignore[untyped-decorator]
    def arrays(count: int) -> Iterator[Any]:
        for item in range(count):
            yield megabyte(item)

    began = time.perf_counter()
    for one in arrays.remote(count):
        if len(ray.get(one)) != 1 << 20:
            raise AssertionError("an array has the wrong length")
    return time.perf_counter() - began


def _stream(function: Callable[[int], Any], count: int) -> float:
    graph = Graph("stream")
    return _from_first_to_last(graph, graph.source(range(count)).map(function, on=local(1)).collect(), count)


def _from_first_to_last(graph: Graph, outputs: Any, count: int) -> float:
    """Return how many seconds all outputs would take if the workers started instantly.

    The result is extrapolated from the time between the first and the last output.
    """
    with graph.start() as run:
        coming = run.iter(outputs)
        next(coming)
        began = time.perf_counter()
        if sum(1 for _ in coming) != count - 1:
            raise AssertionError("an output is missing")
        return (time.perf_counter() - began) * count / (count - 1)

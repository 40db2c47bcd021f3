"""Measure how fast a sleeping reader wakes: the time from just before the put until just after the get."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from itertools import repeat

from benchmarks.harness import Case, Effort, Report, at_most
from benchmarks.peers import (
    CONTEXT,
    Ends,
    bounded_queue,
    multiprocessing_queue,
    processes_channel,
    threads_channel,
)

ISOLATES = (
    "One channel has one writer and one reader. The writer sleeps 2 ms before each put, so that the reader "
    "is asleep. The item is the time of the put (CLOCK_MONOTONIC, which all processes share). The rows with "
    "an OS pipe measure os.write and os.read of 8 bytes, without pickling. The quantiles cover the wake-ups "
    "of all rounds."
)

QUANTILES = (0.5, 0.99, 0.999)
PAUSE = 0.002
# Number of initial wake-ups that are not measured. The first put of a multiprocessing.Queue starts a thread.
WARM_UP = 10


def bare_pipe() -> Ends:
    reader, writer = os.pipe()
    pack, unpack = struct.Struct("q").pack, struct.Struct("q").unpack
    return Ends(
        lambda item: os.write(writer, pack(item)), lambda: unpack(os.read(reader, 8))[0], (reader, writer)
    )


MAKERS: dict[str, dict[str, Callable[[], Ends]]] = {
    "threads": {"flowchan": threads_channel, "queue.Queue": bounded_queue, "os pipe": bare_pipe},
    "processes": {
        "flowchan": processes_channel,
        "multiprocessing.Queue": multiprocessing_queue,
        "os pipe": bare_pipe,
    },
}


def measure(effort: Effort) -> Report:
    report = Report()
    count = 2000 if effort.full else 20
    for transport, makers in MAKERS.items():
        # Use the same queues in all rounds, because creating a queue is not part of a wake-up.
        cases = [_wakes(name, make(), transport, count) for name, make in makers.items()]
        mine, *peers = report.interleave(f"wake-up, {transport}", cases, effort.rounds)
        report.rows += [at_most(1, mine, peer, quantile) for peer in peers for quantile in QUANTILES]
    return report


def _wakes(name: str, ends: Ends, transport: str, count: int) -> Case:
    def work() -> tuple[Sequence[float], int]:
        start = threading.Thread if transport == "threads" else CONTEXT.Process
        writer = start(target=_put_now_and_then, args=(ends, WARM_UP + count))
        writer.start()
        get, now = ends.get, time.perf_counter_ns
        latencies = []
        for _ in repeat(None, WARM_UP + count):
            put_at = get()
            latencies.append((now() - put_at) / 1e9)
        writer.join()
        return latencies[WARM_UP:], count

    return Case(name, "s", work)


def _put_now_and_then(ends: Ends, count: int) -> None:
    put, now, sleep = ends.put, time.perf_counter_ns, time.sleep
    for _ in repeat(None, count):
        sleep(PAUSE)
        put(now())

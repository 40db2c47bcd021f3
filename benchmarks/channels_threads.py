"""Measure transfers of ints between threads of one process: 1 writer and 1 reader, and 4 of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from benchmarks.harness import Effort, Report, at_least, throughput
from benchmarks.peers import Ends, across_threads, bounded_queue, simple_queue, threads_channel

ISOLATES = (
    "One channel between threads. The threads meet at a barrier before the clock starts, and each calls put "
    "or get once per item. The clock stops when all threads have ended. SimpleQueue has no limit and cannot "
    "be closed. The default channel has room for 4,096 items, like the Queue. Its threads switch twice per "
    "4,096 items, and a switch takes 2 µs on one core and 30 to 46 µs across cores. Two threads that only "
    "release each other's lock need as long, so this is the price of a limit. A channel with room for "
    "100,000 items avoids most switches."
)


def measure(effort: Effort) -> Report:
    report = Report()
    makers: dict[str, Callable[[], Ends]] = {
        "flowchan": threads_channel,
        "flowchan, room for 100,000": partial(threads_channel, 100_000),
        "queue.SimpleQueue": simple_queue,
        "queue.Queue(4096)": bounded_queue,
    }
    for sides in (1, 4):
        moves = {name: partial(across_threads, make, sides, sides) for name, make in makers.items()}
        cases = [throughput(name, move, effort) for name, move in moves.items()]
        mine, roomy, simple, bounded = report.interleave(
            f"threads, int, {sides}→{sides}", cases, effort.rounds
        )
        report.rows += [
            at_least(0.8, mine, simple),
            replace(at_least(0.8, roomy, simple), work=f"{mine.work}, room for 100,000"),
            at_least(6, mine, bounded),
        ]
    return report

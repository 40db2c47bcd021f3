"""An int between threads of one process, capacity 1024, one by one: 1 writer → 1 reader and 4 → 4."""

from __future__ import annotations

from functools import partial

from benchmarks.harness import Effort, Report, at_least, throughput
from benchmarks.peers import across_threads, bounded_queue, simple_queue, threads_channel

ISOLATES = (
    "one channel and nothing else: threads stand at a barrier before the clock starts, each "
    "calls put or get once "
    "per item, the clock stops when all threads have ended. SimpleQueue has no bound and cannot be closed."
)


def measure(effort: Effort) -> Report:
    report = Report()
    makers = {
        "flowchan": threads_channel,
        "queue.SimpleQueue": simple_queue,
        "queue.Queue(1024)": bounded_queue,
    }
    for sides in (1, 4):
        moves = {name: partial(across_threads, make, sides, sides) for name, make in makers.items()}
        cases = [throughput(name, move, effort) for name, move in moves.items()]
        mine, simple, bounded = report.interleave(f"threads, int, {sides}→{sides}", cases, effort.rounds)
        report.rows += [at_least(0.7, mine, simple), at_least(6, mine, bounded)]
    return report

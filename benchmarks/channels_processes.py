"""Measure transfers of items between two processes: an int, a small tuple, 1 KB and 64 KB of bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from typing import Any

from benchmarks.harness import Effort, Report, Result, at_least, throughput
from benchmarks.peers import across_processes, fast_fifo, multiprocessing_queue, os_pipe, processes_channel

ISOLATES = (
    "One channel between two processes. A forked child puts, and this process gets. Both meet at a barrier "
    "before the clock starts, and the clock stops at the last get. Encoding and decoding are included. The "
    "channel has room for 1,024 items, or for 64 items of 64 KB. The OS pipe is multiprocessing.Pipe with "
    "the kernel's limit. The memory-copy baseline copies 64 KB at a time between two preallocated "
    "blocks, each with room for 64 items."
)

BIG = 64 * 1024
SLOTS = 64
MAKERS = {
    "flowchan": processes_channel,
    "multiprocessing.Queue(1024)": multiprocessing_queue,
    "faster-fifo": fast_fifo,
    "os pipe": os_pipe,
}


def measure(effort: Effort) -> Report:
    report = Report()
    mine, queue, fifo, _ = _compare(report, "int", range, effort)
    report.rows += [at_least(20, mine, queue), at_least(15, mine, fifo)]
    for name, item in (("(1, 'abc', 2.5)", (1, "abc", 2.5)), ("1 KB bytes", bytes(1024))):
        mine, queue, *_ = _compare(report, name, partial(repeat, item), effort)
        report.rows.append(at_least(10, mine, queue))
    _compare_big(report, effort)
    return report


def _compare(
    report: Report, item: str, items: Callable[[int], Iterable[Any]], effort: Effort
) -> list[Result]:
    moves = {name: partial(across_processes, make, items) for name, make in MAKERS.items()}
    cases = [throughput(name, move, effort) for name, move in moves.items()]
    return report.interleave(f"processes, {item}, 1→1", cases, effort.rounds)


def _compare_big(report: Report, effort: Effort) -> None:
    items = partial(repeat, bytes(BIG))
    moves: dict[str, Callable[[int], float]] = {
        name.replace("1024", str(SLOTS)): partial(across_processes, partial(make, SLOTS), items)
        for name, make in MAKERS.items()
    }
    moves["warm memory copy"] = _copy
    cases = [throughput(name, move, effort, scale=BIG, unit="B/s") for name, move in moves.items()]
    mine, *_, copy = report.interleave("processes, 64 KB bytes, 1→1", cases, effort.rounds)
    report.rows.append(at_least(0.5, mine, copy))


def _copy(count: int) -> float:
    # Write to the source. Otherwise, the kernel would map all of it to a single zero page. That page would
    # stay in the nearest cache, and the copy would look too fast.
    source, target = bytearray(b"x") * (BIG * SLOTS), bytearray(BIG * SLOTS)
    places = [slice(BIG * slot, BIG * (slot + 1)) for slot in range(SLOTS)]
    pairs = [(memoryview(target)[place], memoryview(source)[place]) for place in places]
    for into, out_of in pairs:
        into[:] = out_of
    began = time.perf_counter()
    for number in range(count):
        into, out_of = pairs[number % SLOTS]
        into[:] = out_of
    return time.perf_counter() - began

"""Measure transfers of arrays and tensors between two processes.

The benchmark moves 16 MB arrays, fresh tensors from 64 KB to 16 MB, and memory on loan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat
from typing import Any

import faster_fifo
import numpy as np
import torch
import torch.multiprocessing

from benchmarks.harness import Effort, Report, at_least, throughput
from benchmarks.peers import CONTEXT, Ends, multiprocessing_queue, processes_channel
from flowchan import Channel

ISOLATES = (
    "One queue between two processes. A forked child puts; this process gets and reads one byte of every "
    "page. Both meet at a barrier before the clock starts, and the clock stops at the last read. The queue "
    "has room for 8 items. 'Array' puts the same array every time. 'Fresh tensors' creates and fills a "
    "tensor for each put. The memory-copy baseline copies one array in turn to 8 preallocated arrays. "
    "In 'loans', one process gets a loan, writes one byte and puts the loan; the other gets it and reads "
    "one byte."
)

SLOTS = 8
PAGE = 4096
ARRAY = 16 << 20
TENSORS = (64 << 10, 1 << 20, 16 << 20)
SMALL_LOAN, LARGE_LOAN = 64 << 10, 64 << 20


def measure(effort: Effort) -> Report:
    torch.set_num_threads(1)
    report = Report()
    _arrays(report, effort)
    for size in TENSORS:
        _tensors(report, effort, size)
    _loans(report, effort)
    return report


def _arrays(report: Report, effort: Effort) -> None:
    items = partial(repeat, np.ones(ARRAY, np.uint8))
    makers: dict[str, Callable[[], Ends]] = {
        "flowchan": partial(processes_channel, SLOTS),
        f"multiprocessing.Queue({SLOTS})": partial(multiprocessing_queue, SLOTS),
        "faster-fifo": _roomy_fifo,
    }
    moves: dict[str, Callable[[int], float]] = {
        name: partial(_move, make, items) for name, make in makers.items()
    }
    moves["warm memory copy"] = _copy
    cases = [throughput(name, move, effort, scale=ARRAY, unit="B/s") for name, move in moves.items()]
    mine, queue, fifo, copy = report.interleave("processes, array of 16 MB, 1→1", cases, effort.rounds)
    report.rows += [at_least(20, mine, queue), at_least(5, mine, fifo), at_least(0.8, mine, copy)]


def _tensors(report: Report, effort: Effort, size: int) -> None:
    makers: dict[str, Callable[[], Ends]] = {
        "flowchan": partial(processes_channel, SLOTS),
        "torch.multiprocessing.Queue": _torch_queue,
    }
    moves = {name: partial(_move, make, partial(_fresh, size)) for name, make in makers.items()}
    cases = [throughput(name, move, effort, scale=size, unit="B/s") for name, move in moves.items()]
    work = f"processes, fresh tensors of {size >> 10} KB, 1→1"
    mine, queue = report.interleave(work, cases, effort.rounds)
    report.rows.append(at_least(1, mine, queue))


def _loans(report: Report, effort: Effort) -> None:
    sizes = {f"{LARGE_LOAN >> 20} MB on loan": LARGE_LOAN, f"{SMALL_LOAN >> 10} KB on loan": SMALL_LOAN}
    cases = [throughput(name, partial(_lend, size), effort) for name, size in sizes.items()]
    large, small = report.interleave("processes, loans, 1→1", cases, effort.rounds)
    report.rows.append(at_least(0.5, large, small))


def _fresh(size: int, count: int) -> Iterator[torch.Tensor]:
    for number in range(count):
        yield torch.full((size,), number % 256, dtype=torch.uint8)


def _roomy_fifo() -> Ends:
    peer = faster_fifo.Queue(max_size_bytes=(SLOTS + 1) * (ARRAY + 1000), maxsize=SLOTS)
    return Ends(peer.put, partial(peer.get, timeout=1e6), peer)


def _torch_queue() -> Ends:
    peer = torch.multiprocessing.get_context("fork").Queue(SLOTS)
    return Ends(peer.put, peer.get, peer)


def _move(make: Callable[[], Ends], items: Callable[[int], Iterable[Any]], count: int) -> float:
    ends = make()
    start, end = CONTEXT.Barrier(2), CONTEXT.Barrier(2)
    child = CONTEXT.Process(target=_produce, args=(ends.put, items, count, start, end))
    child.start()
    start.wait()
    began = time.perf_counter()
    for _ in range(count):
        int(ends.get()[::PAGE].sum())
    took = time.perf_counter() - began
    end.wait()  # the producer must not exit earlier, or the items of torch's queue are lost
    child.join()
    return took


def _produce(
    put: Callable[[Any], Any], items: Callable[[int], Iterable[Any]], count: int, start: Any, end: Any
) -> None:
    start.wait()
    for item in items(count):
        put(item)
    end.wait()


def _lend(size: int, count: int) -> float:
    channel: Channel[Any] = Channel(SLOTS, across="processes")
    # The first use of each block allocates its pages, so use each block once before the clock starts.
    channel.put_many(channel.loan(size, np.uint8) for _ in range(SLOTS))
    channel.get_many(SLOTS)
    start = CONTEXT.Barrier(2)
    child = CONTEXT.Process(target=_fill, args=(channel, size, count, start))
    child.start()
    start.wait()
    began = time.perf_counter()
    for _ in range(count):
        int(channel.get()[0])
    took = time.perf_counter() - began
    child.join()
    return took


def _fill(channel: Channel[Any], size: int, count: int, start: Any) -> None:
    start.wait()
    for number in range(count):
        array = channel.loan(size, np.uint8)
        array[0] = number % 256
        channel.put(array)


def _copy(count: int) -> float:
    source = np.ones(ARRAY, np.uint8)
    targets = [np.ones(ARRAY, np.uint8) for _ in range(SLOTS)]
    began = time.perf_counter()
    for number in range(count):
        np.copyto(targets[number % SLOTS], source)
    return time.perf_counter() - began

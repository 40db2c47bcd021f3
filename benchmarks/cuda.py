"""Measure CUDA tensors sent between processes; the peers are torch.multiprocessing's queue and host memory.

On a machine without a CUDA device, nothing is measured.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.multiprocessing

from benchmarks.harness import Effort, Report, at_least, throughput
from flowchan import Channel

ISOLATES = (
    "One queue on one CUDA device. A spawned child fills a fresh tensor for each put. This process gets the "
    "tensor and adds its first byte to a sum on the device. The clock starts once one tensor has arrived and "
    "stops when the device has finished all work. The queue has room for 8 items. flowchan copies an item "
    "twice on the device. torch does not copy: its receiver reads the sender's memory. 'Through host memory' "
    "is flowchan with FLOWCHAN_CUDA_IPC=0."
)

SLOTS = 8
SIZES = (64 << 10, 16 << 20, 256 << 20)
SPAWN = multiprocessing.get_context("spawn")


def measure(effort: Effort) -> Report:
    report = Report()
    if not torch.cuda.is_available():
        print("cuda: nothing is measured, because torch.cuda.is_available() is False on this machine")
        return report
    for size in SIZES:
        moves: dict[str, Callable[[int], float]] = {
            "flowchan": partial(_move, partial(Channel, SLOTS, across="processes"), size, "1"),
            "torch.multiprocessing.Queue": partial(_move, _torch_queue, size, "1"),
            "through host memory": partial(_move, partial(Channel, SLOTS, across="processes"), size, "0"),
        }
        cases = [throughput(name, move, effort, scale=size, unit="B/s") for name, move in moves.items()]
        work = f"processes, CUDA tensors of {size >> 10} KB, 1→1"
        mine, queue, host = report.interleave(work, cases, effort.rounds)
        report.rows += [at_least(1, mine, queue), at_least(1, mine, host)]
    return report


def _torch_queue() -> Any:
    return torch.multiprocessing.get_context("spawn").Queue(SLOTS)


def _move(make: Callable[[], Any], size: int, switch: str, count: int) -> float:
    queue = make()
    start, end = SPAWN.Event(), SPAWN.Event()
    os.environ["FLOWCHAN_CUDA_IPC"] = switch
    child = SPAWN.Process(target=_produce, args=(queue, size, count, start, end))
    child.start()
    del os.environ["FLOWCHAN_CUDA_IPC"]
    total = queue.get()[0].long()  # from now on, both processes have CUDA contexts and handles
    torch.cuda.synchronize()
    start.set()
    began = time.perf_counter()
    for _ in range(count):
        total += queue.get()[0]
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    end.set()  # the producer must not exit earlier, or the tensors that it owns are lost
    child.join()
    return took


def _produce(queue: Any, size: int, count: int, start: Any, end: Any) -> None:
    queue.put(torch.full((size,), 1, dtype=torch.uint8, device="cuda"))
    start.wait()
    for number in range(count):
        queue.put(torch.full((size,), number % 256, dtype=torch.uint8, device="cuda"))
    end.wait()

"""Measure the time from a publish until another process has refreshed its weights, and the size of a
delta."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.harness import Case, Effort, Report, Result, Row, at_most
from benchmarks.peers import CONTEXT
from flowchan import Channel
from flowchan.pipelines import Weights, WeightsReader

ISOLATES = (
    "1 GB of bfloat16 in 64 tensors. The timer starts when the trainer calls publish. It stops when a reader "
    "in another process on this machine has filled its tensors and replied. The baseline copies the same "
    "tensors once within one process. All memory has been touched before. For the delta, one value in a "
    "hundred changes; the percentage is the size of the delta that a reader on another machine receives."
)
TENSORS = 64
MOST_COPIES = 2
MOST_PERCENT = 3.0


def measure(effort: Effort) -> Report:
    report = Report()
    values = (1 << 29 if effort.full else 1 << 22) // TENSORS
    trained = {f"w{number}": torch.ones(values, dtype=torch.bfloat16) for number in range(TENSORS)}
    copied = {name: torch.empty_like(tensor) for name, tensor in trained.items()}
    go_on: Channel[int] = Channel(across="processes")
    refreshed: Channel[int] = Channel(across="processes")

    def publish() -> tuple[Sequence[float], int]:
        began = time.perf_counter()
        go_on.put(weights.publish())
        refreshed.get()
        return [time.perf_counter() - began], 1

    def copy() -> tuple[Sequence[float], int]:
        began = time.perf_counter()
        for name, tensor in trained.items():
            copied[name].copy_(tensor)
        return [time.perf_counter() - began], 1

    with Weights(trained) as weights:
        process = CONTEXT.Process(target=_refresh, args=(weights.reader(), go_on, refreshed))
        process.start()
        for _ in range(2):  # touch all memory before the measurement
            publish()
            copy()
        cases = [Case("flowchan", "s", publish), Case("copy of the tensors", "s", copy)]
        mine, peer = report.interleave("publish and refresh 1 GB", cases, effort.rounds)
        report.rows.append(at_most(MOST_COPIES, mine, peer))
        go_on.close()
        process.join()
        report.results.append(result := _delta(weights, trained))
    percent = result.figure()
    report.rows.append(
        Row(result.work, f"≤ {MOST_PERCENT:g} %", f"{percent:.3g} %", "", "", percent <= MOST_PERCENT)
    )
    return report


def _refresh(reader: WeightsReader, go_on: Channel[int], refreshed: Channel[int]) -> None:
    for version in go_on:
        reader.refresh(at_least=version)
        refreshed.put(version)


def _delta(weights: Weights, trained: dict[str, Any]) -> Result:
    """Return the size of a delta in percent of the weights' size."""
    reader = weights.reader()
    reader._source = dataclasses.replace(reader._source, machine="another machine")
    reader.refresh()
    before = weights.stats()
    for tensor in trained.values():
        tensor[torch.randperm(len(tensor))[: len(tensor) // 100]] = 2
    weights.publish()
    began = time.process_time()
    reader.refresh()
    cpu = time.process_time() - began
    after = weights.stats()
    percent = 100 * (after.bytes_sent - before.bytes_sent) / after.size
    return Result("delta of 1 % of bf16", "flowchan", "%", [percent], [cpu * 1e6])

"""Report on training: how workers spend their time, and how much memory parts need."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowchan.pipelines.sequential.balance import costs
from flowchan.pipelines.sequential.engine.execution import listed
from flowchan.pipelines.sequential.parts import Part, run_part
from flowchan.pipelines.sequential.skip import Skips
from flowchan.pipelines.sequential.timeline import TimelineEvent


@dataclass(frozen=True, slots=True)
class WorkerShares:
    """Shares of a worker's time during steps.

    Attributes:
        parts: Numbers of the worker's parts.
        busy: Share of its time that the worker spends computing, from 0 to 1.
        communication: Share of its time that the worker spends sending and receiving.
    """

    parts: tuple[int, ...]
    busy: float
    communication: float

    @property
    def bubble(self) -> float:
        """Share of its time that the worker spends waiting."""
        return max(0.0, 1 - self.busy - self.communication)


@dataclass(frozen=True, slots=True)
class PartBytes:
    """Memory use of a part, in bytes.

    Attributes:
        part: Number of the part.
        state: Parameters and buffers, which are stored once and belong to the program.
        gradients: Gradients of the parameters.
        activations: Peak size of the activations that forward passes keep for their backward passes.
    """

    part: int
    state: int
    gradients: int
    activations: int

    @property
    def peak(self) -> int:
        """Peak memory: the sum of state, gradients and activations."""
        return self.state + self.gradients + self.activations


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """Report on the last steps of training (at most ten).

    Attributes:
        steps: Number of steps.
        seconds: Mean duration of a step.
        workers: Shares of each worker's time.
        parts: Memory of each part.
    """

    steps: int
    seconds: float
    workers: tuple[WorkerShares, ...]
    parts: tuple[PartBytes, ...]

    @property
    def bubble(self) -> float:
        """Mean share of time that workers spend waiting."""
        return _mean([worker.bubble for worker in self.workers])

    @property
    def communication(self) -> float:
        """Mean share of time that workers spend sending and receiving."""
        return _mean([worker.communication for worker in self.workers])

    def __str__(self) -> str:
        lines = [
            f"{self.steps} steps of {self.seconds * 1e3:.3g} ms: workers wait {self.bubble:.0%}, "
            f"communication {self.communication:.0%}"
        ]
        for number, worker in enumerate(self.workers):
            lines.append(
                f"worker {number} (parts {', '.join(map(str, worker.parts))}): computes {worker.busy:.0%}, "
                f"communication {worker.communication:.0%}, waits {worker.bubble:.0%}"
            )
        for part in self.parts:
            lines.append(
                f"part {part.part}: at most {part.peak / 1e6:.3g} MB: parameters and buffers "
                f"{part.state / 1e6:.3g}, gradients {part.gradients / 1e6:.3g}, activations "
                f"{part.activations / 1e6:.3g}"
            )
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that a part keeps for one micro-batch: the graph of its forward pass, and its inputs."""

    graph: float
    inputs: float


Recorded = Sequence[Sequence[tuple[tuple[TimelineEvent, ...], float]]]
"""Events and seconds of communication, for each step and worker."""


def report(steps: Recorded, parts: Sequence[Part], kept: Sequence[Kept]) -> TrainingReport:
    """Summarise recorded steps."""
    total = sum(_span(event for events, _ in step for event in events) for step in steps)
    held = [_peak([event for events, _ in step for event in events], kept) for step in steps]
    return TrainingReport(
        len(steps),
        total / len(steps) if steps else 0.0,
        tuple(
            _shares([step[number] for step in steps], total)
            for number in range(len(steps[0]) if steps else 0)
        ),
        tuple(
            PartBytes(
                part.number,
                sum(map(_nbytes, [*part.module.parameters(), *part.module.buffers()])),
                sum(_nbytes(one) for one in part.module.parameters() if one.requires_grad),
                round(max((of[part.number] for of in held), default=0.0)),
            )
            for part in parts
        ),
    )


def _shares(steps: Sequence[tuple[tuple[TimelineEvent, ...], float]], total: float) -> WorkerShares:
    """Return how one worker spent ``total`` seconds."""
    events = [event for own, _ in steps for event in own]
    parts = {event.part for event in events if event.part is not None}
    busy = sum(event.end - event.begin for event in events)
    return WorkerShares(tuple(sorted(parts)), busy / total, sum(seconds for _, seconds in steps) / total)


def measured(parts: Sequence[Part], micro: Any) -> list[Kept]:
    """Measure, on copies of the layers, how many bytes each part keeps for one micro-batch.

    An exception raised by a layer is propagated.
    """
    value, skips, found = micro, dict[str, Tensor | None](), []
    with torch.random.fork_rng(devices=[]):
        for part in parts:
            copied = copy.deepcopy(part.module).cpu()
            inputs = sum(map(_nbytes, listed(value, skips)))
            found.append(Kept(_graph(copied, value, skips), float(inputs)))
            with torch.no_grad():
                value, skips = run_part(Part(part.number, copied), value, dict(skips))
    return found


def _graph(module: nn.Sequential, value: Any, skips: Skips) -> float:
    """Return the number of bytes that autograd saves for a part's backward pass."""
    container = nn.Sequential()
    container._modules["part"] = module
    container.training = True  # measure a training pass even if the layers are in eval mode
    return costs(container, value, "memory", torch.get_num_threads(), param_scale=0.0, skips=skips)[0] - sum(
        map(_nbytes, module.buffers())
    )


def _peak(events: Iterable[TimelineEvent], kept: Sequence[Kept]) -> list[float]:
    """Return the peak of each part's kept bytes. Before a pass is recomputed, only its inputs count."""
    ordered = sorted(events, key=lambda event: event.end)
    again = {(event.part, event.chunk) for event in ordered if event.op == "recompute"}
    now, most = [0.0] * len(kept), [0.0] * len(kept)
    for event in ordered:
        if event.part is None or event.part >= len(kept):
            continue
        size, place = kept[event.part], event.part
        if event.op == "F":
            now[place] += size.inputs if (place, event.chunk) in again else size.graph
        elif event.op == "recompute":
            now[place] += size.graph - size.inputs
        elif event.op in "BW":
            now[place] -= size.graph
        most[place] = max(most[place], now[place])
    return most


def _span(events: Iterable[TimelineEvent]) -> float:
    found = list(events)
    return max(event.end for event in found) - min(event.begin for event in found) if found else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

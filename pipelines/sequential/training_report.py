"""What a training cost: how its workers spent their time, and what its parts held."""

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
    """How a worker spent its time in steps, as shares: computing, handing activations and gradients on, and
    waiting for them."""

    parts: tuple[int, ...]
    busy: float
    communication: float

    @property
    def bubble(self) -> float:
        """The share in which it waited."""
        return max(0.0, 1 - self.busy - self.communication)


@dataclass(frozen=True, slots=True)
class PartBytes:
    """What a part holds. ``state``: its parameters and buffers, which are there once, and are the program's.
    ``gradients``: of parameters. ``activations``: what forward passes kept at once for their backward passes,
    at most."""

    part: int
    state: int
    gradients: int
    activations: int

    @property
    def peak(self) -> int:
        """All of it."""
        return self.state + self.gradients + self.activations


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """Of the last steps of a training, ten at most, which took ``seconds`` each."""

    steps: int
    seconds: float
    workers: tuple[WorkerShares, ...]
    parts: tuple[PartBytes, ...]

    @property
    def bubble(self) -> float:
        """The share of their time that workers waited."""
        return _mean([worker.bubble for worker in self.workers])

    @property
    def communication(self) -> float:
        """The share of their time that workers spent on handing things on."""
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
    """What a part keeps of a micro-batch, in bytes: of its forward pass, and of what came in."""

    graph: float
    inputs: float


Recorded = Sequence[Sequence[tuple[tuple[TimelineEvent, ...], float]]]
"""For each step and each worker: the events, and the seconds that it spent on communication."""


def report(steps: Recorded, parts: Sequence[Part], kept: Sequence[Kept]) -> TrainingReport:
    """Sum up steps."""
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
    """How one worker spent ``total`` seconds."""
    events = [event for own, _ in steps for event in own]
    parts = {event.part for event in events if event.part is not None}
    busy = sum(event.end - event.begin for event in events)
    return WorkerShares(tuple(sorted(parts)), busy / total, sum(seconds for _, seconds in steps) / total)


def measured(parts: Sequence[Part], micro: Any) -> list[Kept]:
    """What each part keeps of a micro-batch, found with copies of their layers. Raises as a layer does."""
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
    """Of a part as one layer, what autograd saves for the backward pass."""
    whole = nn.Sequential()
    whole._modules["part"] = module
    whole.training = True  # as what is measured is a training, also of layers in eval mode
    return costs(whole, value, "memory", torch.get_num_threads(), param_scale=0.0, skips=skips)[0] - sum(
        map(_nbytes, module.buffers())
    )


def _peak(events: Iterable[TimelineEvent], kept: Sequence[Kept]) -> list[float]:
    """What each part held at most. A forward pass that is done again had kept its inputs only."""
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

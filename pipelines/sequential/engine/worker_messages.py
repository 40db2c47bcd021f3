"""Messages between the program and the workers of a pipe: commands, micro-batches and answers.

A worker answers each command once. The program acts as the part before the first and after the last. It sends
their micro-batches with the commands and receives the results with the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from flowchan.pipelines.sequential.engine.plans import PartOwners
from flowchan.pipelines.sequential.parts import Casting, Part
from flowchan.pipelines.sequential.state import Numbers
from flowchan.pipelines.sequential.timeline import TimelineEvent

Loss = Callable[[Any, Any], Tensor]
Optimizers = Callable[[list[Tensor]], Optimizer]


@dataclass(frozen=True)
class Assignment:
    """Settings that a worker receives at its start.

    ``own_process``: the worker runs in a process, perhaps on one of ``hosts`` other hosts, and not on a
    thread of the program. The fields from ``trains`` on apply to a training. Only the worker of the last part
    has ``loss``. ``optimizer`` is ``None`` if the program has its own optimizer.
    """

    worker: int
    owners: PartOwners
    parts: tuple[Part, ...]
    recompute: bool
    deferred: bool
    own_process: bool
    hosts: int

    trains: bool = False
    loss: Loss | None = None
    optimizer: Optimizers | None = None
    clips: bool = False
    autocast: torch.dtype | None = None

    @property
    def total(self) -> int:
        """Number of parts of all workers."""
        return len(self.owners.of)

    @property
    def name(self) -> str:
        """Name of the stage: ``part 1`` or ``parts 0 and 2``."""
        numbers = [str(part.number) for part in self.parts]
        return f"part{'s' * (len(numbers) > 1)} {' and '.join(numbers)}"

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters of all parts of this worker."""
        return [parameter for part in self.parts for parameter in part.module.parameters()]


# Commands. ``changed`` holds the program's changes since the last command, for each part of the worker.


class Train(NamedTuple):
    """Command to run training step ``number`` in the order of ``plan``.

    Its micro-batches have ``sizes`` samples.
    """

    number: int
    sizes: tuple[int, ...]
    seed: int
    plan: str
    changed: list[Numbers]


class ScaleGradients(NamedTuple):
    """Command to multiply the gradients by ``factor`` and then update."""

    factor: float


class Evaluate(NamedTuple):
    """Command to compute the outputs of ``chunks`` micro-batches in ``eval`` mode.

    They run in the order of ``plan``.
    """

    chunks: int
    plan: str
    changed: list[Numbers]


class SaveState(NamedTuple):
    """Command to return a copy of the state of the optimizers."""

    changed: list[Numbers]


class LoadState(NamedTuple):
    """Command to load the states of the optimizers, one for each part of the worker."""

    optimizers: list[Any]
    changed: list[Numbers]


class Forward(NamedTuple):
    """Command to compute the outputs of a call.

    ``keeps_graph``: a backward pass may follow. ``modes`` lists for each part of the worker whether each
    module is in training mode and whether each parameter requires grad; ``None``: no change. ``dropped`` are
    the calls whose graphs are no longer needed.
    """

    number: int
    chunks: int
    seed: int
    changed: list[Numbers]
    casting: Casting
    keeps_graph: bool
    modes: Sequence[tuple[list[bool], list[bool]]] | None
    dropped: tuple[int, ...]


class Backward(NamedTuple):
    """Command to compute the gradients of call ``number``. ``keep``: another backward pass may follow."""

    number: int
    chunks: int
    keep: bool


# Micro-batches

Key = tuple[str, int, int]
"""Purpose, part, and micro-batch. The purpose is ``"F"`` (forward step), ``"B"`` (backward step) or ``"T"``
(target of the loss)."""


class Item(NamedTuple):
    """Input for the step ``key``."""

    key: Key
    content: Any


class PartFailure(NamedTuple):
    """Exception of a part, sent in place of its output."""

    part: int
    error: Any


# Answers


class WorkerAnswer(NamedTuple):
    """Result of a command.

    The worker of the last part reports the ``loss`` of a step. ``square`` is the sum of squares of all
    gradients. ``gradients`` are those of the parameters. ``communication`` is the CPU time in seconds spent
    on sending and receiving. ``changed`` holds the changes of a worker on another host, for each part.
    ``optimizers`` holds the saved states of its optimizers, for each part.
    """

    worker: int
    events: tuple[TimelineEvent, ...] = ()
    loss: Tensor | None = None
    square: float = 0.0
    gradients: list[Tensor | None] | None = None
    communication: float = 0.0
    changed: Sequence[Numbers] = ()
    failure: PartFailure | None = None
    optimizers: Sequence[Any] = ()

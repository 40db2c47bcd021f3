"""Define the messages between the program and the workers of a pipe: commands, micro-batches and answers.

A worker sends one answer to each command. To the workers, the program looks like a part before the first part
and after the last one. The program sends micro-batches along with the commands, and receives results along
with the answers.
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
    """Settings that a worker receives when it starts.

    If ``own_process`` is true, the worker runs in a process, possibly on one of ``hosts`` other hosts.
    Otherwise, it runs on a thread of the program. ``trains`` and all later fields are only for training. Only
    the worker of the last part has a ``loss``. ``optimizer`` is ``None`` if the program has its own
    optimizer.
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
        """Number of parts, over all workers."""
        return len(self.owners.of)

    @property
    def name(self) -> str:
        """Name of the stage, such as ``part 1`` or ``parts 0 and 2``."""
        numbers = [str(part.number) for part in self.parts]
        return f"part{'s' * (len(numbers) > 1)} {' and '.join(numbers)}"

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters of all the worker's parts."""
        return [parameter for part in self.parts for parameter in part.module.parameters()]


# Commands. ``changed`` lists the program's changes since the last command, for each of the worker's parts.


class Train(NamedTuple):
    """Command to run training step ``number`` in the order of ``plan``.

    ``sizes`` lists the number of samples in each micro-batch.
    """

    number: int
    sizes: tuple[int, ...]
    seed: int
    plan: str
    changed: list[Numbers]


class ScaleGradients(NamedTuple):
    """Command to multiply the gradients by ``factor`` and then update the parameters."""

    factor: float


class Evaluate(NamedTuple):
    """Command to compute the outputs of ``chunks`` micro-batches in ``eval`` mode.

    The steps run in the order of ``plan``.
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

    ``keeps_graph`` means that a backward pass may follow. For each of the worker's parts, ``modes`` lists
    whether each module is in training mode and whether each parameter requires grad. ``None`` means no
    change. ``dropped`` lists the calls whose graphs are no longer needed.
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
    """Command to compute the gradients of a call. If ``keep`` is true, another backward pass may follow."""

    number: int
    chunks: int
    keep: bool


# Micro-batches

Key = tuple[str, int, int]
"""Purpose, part, and micro-batch. The purpose is ``"F"`` (forward step), ``"B"`` (backward step) or ``"T"``
(target of the loss)."""


class Item(NamedTuple):
    """Input for the step that ``key`` identifies."""

    key: Key
    content: Any


class PartFailure(NamedTuple):
    """Exception raised by a part, sent instead of the part's output."""

    part: int
    error: Any


# Answers


class WorkerAnswer(NamedTuple):
    """Result of a command.

    Only the worker of the last part reports the ``loss`` of a step. ``square`` is the sum of squares of all
    gradients. ``gradients`` are the gradients of the parameters. ``communication`` is the CPU time spent
    sending and receiving, in seconds. ``changed`` lists the changes made by a worker on another host, for
    each of its parts.
    ``optimizers`` lists the saved states of its optimizers, for each part.
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

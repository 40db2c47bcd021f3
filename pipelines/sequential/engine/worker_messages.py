"""What the program and the workers of a pipe send each other: commands, micro-batches and answers.

A worker answers each command once. The program stands in for the part before the first one and for the part
behind the last one: it sends their micro-batches with the commands, and receives theirs with the answers.
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
    """What a worker gets at its start.

    ``own_process``: the worker does not run on a thread of the program, but perhaps on one of ``hosts`` other
    hosts. The second half is for a training: ``loss`` is for the worker of the last part alone, ``optimizer``
    is ``None`` if the gradients are for an optimizer of the program.
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
        """The number of parts of all workers."""
        return len(self.owners.of)

    @property
    def name(self) -> str:
        """``part 1``, or ``parts 0 and 2``."""
        numbers = [str(part.number) for part in self.parts]
        return f"part{'s' * (len(numbers) > 1)} {' and '.join(numbers)}"

    @property
    def parameters(self) -> list[Tensor]:
        """Those of all parts."""
        return [parameter for part in self.parts for parameter in part.module.parameters()]


# Commands. ``changed`` holds, for each part of the worker, what the program has changed since the last
# command.


class Train(NamedTuple):
    """Do training step ``number`` with micro-batches of ``sizes`` samples, in the order of ``plan``."""

    number: int
    sizes: tuple[int, ...]
    seed: int
    plan: str
    changed: list[Numbers]


class ScaleGradients(NamedTuple):
    """Multiply the gradients, then update."""

    factor: float


class Evaluate(NamedTuple):
    """Compute the outputs of ``chunks`` micro-batches in ``eval`` mode, in the order of ``plan``."""

    chunks: int
    plan: str
    changed: list[Numbers]


class Forward(NamedTuple):
    """Compute the outputs of a call.

    ``keeps_graph``: a backward pass may follow. ``modes`` tells for each part of the worker whether each
    module trains and whether each parameter requires a gradient; ``None``: as before. The graphs of the calls
    in ``dropped`` are not needed any more.
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
    """Compute the gradients of call ``number``. ``keep``: perhaps not for the last time."""

    number: int
    chunks: int
    keep: bool


# Micro-batches

Key = tuple[str, int, int]
"""What something is for, the part, and the micro-batch: ``"F"`` a forward step, ``"B"`` a backward step,
``"T"`` the target of a loss."""


class Item(NamedTuple):
    """Something that the step of ``key`` needs."""

    key: Key
    content: Any


class PartFailure(NamedTuple):
    """An exception of a part, in place of what the part would have made."""

    part: int
    error: Any


# Answers


class WorkerAnswer(NamedTuple):
    """The result of a command.

    ``loss`` of the step comes from the worker of the last part; ``square`` is the sum of the squares of all
    gradients, ``gradients`` are those of the parameters. ``communication`` is how many seconds of a core the
    worker spent on sending and receiving. ``changed`` holds, for each part, what a worker on another host has
    changed.
    """

    worker: int
    events: tuple[TimelineEvent, ...] = ()
    loss: Tensor | None = None
    square: float = 0.0
    gradients: list[Tensor | None] | None = None
    communication: float = 0.0
    changed: Sequence[Numbers] = ()
    failure: PartFailure | None = None

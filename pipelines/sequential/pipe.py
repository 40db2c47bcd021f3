"""``Sequential``: an ``nn.Sequential`` whose parts work at the same time, each on a thread or in a process of
its own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from flowchan import Graph
from flowchan.declare.places import PLACES
from flowchan.pipelines.sequential import balance as balancing
from flowchan.pipelines.sequential.checks import (
    check_choices,
    check_sendable,
    checked_counts,
    checked_devices,
    checked_module,
)
from flowchan.pipelines.sequential.cut import CHUNKS, Cut
from flowchan.pipelines.sequential.graphless import NoModule, ending_graph, without_gradient
from flowchan.pipelines.sequential.inference import Inference
from flowchan.pipelines.sequential.parts import Part, compute_threads
from flowchan.pipelines.sequential.schedule import Schedule
from flowchan.pipelines.sequential.timeline import Timeline
from flowchan.pipelines.sequential.training import Training
from flowchan.pipelines.sequential.values import split
from flowchan.pipelines.sequential.worker import Loss, Optimizers


class Sequential(NoModule):
    """An ``nn.Sequential``, or a list of layers, in parts through which batches or micro-batches follow each
    other.

    ``parts``: how many, or a list with the number of layers in each. Which layers they have is measured with
    the first batch, or by ``balance`` with ``sample``, a usual batch: the part that takes longest
    (``"time"``) or needs most bytes (``"memory"``) is as small as possible. ``on="process"`` gives each part
    a process with a copy of its layers. ``chunks``: into how many micro-batches a call or a training step
    splits a batch; ``None``: at most 8, as large as pays. ``devices``: one for each part; inputs are moved
    there. A pipe that won't be quicker than the module warns, once.

    ``pipe(x)`` gives what ``module(x)`` gives under ``torch.no_grad()``, in the module's own mode. What can
    be wrong raises ``TypeError`` or ``ValueError`` before anything starts; a part that fails raises
    ``StageError``. Workers start with the first batch and stay until :meth:`close`, the end of a ``with``
    block, or until nobody has the pipe any more. Several threads may use one pipe at the same time.
    """

    def __init__(
        self,
        module: nn.Sequential | Iterable[nn.Module],
        parts: int | Sequence[int] = 2,
        *,
        on: Literal["thread", "process"] = "thread",
        chunks: int | None = None,
        balance: Literal["time", "memory"] | None = None,
        sample: Any = None,
        devices: Sequence[torch.device | str] | None = None,
    ) -> None:
        self.module = checked_module(module)
        """The plain module. Its parameters are the pipe's."""
        counts = checked_counts(parts, len(self.module))
        check_choices(on, chunks, balance, sample, counts)
        number = counts if isinstance(counts, int) else len(counts)
        places = checked_devices(devices, number, on)
        if isinstance(counts, int) and balance is not None:
            threads = compute_threads(number) if PLACES[on].apart else torch.get_num_threads()
            micro = split(sample, chunks or CHUNKS, "sample")[0]
            counts = balancing.best_split(balancing.costs(self.module, micro, balance, threads), number)
        self.on, self.chunks = on, chunks
        self._cut = Cut(self.module, counts, on, chunks, places)
        if PLACES[on].apart:
            check_sendable(self.parts)
        else:
            for part in self.parts:
                part.module.to(part.device)
        self._inference = Inference(self._cut, type(self).__name__)
        self._training: Training | None = None
        weakref.finalize(self, self._inference.forget)  # a forgotten pipe leaves nothing

    @property
    def parts(self) -> list[Part]:
        """The parts, whose layers are the module's own."""
        return self._cut.parts

    def __call__(self, x: Any) -> Any:
        """The module's output for a batch: a tensor, or tuples, lists and dictionaries of tensors that have
        the batch as their first dimension. It is split along that into micro-batches, and the outputs are
        joined. ``RuntimeError`` while a training of the pipe goes on, ``ValueError`` for an input that
        requires a gradient. The output has no graph: where the plain module's would have one, a backward pass
        from it raises ``RuntimeError``."""
        self._raise_if_training("use training.evaluate(x), or leave its with block")
        return ending_graph(self._inference.call(without_gradient(x)), self.module)

    def stream(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Inference: the output for each batch, in order, without a graph. Batches are not split, and asked
        for as there is room: all parts have work, and at most ``2 * parts + 3`` batches are between the two
        ends. When ``batches`` raises, that is raised after the outputs of the batches before.
        ``RuntimeError`` while a training of the pipe goes on, ``ValueError`` for a batch that requires a
        gradient."""
        self._raise_if_training("use training.evaluate(x), or leave its with block")
        return self._inference.stream(map(without_gradient, batches), keep=self)

    def training(
        self,
        *,
        loss: Loss,
        optimizer: Optimizers | None = None,
        schedule: Schedule = "1f1b",
        workers: int | None = None,
        recompute: bool = False,
        clip: float | None = None,
        autocast: torch.dtype | None = None,
    ) -> Training:
        """Training of the module: use it in a ``with`` block, and call its ``step(x, target)`` for each
        batch.

        ``loss(output, target)`` gives the mean over a batch, as torch's losses do. ``optimizer(parameters)``
        makes an optimizer for a part, where its parameters are; ``None``: yours is outside, and after a step
        the module's parameters have their ``grad``. ``schedule``: ``"gpipe"``, ``"1f1b"`` or
        ``"interleaved"``, for which fewer ``workers`` than parts hold several each. ``recompute``:
        activations are not kept for the backward pass but computed again. ``clip``: the largest norm of all
        gradients together. ``autocast``: the type for ``torch.autocast``, as ``torch.bfloat16``. Raises
        ``TypeError`` or ``ValueError`` for what is wrong, ``RuntimeError`` while another training goes on.
        """
        self._raise_if_training("leave its with block first")
        self._training = Training(
            self.module,
            self.parts,
            self.on,
            self.chunks or CHUNKS,
            self._cut.split,
            loss=loss,
            optimizer=optimizer,
            schedule=schedule,
            workers=workers,
            recompute=recompute,
            clip=clip,
            autocast=autocast,
        )
        return self._training

    @property
    def graph(self) -> Graph:
        """The graph of the inference, for ``flowchan viz``."""
        return self._inference.graph

    def timeline(self) -> Timeline:
        """What each part did and when, for the batches until now; the last 100,000 events are kept. A step is
        a batch. After a training begins, also what its workers did in its last ten steps, which count from 0
        on as well."""
        trained = self._training.timeline().events if self._training is not None else []
        return Timeline([*self._inference.events.copy(), *trained], repr(self))

    def state_dict(self) -> dict[str, Any]:
        """That of the plain module, with what the training that goes on has learned."""
        training = self._active()
        return self.module.state_dict() if training is None else training.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Loads into the plain module, and so into the parts. Returns and raises what the module's own
        does."""
        training = self._active()
        return (self.module if training is None else training).load_state_dict(state, strict)

    def _active(self) -> Training | None:
        """The training that goes on."""
        return self._training if self._training is not None and self._training.active else None

    def _raise_if_training(self, remedy: str) -> None:
        if self._active() is not None:
            raise RuntimeError(f"a training of this pipe goes on: {remedy}")

    def close(self) -> None:
        """Ends the workers and waits for them; calls that are going on end with ``Closed``. May be called
        again."""
        self._inference.close()

    def __enter__(self) -> Sequential:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "processes" if PLACES[self.on].apart else "threads"
        chunks = f"up to {CHUNKS}" if self.chunks is None else self.chunks
        return f"Sequential: {', '.join(map(str, self.parts))}; on {where}, {chunks} chunks"

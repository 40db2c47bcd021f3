"""``Sequential``: a module whose parts work at the same time, each on a thread or in a process of
its own."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _BatchNorm

from flowchan import Graph
from flowchan.declare.placements import Placement, placement_argument
from flowchan.items.arguments import refuses_misspelt
from flowchan.pipelines.sequential import balance as balancing
from flowchan.pipelines.sequential.autograd import Differentiable
from flowchan.pipelines.sequential.checks import (
    check_choices,
    check_joining,
    check_sendable,
    check_switches,
    checked_counts,
    checked_devices,
    checked_module,
    counts_by_name,
    has_own_way,
    raise_for_own_ways,
    raise_if_lazy,
    refuse_sharded,
    refuse_sharded_layers,
)
from flowchan.pipelines.sequential.cut import CHUNKS, Cut
from flowchan.pipelines.sequential.engine.plans import Function, Written
from flowchan.pipelines.sequential.engine.schedule import Schedule
from flowchan.pipelines.sequential.engine.worker_messages import Loss, Optimizers
from flowchan.pipelines.sequential.inference import Inference
from flowchan.pipelines.sequential.parts import Part, casting_here, compute_threads
from flowchan.pipelines.sequential.tensor_trees import Inputs, split, tensors, without_gradient
from flowchan.pipelines.sequential.timeline import REMEMBERED, Timeline, TimelineEvent
from flowchan.pipelines.sequential.tracing import Traced
from flowchan.pipelines.sequential.training import Training, TrainingOptions


class Sequential(nn.Module):
    """A module in parts through which batches or micro-batches follow each other: a module with the plain
    module's layers, parameters and ``state_dict``, used as that is. ``module`` is an ``nn.Sequential``, a
    list of layers, or any module whose forward ``torch.fx`` can trace, which is cut into segments of it.

    ``parts``: how many, a list with the number of layers in each, or the names of the layers that all parts
    but the first begin with. Which layers they have is measured with the first batch, or by ``balance`` with
    ``sample``, a usual batch: the part that takes longest (``"time"``) or needs most bytes (``"memory"``,
    with parameters ``param_scale`` times, for their gradients and what an optimizer remembers) is as small as
    possible. ``on="process"`` gives each part a process, which computes with the program's own parameters in
    shared memory; on a pool (``flowchan.hosts``) it has copies, and what either side changes is sent.
    ``chunks``: into how many micro-batches a call or a training step splits a batch; ``None``: at most 8, as
    large as pays.
    ``devices``: one for each part; inputs are moved there. ``recompute``: activations are not kept for the
    backward pass but computed again. ``deferred_batch_norm``: running statistics are those of whole batches;
    ``False``: of each micro-batch. ``dim``: which dimension of inputs and outputs is the batch.
    ``join(outputs)`` makes the output of those of the micro-batches, which are concatenated without it. A
    pipe that won't be quicker than the module warns, once.

    ``pipe(x)`` gives what ``module(x)`` gives, with a graph where that has one: a backward pass goes back
    through the parts. What can be wrong raises ``TypeError`` or ``ValueError`` before anything starts; a part
    that fails raises ``StageError``. Workers start with the first batch and stay until :meth:`close`, the end
    of a ``with`` block, or until nobody has the pipe any more. Several threads may use one pipe at the same
    time.
    """

    module: nn.Module
    """The plain module. Its layers are the pipe's."""
    _layers: nn.Sequential
    _traced: Traced | None

    @refuses_misspelt("Sequential")
    def __init__(
        self,
        module: nn.Module | Iterable[nn.Module],
        parts: int | Sequence[int] | Sequence[str] = 2,
        *,
        on: Literal["thread", "process"] | Placement = "thread",
        chunks: int | None = None,
        balance: Literal["time", "memory"] | None = None,
        sample: Any = None,
        param_scale: float = 1.0,
        devices: Sequence[torch.device | str] | None = None,
        recompute: bool = False,
        deferred_batch_norm: bool = True,
        dim: int = 0,
        join: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if isinstance(module, nn.Module):
            refuse_sharded_layers(module)
        traced, names = None, _names(parts)
        if has_own_way(module):
            raise_if_lazy(cast("nn.Module", module))
            traced = Traced(cast("nn.Module", module), names)
        layers = checked_module(module) if traced is None else traced.layers
        if names:
            parts = counts_by_name(names, list(layers._modules)) if traced is None else [1] * len(layers)
        counts = checked_counts(parts, len(layers))
        check_joining(dim, join)
        check_choices(on, chunks, balance, sample, param_scale, dim, counts)
        check_switches(recompute=recompute, deferred_batch_norm=deferred_batch_norm)
        number = counts if isinstance(counts, int) else len(counts)
        place = placement_argument("Sequential", on)
        places = checked_devices(devices, number, place)
        super().__init__()
        if isinstance(counts, int) and balance is not None:
            threads = compute_threads(number) if place.apart else torch.get_num_threads()
            micro = split(sample, chunks or CHUNKS, "sample", dim)[0]
            costs = balancing.costs(layers, micro, balance, threads, param_scale=param_scale)
            counts = balancing.best_split(costs, number)
        self.on, self.chunks = on, chunks
        self._recompute, self._deferred = recompute, deferred_batch_norm
        # Not registered as layers of the pipe: the pipe has the module's own layers, under their names.
        module = layers if traced is None else traced.module
        vars(self).update(module=module, _layers=layers, _traced=traced)
        for own in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            vars(self)[own] = vars(module)[own]
        self._begin(counts, places, dim, join)
        if place.apart:
            check_sendable(self.parts)
        else:
            for part in self.parts:
                part.module.to(part.device)

    def _begin(
        self,
        counts: int | Sequence[int],
        places: Sequence[torch.device] | None,
        dim: int,
        join: Callable[[list[Any]], Any] | None,
    ) -> None:
        """What is not copied with a pipe."""
        name, numbers = type(self).__name__, itertools.count()
        self._events: deque[TimelineEvent] = deque(maxlen=REMEMBERED)
        on = placement_argument(name, self.on)
        verify = None if self._traced is None else self._traced.verify
        self._cut = Cut(self._layers, counts, on, self.chunks, places, dim, join, verify)
        self._inference = Inference(self._cut, name, numbers, self._events)
        options = self._recompute, self._deferred
        self._graphs = Differentiable(self._cut, name, *options, numbers, self._events)
        self._training: Training | None = None
        weakref.finalize(self, self._inference.forget)  # a forgotten pipe leaves nothing
        weakref.finalize(self, self._graphs.forget)

    @property
    def parts(self) -> list[Part]:
        """The parts, whose layers are the module's own."""
        return self._cut.parts

    # --- as a module ---

    @property
    def training(self) -> bool:
        """The plain module's mode."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in vars(self):
            self.module.training = mode

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._layers)

    def __getitem__(self, index: int | slice) -> Any:
        """A layer, or some of them as a plain ``nn.Sequential``."""
        return self._layers[index]

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        if self._traced is not None:
            raise TypeError(
                "Sequential: the segments of a traced module can't be replaced; make another pipe"
            )
        self._layers[index] = layer

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: all but what runs."""
        state = vars(self).copy()
        for name in ("_cut", "_inference", "_graphs", "_training", "_events"):
            del state[name]
        cut = self._cut
        return {**state, "_cutting": (cut.counts, cut.devices, cut.dim, cut.join)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = state.copy()
        cutting = state.pop("_cutting")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin(*cutting)

    # --- batches ---

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's output for a batch: a tensor, or tuples, lists and dictionaries of tensors and
        ``None`` that have the batch as their first dimension, or ``dim``; several arguments are the first
        layer's. They are split along that into micro-batches, and the outputs are joined. The output has a
        graph where the plain module's has one. ``RuntimeError`` while a training of the pipe
        goes on."""
        if torch.compiler.is_compiling():  # what threads and processes do is not for the compiler to see
            return _uncompiled(self, *inputs, **named)
        return self._called(*inputs, **named)

    def _called(self, *inputs: Any, **named: Any) -> Any:
        self._raise_if_training("use training.evaluate(x), or leave its with block")
        self._raise_for_changes()
        if torch._C._is_tracing():
            raise RuntimeError("a Sequential in parts can't be traced; trace the plain module, pipe.module")
        if torch.autograd.forward_ad._current_level >= 0:
            raise RuntimeError("forward derivatives don't go through a Sequential in parts; take pipe.module")
        x = inputs[0] if len(inputs) == 1 and not named else Inputs(inputs, named)
        if (torch.is_grad_enabled() and self._has_graph(x)) or casting_here() or self._counts():
            return self._graphs.call(x)
        return self._inference.call(x)

    def _raise_for_changes(self) -> None:
        refuse_sharded_layers(self.module)
        if self._cut.on.apart:
            refuse_sharded(self.module, "a part's process", 'use on="thread"')
        elif self._traced is not None:
            refuse_sharded(self.module, "a pipe that was cut by tracing", "give an nn.Sequential")
        if self._traced is not None:
            self._traced.check()
        else:
            raise_for_own_ways(self._layers)

    def _has_graph(self, x: Any) -> bool:
        return any(one.requires_grad for one in self.module.parameters()) or any(
            one.requires_grad for one in tensors(x)
        )

    def _counts(self) -> bool:
        """Whether a layer gathers the statistics of a batch."""
        return self._deferred and any(
            layer.training and isinstance(layer, _BatchNorm) for layer in self.module.modules()
        )

    def stream(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Inference: the output for each batch, in order, without a graph. Batches are not split, and asked
        for as there is room: all parts have work, and at most ``2 * parts + 3`` batches are between the two
        ends. When ``batches`` raises, that is raised after the outputs of the batches before.
        ``RuntimeError`` while a training of the pipe goes on or in ``torch.autocast``, which does not reach
        the parts of a stream, ``ValueError`` for a batch that requires a gradient."""
        self._raise_if_training("use training.evaluate(x), or leave its with block")
        self._raise_for_changes()
        if casting_here():
            raise RuntimeError("torch.autocast does not reach the parts of a stream: call pipe(x) in it")
        checked = (without_gradient(batch, "call pipe(x)") for batch in batches)
        return self._inference.stream(checked, keep=self)

    @refuses_misspelt("trainer")
    def trainer(
        self,
        *,
        loss: Loss,
        optimizer: Optimizers | None = None,
        schedule: Schedule | Written | Function | None = None,
        workers: int | None = None,
        recompute: bool | None = None,
        clip: float | None = None,
        autocast: torch.dtype | None = None,
    ) -> Training:
        """Training of the module by whole steps: use what it gives in a ``with`` block, and call its
        ``step(x, target)`` for each batch. It is quicker than a loss of ``pipe(x)``, for backward passes
        begin before all forward passes are done, and the parts update themselves; but it takes only a loss
        that is a mean.

        ``loss(output, target)`` gives the mean over a batch, as torch's losses do. ``optimizer(parameters)``
        makes an optimizer for a part, where its parameters are; ``None``: yours is outside, and after a step
        the module's parameters have their ``grad``. ``schedule=None`` takes ``"dualpipev"``, for which the
        first batch cuts each part into two, where ``parts`` was a number and there are layers enough, else
        ``"1f1b"``; or it is ``"gpipe"``, ``"1f1b"``,
        ``"zbh1"``, or with several parts per worker ``"interleaved"`` with fewer ``workers``, ``"zbv"`` and
        ``"dualpipev"`` with two each; or one of your own, as text with a line for each worker, or a function
        of worker, workers, parts and chunks that gives steps, or such a line. ``recompute``:
        activations are not kept for the backward pass but computed again; ``None``: as the pipe does.
        ``clip``: the largest norm of all gradients together. ``autocast``: the type for ``torch.autocast``,
        as ``torch.bfloat16``. Raises ``TypeError`` or ``ValueError`` for what is wrong, ``RuntimeError``
        while another training goes on.
        """
        self._raise_if_training("leave its with block first")
        self._raise_for_changes()
        refuse_sharded(self.module, "a training by steps", "take the loss of pipe(x)")
        if self._cut.dim:
            raise ValueError(
                f"Sequential: a training splits along dimension 0, not dim={self._cut.dim}; "
                "take the loss of pipe(x)"
            )
        again = self._recompute if recompute is None else recompute
        options = TrainingOptions(loss, optimizer, again, clip, autocast, self._deferred)
        self._training = Training(self._cut, options, schedule, workers)
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
        return Timeline([*self._events.copy(), *trained], repr(self))

    def _raise_if_training(self, remedy: str) -> None:
        if self._training is not None and self._training.active:
            raise RuntimeError(f"a training of this pipe goes on: {remedy}")

    def close(self) -> None:
        """Ends the workers and waits for them; calls that are going on end with ``Closed``. May be called
        again."""
        self._inference.close()
        self._graphs.close()

    def __enter__(self) -> Sequential:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        words = {"thread": "threads", "process": "processes"}
        where = words.get(self._cut.on.name, self._cut.on.name)
        chunks = f"up to {CHUNKS}" if self.chunks is None else self.chunks
        return f"Sequential: {', '.join(map(str, self.parts))}; on {where}, {chunks} chunks"


_uncompiled = _disable_dynamo(Sequential._called)
"""``torch.compile`` of a pipe, or of what it is in, leaves it as it is."""


def _names(parts: Any) -> list[str]:
    """The layers that parts begin with, if these are said by their names."""
    named = isinstance(parts, (list, tuple)) and parts and all(isinstance(name, str) for name in parts)
    return list(parts) if named else []

"""Define ``Sequential``, a module that runs its parts at the same time, on threads or in processes."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Unpack, cast

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _BatchNorm

from flowchan import Graph
from flowchan.declare.options import shows
from flowchan.declare.placements import placement_argument
from flowchan.items.arguments import refuses_misspelt
from flowchan.pipelines.sequential import balance as balancing
from flowchan.pipelines.sequential.autograd import Differentiable
from flowchan.pipelines.sequential.checks import (
    check_choices,
    check_container,
    check_joining,
    check_sendable,
    check_switches,
    checked_counts,
    checked_devices,
    checked_module,
    counts_by_name,
    needs_tracing,
    raise_if_lazy,
    refuse_sharded,
    refuse_sharded_layers,
)
from flowchan.pipelines.sequential.cut import CHUNKS, Cut
from flowchan.pipelines.sequential.engine.plans import Function, Written
from flowchan.pipelines.sequential.engine.schedule import Schedule
from flowchan.pipelines.sequential.engine.worker_messages import Loss, Optimizers
from flowchan.pipelines.sequential.inference import Inference
from flowchan.pipelines.sequential.parts import Part, compute_threads, current_casting
from flowchan.pipelines.sequential.pipe_options import SequentialOptions, SequentialSettings
from flowchan.pipelines.sequential.tensor_trees import Inputs, split, tensors, without_gradient
from flowchan.pipelines.sequential.timeline import REMEMBERED, Timeline, TimelineEvent
from flowchan.pipelines.sequential.tracing import Traced
from flowchan.pipelines.sequential.training import Training, TrainingOptions
from flowchan.public import public


@public
class Sequential(nn.Module):
    """Module that runs its parts at the same time, on different micro-batches.

    A pipe replaces the plain module: it has the same layers, parameters and ``state_dict``, and ``pipe(x)``
    returns the output of ``module(x)``. Gradients flow back through the parts. Workers start with the first
    batch. The workers run until :meth:`close` is called, a ``with`` block is left, or the pipe is
    garbage-collected. Several threads may use one pipe. If the pipe cannot be faster than its module, it
    warns once.

    Args:
        module: An ``nn.Sequential``, a list of layers, or a module that ``torch.fx`` can trace.
        parts: The number of parts, the number of layers in each part, or the names of the first layers of
            parts 1, 2, ….
        **options: Keyword options of the pipe:
            on (str or pool): ``"thread"`` (default), ``"process"`` (with shared parameters), or a host pool
                (with synchronised copies).
            chunks (int): Micro-batches per call or training step (default: at most 8, each large enough to be
                worthwhile).
            balance (str): Cost to distribute evenly, ``"time"`` or ``"memory"`` (default: time, with the
                first batch).
            sample: A typical batch on which ``balance`` measures the layers (default: none).
            param_scale (float): For ``"memory"``: factor by which to multiply the parameters' size in bytes,
                to account for gradients and optimizer state (default: 1).
            devices (list): One device per part; inputs are moved to it (default: the device of the layers).
            recompute (bool): Recompute activations in the backward pass instead of keeping them (default:
                False).
            deferred_batch_norm (bool): True if running statistics cover whole batches, False if they cover
                micro-batches (default: True).
            dim (int): Batch dimension of inputs and outputs (default: 0).
            join (callable): Function that combines the list of micro-batch outputs (default: concatenation).

    Raises:
        TypeError: An argument has the wrong type, or the module cannot be cut.
        ValueError: An argument has an invalid value.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from flowchan.pipelines import Sequential
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> x = torch.ones(16, 4)
        >>> with Sequential(model, parts=2, on="process") as pipe:
        ...     loss = pipe(x).square().mean()
        ...     loss.backward()
        >>> torch.allclose(loss, model(x).square().mean())
        True
    """

    module: nn.Module
    """The plain module, whose layers the pipe uses."""
    _layers: nn.Sequential
    _traced: Traced | None

    @refuses_misspelt("Sequential", SequentialOptions.__annotations__)
    @shows(SequentialOptions, SequentialSettings)
    def __init__(
        self,
        module: nn.Module | Iterable[nn.Module],
        parts: int | Sequence[int] | Sequence[str] = 2,
        **options: Unpack[SequentialOptions],
    ) -> None:
        settings = SequentialSettings(**options)
        if isinstance(module, nn.Module):
            refuse_sharded_layers(module)
        traced, names = None, _names(parts)
        if needs_tracing(module):
            raise_if_lazy(cast("nn.Module", module))
            traced = Traced(cast("nn.Module", module), names)
        layers = checked_module(module) if traced is None else traced.layers
        if names:
            parts = counts_by_name(names, list(layers._modules)) if traced is None else [1] * len(layers)
        counts = checked_counts(parts, len(layers))
        check_joining(settings.dim, settings.join)
        check_choices(settings, counts)
        check_switches(recompute=settings.recompute, deferred_batch_norm=settings.deferred_batch_norm)
        number = counts if isinstance(counts, int) else len(counts)
        place = placement_argument("Sequential", settings.on)
        places = checked_devices(settings.devices, number, place)
        super().__init__()
        if isinstance(counts, int) and settings.balance is not None:
            threads = compute_threads(number) if place.own_process else torch.get_num_threads()
            micro = split(settings.sample, settings.chunks or CHUNKS, "sample", settings.dim)[0]
            costs = balancing.costs(
                layers, micro, settings.balance, threads, param_scale=settings.param_scale
            )
            counts = balancing.best_split(costs, number)
        self.on, self.chunks = settings.on, settings.chunks
        self._recompute, self._deferred = settings.recompute, settings.deferred_batch_norm
        # The pipe registers the module's layers under their own names. Registering the module itself would
        # change the keys of state_dict.
        module = layers if traced is None else traced.module
        vars(self).update(module=module, _layers=layers, _traced=traced)
        for own in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            vars(self)[own] = vars(module)[own]
        self._begin(counts, places, settings.dim, settings.join)
        if place.own_process:
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
        """Create the attributes that copies of a pipe must not share."""
        name, numbers = type(self).__name__, itertools.count()
        self._events: deque[TimelineEvent] = deque(maxlen=REMEMBERED)
        on = placement_argument(name, self.on)
        verify = None if self._traced is None else self._traced.verify
        self._cut = Cut(self._layers, counts, on, self.chunks, places, dim, join, verify)
        self._inference = Inference(self._cut, name, numbers, self._events)
        options = self._recompute, self._deferred
        self._graphs = Differentiable(self._cut, name, *options, numbers, self._events)
        self._training: Training | None = None
        # End the workers when the pipe is garbage-collected.
        weakref.finalize(self, self._inference.forget)
        weakref.finalize(self, self._graphs.forget)

    @property
    def parts(self) -> list[Part]:
        """Return the parts, which contain the module's own layers."""
        return self._cut.parts

    # --- module interface ---

    @property
    def training(self) -> bool:
        """Return the training mode of the plain module."""
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
        """Return a layer, or a slice of the layers as a plain ``nn.Sequential``."""
        return self._layers[index]

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        if self._traced is not None:
            raise TypeError(
                "Sequential: the segments of a traced module cannot be replaced; create another pipe"
            )
        self._layers[index] = layer

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, without workers or runs."""
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
        """Compute the module's output for a batch.

        The batch is split into micro-batches along ``dim``, and their outputs are joined. The output requires
        grad if the plain module's output would.

        Args:
            inputs: Arguments of the first layer: tensors, or nested tuples, lists and dicts of tensors and
                ``None``.
            named: Keyword arguments of the first layer.

        Returns:
            The output, with the structure of the module's output.

        Raises:
            TypeError: The batch or the output contains something other than tensors and ``None``.
            ValueError: The tensors' batch sizes differ.
            RuntimeError: The pipe is in training.
            StageError: A layer failed on a micro-batch.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from flowchan.pipelines import Sequential
            >>> with Sequential([nn.Linear(4, 8), nn.Linear(8, 1)]) as pipe:
            ...     pipe(torch.ones(16, 4)).shape
            torch.Size([16, 1])
        """
        if torch.compiler.is_compiling():  # torch must not compile code that uses threads and processes
            return _uncompiled(self, *inputs, **named)
        return self._called(*inputs, **named)

    def _called(self, *inputs: Any, **named: Any) -> Any:
        self._raise_if_training("use training.evaluate(x), or leave the trainer's with block")
        self._raise_for_changes()
        if torch._C._is_tracing():
            raise RuntimeError("Sequential: a pipe cannot be traced; trace the plain module, pipe.module")
        if torch.autograd.forward_ad._current_level >= 0:
            raise RuntimeError("Sequential: forward-mode derivatives are not supported; use pipe.module")
        x = inputs[0] if len(inputs) == 1 and not named else Inputs(inputs, named)
        if (torch.is_grad_enabled() and self._has_graph(x)) or current_casting() or self._counts():
            return self._graphs.call(x)
        return self._inference.call(x)

    def _raise_for_changes(self) -> None:
        refuse_sharded_layers(self.module)
        if self._cut.on.own_process:
            refuse_sharded(self.module, "a process of a part", 'use on="thread"')
        elif self._traced is not None:
            refuse_sharded(self.module, "a traced pipe", "pass an nn.Sequential")
        if self._traced is not None:
            self._traced.check()
        else:
            check_container(self._layers)

    def _has_graph(self, x: Any) -> bool:
        return any(one.requires_grad for one in self.module.parameters()) or any(
            one.requires_grad for one in tensors(x)
        )

    def _counts(self) -> bool:
        """Return True if any layer updates its running statistics in this call."""
        return self._deferred and any(
            layer.training and isinstance(layer, _BatchNorm) for layer in self.module.modules()
        )

    def stream(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Compute the outputs for a series of batches, without gradients.

        Batches are not split; instead, the parts work on different batches at the same time. The next batch
        is requested when the pipe has room for it. At most ``2 * parts + 3`` batches are in the pipe at a
        time.

        Args:
            batches: Inputs of the module, one per batch. If the iterable raises, the exception is raised
                after the outputs of the earlier batches.

        Returns:
            An iterator over the outputs, in the order of the batches.

        Raises:
            RuntimeError: The pipe is in training, or ``torch.autocast`` is on, which streams do not support.
            ValueError: A batch requires grad.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from flowchan.pipelines import Sequential
            >>> with Sequential([nn.Linear(4, 8), nn.Linear(8, 1)]) as pipe:
            ...     for output in pipe.stream(torch.ones(size, 4) for size in (1, 2)):
            ...         print(output.shape)
            torch.Size([1, 1])
            torch.Size([2, 1])
        """
        self._raise_if_training("use training.evaluate(x), or leave the trainer's with block")
        self._raise_for_changes()
        if current_casting():
            raise RuntimeError(
                "Sequential: torch.autocast does not reach the parts of a stream; call pipe(x) instead"
            )
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
        """Prepare step-by-step training of the module, for use in a ``with`` block.

        A step is faster than ``loss(pipe(x)).backward()``: backward passes start before all forward passes
        are done, and each part updates its own parameters. The loss must be a mean over the batch.

        Args:
            loss: Function of output and target that returns the mean over the batch, like torch's losses.
            optimizer: Function that takes a list of parameters and returns an optimizer. ``None``: each step
                adds to the ``grad`` of the module's parameters, for your own optimizer.
            schedule: ``"gpipe"``, ``"1f1b"`` or ``"zbh1"`` with one part per worker, ``"interleaved"`` with
                several, ``"zbv"`` or ``"dualpipev"`` with two. Your own schedule is text with one line per
                worker, or a function. The function takes worker, workers, parts and chunks, and returns steps
                or a line. ``None``: ``"dualpipev"`` if ``parts`` is a number and each part can be cut in two,
                else ``"1f1b"``.
            workers: Number of workers; ``None``: the number that the schedule needs.
            recompute: Recompute activations in the backward pass; ``None``: as in the pipe.
            clip: Maximum norm of all gradients together; ``None``: no clipping.
            autocast: Type for ``torch.autocast``, such as ``torch.bfloat16``; ``None``: no autocast.

        Returns:
            A :class:`Training`, whose ``step(x, target)`` trains on one batch.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: An argument has an invalid value, or the schedule cannot run.
            RuntimeError: The pipe is already in training.

        Example:
            >>> from functools import partial
            >>> import torch
            >>> from torch import nn
            >>> from flowchan.pipelines import Sequential
            >>> pipe = Sequential([nn.Linear(4, 8), nn.Linear(8, 1)])
            >>> sgd = partial(torch.optim.SGD, lr=0.1)
            >>> x, target = torch.ones(16, 4), torch.zeros(16, 1)
            >>> with pipe.trainer(loss=nn.MSELoss(), optimizer=sgd) as training:
            ...     losses = [float(training.step(x, target)) for _ in range(3)]
            >>> losses[-1] < losses[0]
            True
        """
        self._raise_if_training("leave the trainer's with block first")
        self._raise_for_changes()
        refuse_sharded(self.module, "step-by-step training", "compute the loss yourself from pipe(x)")
        if self._cut.dim:
            raise ValueError(
                f"Sequential: dim must be 0 for step-by-step training, got dim={self._cut.dim}; "
                "compute the loss yourself from pipe(x)"
            )
        again = self._recompute if recompute is None else recompute
        options = TrainingOptions(loss, optimizer, again, clip, autocast, self._deferred)
        self._training = Training(self._cut, options, schedule, workers)
        return self._training

    @property
    def graph(self) -> Graph:
        """Return the inference graph, for ``flowchan viz``."""
        return self._inference.graph

    def timeline(self) -> Timeline:
        """Return the recorded forward and backward passes of all parts.

        Returns:
            The timeline has at most the last 100,000 events; each batch counts as a step. After training, it
            includes the last ten training steps, which are also numbered from 0.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from flowchan.pipelines import Sequential
            >>> with Sequential([nn.Linear(4, 8), nn.Linear(8, 1)]) as pipe:
            ...     output = pipe(torch.ones(16, 4))
            ...     events = pipe.timeline().events
        """
        trained = self._training.timeline().events if self._training is not None else []
        return Timeline([*self._events.copy(), *trained], repr(self))

    def _raise_if_training(self, remedy: str) -> None:
        if self._training is not None and self._training.active:
            raise RuntimeError(f"Sequential: this pipe is already in training; {remedy}")

    def close(self) -> None:
        """End the workers and wait until they have ended.

        Calls in progress raise ``Closed``. A second call has no effect.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from flowchan.pipelines import Sequential
            >>> pipe = Sequential([nn.Linear(4, 8), nn.Linear(8, 1)])
            >>> output = pipe(torch.ones(16, 4))
            >>> pipe.close()
        """
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
"""``torch.compile`` does not compile a pipe, even inside a compiled module."""


def _names(parts: Any) -> list[str]:
    """Return ``parts`` if it contains layer names, or an empty list if it contains numbers."""
    named = isinstance(parts, (list, tuple)) and parts and all(isinstance(name, str) for name in parts)
    return list(parts) if named else []
